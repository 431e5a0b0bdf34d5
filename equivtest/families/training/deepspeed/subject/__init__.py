"""Subjects that train a perceptron with DeepSpeed's ZeRO-3 engine and torch's optimizers.

Each rank returns its own partitions. Nothing is gathered for the judgement.

Source: deepspeed/runtime/engine.py and runtime/zero/stage3.py; deepspeed/utils/tensor_fragment.py,
safe_get_local_fp32_param and its like (0.19.8).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from equivtest.cases.subject import Answers, Given
from equivtest.errors import Unsupported
from equivtest.families.training.data_parallel.subject import DataParallelRun
from equivtest.families.training.deepspeed.case import EngineCase
from equivtest.families.training.deepspeed.subject.fetch import FLAG, joined_deepspeed, restore_linear
from equivtest.families.training.subject import STATE_KEYS, Mlp

TAG = "saved"


def deepspeed_mlp_all_gather(case: EngineCase, mesh: DeviceMesh, given: Given) -> Answers:
    return run(case, mesh, given, by_all_reduce=False)


def deepspeed_mlp_all_reduce(case: EngineCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Fetches parameters by all_reduce if several are fetched together."""
    return run(case, mesh, given, by_all_reduce=True)


def run(case: EngineCase, mesh: DeviceMesh, given: Given, *, by_all_reduce: bool) -> Answers:
    return live(DeepSpeedRun(case, mesh, given, by_all_reduce=by_all_reduce))


def live(visit: DeepSpeedRun) -> Answers:
    """Returns the answers of a run, then destroys its engine and undoes DeepSpeed's change to `functional.linear`."""
    try:
        return visit.answers()
    finally:
        visit.engine.destroy()
        restore_linear(joined_deepspeed(visit.mesh.device_type))


@contextmanager
def shared_folder(mesh: DeviceMesh) -> Iterator[str]:
    """Yields the path of a temporary folder that all ranks use. The first rank makes and removes it."""
    is_first, told = mesh.get_local_rank() == 0, [""]
    if is_first:
        told = [tempfile.mkdtemp(prefix="equivtest-")]
    try:
        dist.broadcast_object_list(told, group_src=0, group=mesh.get_group())
        yield told[0]
        dist.barrier(mesh.get_group())
    finally:
        if is_first:
            shutil.rmtree(told[0], ignore_errors=True)


def number_alike(init: Any, mesh: DeviceMesh) -> None:
    """Makes all ranks count the parameters of their next engine from the same number.

    DeepSpeed counts the parameters of a process and compares the counts between ranks. DeepSpeed refuses an engine if
    one rank has partitioned more parameters before than another rank, for example in a mesh without the other ranks
    (0.19.8).
    """
    following = torch.tensor(init.param_id, device=mesh.device_type)
    dist.all_reduce(following, dist.ReduceOp.MAX, mesh.get_group())
    init.param_id = int(following)


