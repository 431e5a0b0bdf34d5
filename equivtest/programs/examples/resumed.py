"""A step of training that resumes from the state of an earlier step, as after a restart of the job.

Copies of the parameters are assigned, and the optimizer is made anew, with its groups of parameters in another order.
Its state is then loaded by the names of the parameters, in one of several forms. One of them is a folder of files.

Source: torch.nn.Module.load_state_dict with `assign`, and the functions and StateDictOptions of
torch/distributed/checkpoint/state_dict.py (2.13.0).
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from equivtest.programs.examples.plans import fully_sharded_by_layers
from equivtest.programs.examples.token_mean import TokenMean

NORM: dict[str, Any] = {"lr": 0.0625, "momentum": 0.25}
OTHERS: dict[str, Any] = {"lr": 0.25, "momentum": 0.5}
_WHOLE = StateDictOptions(full_state_dict=True)
FILES = "files"
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
FORMS = {
    "shards": (StateDictOptions(), StateDictOptions()),
    "whole": (_WHOLE, _WHOLE),
    "rank 0": (
        StateDictOptions(full_state_dict=True, cpu_offload=True),
        StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    ),
    "flat": (_FLAT, _FLAT),
    FILES: (StateDictOptions(), StateDictOptions()),
}
"""Form of the optimizer's state -> options with which it is saved, and with which it is loaded.

Each rank has its shards, the whole state, or shards in one flat dict; or rank 0 alone has the whole state. Or the ranks
write their shards, with the parameters, into files and read them.
"""


def resumable(block: Any, mesh: DeviceMesh, *, reshard_after_forward: bool, state: str, together: bool) -> nn.Module:
    """Shards each layer, and the rest of the block.

    Args:
        state: The form of the optimizer's state, a name in `FORMS`.
        together: Whether the parameters are saved and loaded with the optimizer's state. Otherwise copies of the
            parameters are assigned. They always are if rank 0 alone has the state, because in set_state_dict the ranks
            then wait for each other (finding 140). Files always have both.
    """
    block.form_of_state, block.loads_together = state, together and state != "rank 0"
    return fully_sharded_by_layers(block, mesh, reshard_after_forward=reshard_after_forward)


class Resumable(torch.optim.Optimizer):
    """SGD with two groups of parameters, whose module and state can be loaded again.

    Attributes:
        inner: The optimizer that updates.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.inner = self.made(norm_first=False)
        super().__init__(self.inner.param_groups, {})

    def made(self, *, norm_first: bool) -> torch.optim.SGD:
        named = dict(self.module.named_parameters())
        groups = [
            {"params": [each for name, each in named.items() if "norm" not in name]},
            {"params": [each for name, each in named.items() if "norm" in name], **NORM},
        ]
        return torch.optim.SGD(groups[::-1] if norm_first else groups, **OTHERS)

    def made_again(self) -> torch.optim.SGD:
        """Makes the optimizer of a restarted job. Its rates are wrong until the state is loaded."""
        optimizer = self.made(norm_first=True)
        for group in optimizer.param_groups:
            group["lr"] *= 2
        return optimizer

    def step(self, closure: Any = None) -> Any:
        self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002  # torch's signature
        self.inner.zero_grad(set_to_none)

    def resume(self) -> None:
        """Loads the parameters and the state into a new optimizer, after the earlier parameters are spoiled."""
        saves, loads = FORMS[self.module.form_of_state]
        if self.module.form_of_state == FILES:
            self.resume_from_files()
            return
        if not self.module.loads_together:
            state = get_optimizer_state_dict(self.module, self.inner, options=saves)
            copies = {name: tensor.clone() for name, tensor in self.module.state_dict().items()}
            self.spoil()
            self.module.load_state_dict(copies, assign=True)
            self.inner = self.made_again()
            set_optimizer_state_dict(self.module, self.inner, state, options=loads)
            return
        parameters, state = get_state_dict(self.module, self.inner, options=saves)
        parameters = copy.deepcopy(parameters)
        self.spoil()
        self.inner = self.made_again()
        set_state_dict(self.module, self.inner, model_state_dict=parameters, optim_state_dict=state, options=loads)

    def resume_from_files(self) -> None:
        group = next(self.module.parameters()).device_mesh.get_group()
        with shared_folder(group) as folder:
            save({"application": Application(self.module, self.inner)}, checkpoint_id=folder, process_group=group)
            self.spoil()
            self.inner = self.made_again()
            load({"application": Application(self.module, self.inner)}, checkpoint_id=folder, process_group=group)

    def spoil(self) -> None:
        """Spoils the parameters, and clears their gradients, which a restarted job does not have.

        While a parameter has a gradient, torch makes no state for a new optimizer (`_init_optim_state`). So it has no
        place for a flat or a whole state.
        """
        for parameter in self.module.parameters():
            assert isinstance(parameter, DTensor)
            parameter.to_local().detach().fill_(torch.nan)
            parameter.grad = None


class Application:
    """Object that torch.distributed.checkpoint saves and loads by its methods, as in torch's recipe."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.optimizer = module, optimizer

    def state_dict(self) -> dict[str, Any]:
        parameters, state = get_state_dict(self.module, self.optimizer)
        return {"model": parameters, "optimizer": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.module, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )


@contextmanager
def shared_folder(group: distributed.ProcessGroup) -> Iterator[str]:
    """Makes a temporary folder, which the group's first rank removes when all ranks are done."""
    names = [tempfile.mkdtemp(prefix="resumed-") if distributed.get_rank(group) == 0 else ""]
    distributed.broadcast_object_list(names, group=group, group_src=0)
    try:
        yield names[0]
        distributed.barrier(group)
    finally:
        if distributed.get_rank(group) == 0:
            shutil.rmtree(names[0], ignore_errors=True)


class Failure(Exception):
    pass


def fail(gradient: torch.Tensor) -> None:
    raise Failure


def fail_in_backward(module: nn.Module, ids: Any, output: torch.Tensor) -> None:
    output.register_hook(fail)  # type: ignore[no-untyped-call]


class Resumed(TokenMean):
    """The step of `TokenMean`, before which a backward fails, and the module and the optimizer are loaded again.

    The first step does so too. torch makes the state of a new optimizer by an update with zero gradients and rates. No
    group has weight decay, because then this update changes the momentum.
    """

    optimizer: Resumable

    def begin(self) -> None:
        if hasattr(self.module, "reset_iter_state"):  # since 2.13
            self.run_failing()
        self.optimizer.resume()
        super().begin()

    def run_failing(self) -> None:
        """Runs a backward that raises behind the embedding. Every other layer reduces its gradients before.

        If a group of parameters is not reduced before, torch adds its gradients to the next ones. See finding 166.
        """
        hook = self.module.embedding.register_forward_hook(fail_in_backward)
        with suppress(Failure):
            self.run_micro_batch(0)
        hook.remove()
        self.losses.clear()
        self.module.reset_iter_state()
        self.optimizer.zero_grad()


resumed = Resumed.step