class DeepSpeedRun(DataParallelRun):
    case: EngineCase

    def __init__(self, case: EngineCase, mesh: DeviceMesh, given: Given, *, by_all_reduce: bool) -> None:
        self.by_all_reduce = by_all_reduce
        self.initial = given
        super().__init__(case, mesh, given)

    def build(self) -> nn.Module:
        deepspeed = joined_deepspeed(self.mesh.device_type)
        self.utils, self.options = deepspeed.utils, deepspeed.zero.config.DeepSpeedZeroConfig
        if self.case.stage == 3:
            number_alike(deepspeed.zero.Init, self.mesh)
        self.model = self.make_model()
        if self.case.leaf:
            self.utils.set_z3_leaf_modules(self.model, [Mlp])
        optimizer = super().make_optimizer()
        self.engine: Any = deepspeed.initialize(model=self.model, optimizer=optimizer, config=self.config())[0]
        return self.model

    def make_model(self) -> Mlp:
        model = Mlp(self.case, self.initial)
        model.wrap()
        return model

    def config(self) -> dict[str, object]:
        case = self.case
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": case.micro_batches,
            "gradient_clipping": case.gradient_clipping,
            "gradient_predivide_factor": case.predivide_factor,
            "prescale_gradients": case.prescales,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {
                "stage": case.stage,
                "reduce_bucket_size": case.reduce_bucket_numel,
                "reduce_scatter": case.reduce_scatter,
                **self.stage_config(),
            },
        }

    def stage_config(self) -> dict[str, object]:
        """Returns the options of the configuration that only one stage has."""
        case = self.case
        return {
            FLAG: self.by_all_reduce,
            "stage3_param_persistence_threshold": case.persistence_numel,
            "stage3_prefetch_bucket_size": case.prefetch_numel,
            "stage3_max_reuse_distance": case.reuse_numel,
            "stage3_max_live_parameters": case.live_numel,
            **self.sequentially(),
            "sub_group_size": case.sub_group_numel,
        }

    def sequentially(self) -> dict[str, bool]:
        """DeepSpeed has the option `stage3_allgather_sequential` since 0.18."""
        if not self.case.sequential:
            return {}
        if "allgather_sequential" not in self.options.model_fields:
            raise Unsupported("this DeepSpeed has no stage3_allgather_sequential: it came with 0.18")
        return {"stage3_allgather_sequential": True}

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Returns the engine's optimizer, which wraps the torch optimizer with which the engine was created."""
        wrapped: torch.optim.Optimizer = self.engine.optimizer
        return wrapped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.engine(x)
        return output

    def run_micro_batch(self, step: int, index: int) -> dict[str, torch.Tensor | None]:
        if index:
            self.engine.step()  # no update before the last micro-batch, but the engine counts them
        return super().run_micro_batch(step, index)

    def backward(self, output: torch.Tensor, cotangent: torch.Tensor) -> None:
        """Runs the backward of a loss whose gradient is the cotangent."""
        self.engine.backward((output * cotangent).sum(), scale_wrt_gas=False)

    def gradient(self, name: str) -> torch.Tensor | None:
        return self.without_padding(name, self.utils.safe_get_local_grad(self.model.get_parameter(name)))

    def parameter(self, name: str) -> torch.Tensor:
        parameter: Any = self.model.get_parameter(name)
        held = self.utils.safe_get_local_fp32_param(parameter) if parameter.requires_grad else parameter.ds_tensor
        return self.without_padding(name, held).requires_grad_(parameter.requires_grad)

    def memory(self, place: str) -> torch.Tensor:
        parameter: Any = self.model.get_parameter(place)
        held: torch.Tensor = parameter.ds_tensor if self.case.stage == 3 else parameter
        return held

    def update(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        self.engine.step()

    def go_on(self, optimizer: torch.optim.Optimizer, step: int) -> torch.optim.Optimizer:
        """After step `saved_after`, saves a checkpoint and replaces the engine by a new one that loads it."""
        if step != self.case.saved_after:
            return optimizer
        with shared_folder(self.mesh) as folder:
            self.engine.save_checkpoint(folder, tag=TAG)
            self.engine.destroy()
            self.initial = {name: torch.ones_like(tensor) for name, tensor in self.given.items()}
            self.model = self.build()
            self._capture()
            self.load(folder)
        return self.make_optimizer()

    def load(self, folder: str) -> None:
        """Raises RuntimeError if the folder has no checkpoint that DeepSpeed can load."""
        path, _ = self.engine.load_checkpoint(folder, tag=TAG)
        if path is None:
            raise RuntimeError(f"DeepSpeed loads nothing from {folder}")

    def state_held(self, optimizer: torch.optim.Optimizer, state: str, name: str) -> torch.Tensor | None:
        if state == "param":
            return self.parameter(name)
        found = self.utils.safe_get_local_optimizer_state(self.model.get_parameter(name), STATE_KEYS[state])
        return self.without_padding(name, found)

    def without_padding(self, name: str, partition: torch.Tensor) -> torch.Tensor:
        """Returns a copy of the partition with zeros as padding, which DeepSpeed never writes."""
        start = self.mesh.get_local_rank() * partition.numel()
        parameter: Any = self.model.get_parameter(name)
        copy = partition.detach().clone()
        copy[max(0, parameter.ds_numel - start) :] = 0
        return copy
