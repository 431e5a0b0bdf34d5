# mypy: disable-error-code="no-untyped-call, no-any-return, operator, attr-defined"
"""Programs of torch alone, one for each rule of `BLIND_NINTH`: `python -m tests.planted.bare.blind_training_9`.

It runs each program with its rule and without it, and prints both answers. It fails if they are equal on all ranks, or
if the answer without the rule differs from `RIGHT`. Names of rules as arguments choose some of them.
"""

from __future__ import annotations

import shutil
import warnings
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, StateDictType, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.nn.functional import broadcast
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel, local_map
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.parallel import DistributedDataParallel
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint

from tests.planted.bare.blind_training import linear, whole
from tests.planted.bare.blind_training_2 import Times, stepped, sum_of_errors
from tests.planted.bare.blind_training_3 import CPU, NUM_RANKS, both_ranks, of_both
from tests.planted.bare.blind_training_4 import one_stage
from tests.planted.bare.blind_training_5 import shared_folder
from tests.planted.bare.training import show, trained
from tests.planted.training import BLIND_NINTH


def by_rank(value: Tensor) -> Tensor:
    """Returns a row for each rank, with its value."""
    rows = torch.zeros(NUM_RANKS, *value.shape)
    rows[dist.get_rank()] = value.detach()
    return of_both(rows)


# FSDP2 and FSDP1


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, positions: Tensor) -> Tensor:
        return (positions - 256) * self.weight


def whole_numbers_cast() -> Tensor:
    model = Shifted()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return model(torch.tensor([257, 259])).float().detach()


def first_rank_written_back() -> Tensor:
    model = FullyShardedDataParallel(linear(1, 2), device_id=CPU, use_orig_params=True)
    with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
        model.module.weight.copy_(torch.tensor([[5.0], [6.0]]))
    return model(torch.ones(1, 1)).detach()


def states_from_the_beginning() -> Tensor:
    model = FullyShardedDataParallel(linear(1, 4), device_id=CPU, use_orig_params=True)
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
    run, resumed = (torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5) for _ in range(2))
    (model(torch.ones(1, 1)) * torch.arange(1.0, 5.0)).sum().backward()
    run.step()
    state = FullyShardedDataParallel.optim_state_dict(model, run)
    resumed.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, resumed, state))
    part = torch.zeros(4)
    (values,) = (each["momentum_buffer"] for each in resumed.state.values())
    part[2 * dist.get_rank() :][:2] = values
    return of_both(part)


# clipping, the scaler and autocast


def largest_added_up() -> Tensor:
    model = FullyShardedDataParallel(linear(1, 2), device_id=CPU, use_orig_params=True)
    (model(torch.ones(1, 1)) * torch.tensor([3.0, 5.0])).sum().backward()
    return model.clip_grad_norm_(1.0, float("inf"))


def good_steps_before_infinity() -> Tensor:
    param = nn.Parameter(torch.zeros(1))
    run = torch.optim.SGD([param])
    scaler = ShardedGradScaler("cpu", init_scale=4.0, growth_interval=2)
    for factor in (1.0, float("inf"), 1.0):
        param.grad = None
        scaler.scale((param * factor).sum()).backward()
        scaler.step(run)
        scaler.update()
    return torch.tensor(scaler.get_scale())


def autocast_in_custom_forward() -> Tensor:
    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(_: Any, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
            return x @ weight

    with torch.autocast("cpu", dtype=torch.bfloat16):
        return Product.apply(torch.ones(1, 1), torch.tensor([[1 + 2**-10]])).float()


# DistributedDataParallel


def statistics_not_converted() -> Tensor:
    layer = nn.BatchNorm1d(1)
    layer.running_mean.fill_(3.0)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(layer))
    return model.eval()(torch.full((1, 1), 3.0)).detach()


def columns_not_orthogonal() -> Tensor:
    model, row = DistributedDataParallel(linear(4, 4)), torch.eye(4)[[dist.get_rank()]]
    state = powerSGD_hook.PowerSGDState(
        None,
        matrix_approximation_rank=2,
        start_powerSGD_iter=2,
        min_compression_rate=0.5,
        use_error_feedback=False,
        warm_start=False,
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(3):
        model.zero_grad()
        (model(row) * row).sum().backward()
    return whole(model.module.weight.grad)


# tensor parallel and DTensor


def rows_of_others_not_masked() -> Tensor:
    table: Any = nn.Embedding(4, 1, _weight=torch.arange(1.0, 5.0).view(4, 1))
    parallelize_module(table, both_ranks(), RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)))
    return by_rank(table(torch.tensor([0, 3])))


def reduced_in_forward_dtype() -> Tensor:
    weight = distribute_tensor(torch.ones(2), both_ranks(), [Shard(0)]).requires_grad_()
    gathered = weight.redistribute(placements=[Replicate()], forward_dtype=torch.bfloat16)
    (gathered.to_local(grad_placements=[Partial()]) * (2**-8 if dist.get_rank() else 1.0)).sum().backward()
    return whole(weight.grad)


def redistributed_and_dropped() -> Tensor:
    mesh = both_ranks()
    product: Any = local_map(
        torch.matmul,
        out_placements=[Partial()],
        in_placements=([Shard(1)], [Shard(0)]),
        redistribute_inputs=True,
    )
    x, weight = (distribute_tensor(value, mesh) for value in (torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [4.0]])))
    return whole(product(x, weight))


# optimizers


def answer_of_hook_dropped() -> Tensor:
    saved, resumed = (torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0) for _ in range(2))

    def halved(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "param_groups": [{**group, "lr": group["lr"] / 2} for group in state["param_groups"]]}

    resumed.register_load_state_dict_pre_hook(halved)
    resumed.load_state_dict(saved.state_dict())
    return torch.tensor(resumed.param_groups[0]["lr"])


def squares_lose_the_mean() -> Tensor:
    return trained(torch.optim.RMSprop, centered=True, foreach=True)


# recomputation and pipelines


def random_numbers_after(*, recomputes: bool) -> Tensor:
    torch.manual_seed(0)
    x = torch.ones(4, requires_grad=True)
    output = x
    for _ in range(2):
        drop = nn.functional.dropout
        output = checkpoint(drop, output, use_reentrant=False) if recomputes else drop(output)
    output.sum().backward()
    return torch.rand(3)


def random_numbers_again() -> Tensor:
    return random_numbers_after(recomputes=True)


def never_trains_after_evaluation() -> Tensor:
    rank, module, x = dist.get_rank(), Times(1.0), torch.ones(2, 1)
    schedule = Schedule1F1B(PipelineStage(module, rank, 2, CPU), 2, sum_of_errors, scale_grads=False)
    stepped(schedule, x)
    schedule.eval(*([] if rank else [x]), target=torch.zeros_like(x))
    stepped(schedule, x)
    return by_rank(whole(module.weight.grad))


class Attention(nn.Module):
    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        return flex_attention(x, x, x, block_mask=mask)


def masks_of_first_rows() -> Tensor:
    seen = torch.tensor([3, 5])
    mask = create_block_mask(lambda b, h, q, k: k == seen[b], 2, None, 128, 128, device="cpu")
    x = torch.arange(128.0).view(1, 1, 128, 1).repeat(2, 1, 1, 16) / 128
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = ScheduleGPipe(one_stage(Attention()), 2).step(x, mask=mask)
    return 128 * output[:, 0, 0, 0].detach()


# distributed checkpoint


def files_of_one_name() -> Tensor:
    folder = shared_folder()
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=False)
    dcp.save({str(index): torch.full((2,), float(index)) for index in range(4)}, storage_writer=writer)
    state = {str(index): torch.zeros(2) for index in range(4)}
    dcp.load(state, checkpoint_id=folder)
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)
    return torch.stack(list(state.values()))[:, 0]


def columns_joined_as_rows() -> Tensor:
    folder = shared_folder()
    writer = dcp.HuggingFaceStorageWriter(folder, save_distributed=True, enable_consolidation=True)
    table = distribute_tensor(torch.arange(4.0).view(2, 2), both_ranks(), [Shard(1)])
    dcp.save({"table": table}, storage_writer=writer)
    state = {"table": torch.zeros(2, 2)}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(folder))
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)
    return state["table"]


# averages


def average_starts_again() -> Tensor:
    model = linear(1, 1)
    saved, resumed = swa_utils.AveragedModel(model), swa_utils.AveragedModel(model)
    nn.init.constant_(model.weight, 2.0)
    saved.update_parameters(model)
    resumed.load_state_dict(saved.state_dict())
    nn.init.constant_(model.weight, 4.0)
    resumed.update_parameters(model)
    return resumed.module.weight.detach()


# collectives and context parallel


def gradient_beside_the_source() -> Tensor:
    x = torch.ones(1, requires_grad=True)
    ((1.0 + dist.get_rank()) * broadcast(x, 0)).sum().backward()
    return by_rank(whole(x.grad))


def gathered_rows_in_order() -> Tensor:
    return distribute_tensor(torch.arange(4.0).view(1, 2, 2), both_ranks(), [Shard(2)]).full_tensor()


def restored_as_rearranged() -> Tensor:
    mesh, x = both_ranks(), torch.arange(4.0).view(1, 4)
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
        return context_parallel_unshard(mesh, [x], [1])[0].clone()


RIGHT: dict[str, Any] = {
    "whole_numbers_cast": [1.0, 3.0],
    "first_rank_written_back": [[5.0, 6.0]],
    "states_from_the_beginning": [1.0, 2.0, 3.0, 4.0],
    "largest_added_up": 5.0,
    "good_steps_before_infinity": 2.0,
    "autocast_in_custom_forward": [[1 + 2**-10]],
    "statistics_not_converted": [[0.0]],
    "columns_not_orthogonal": [[0.5, 0.0, 0.0, 0.0], [0.0, 0.5, 0.0, 0.0], [0.0] * 4, [0.0] * 4],
    "rows_of_others_not_masked": [[[1.0]], [[4.0]]],
    "reduced_in_forward_dtype": [1 + 2**-8] * 2,
    "redistributed_and_dropped": [[11.0]],
    "answer_of_hook_dropped": 0.5,
    "squares_lose_the_mean": partial(trained, torch.optim.RMSprop, centered=True, foreach=False),
    "random_numbers_again": lambda: random_numbers_after(recomputes=False),
    "never_trains_after_evaluation": [[[4.0]], [[4.0]]],
    "masks_of_first_rows": [3.0, 5.0],
    "files_of_one_name": [0.0, 1.0, 2.0, 3.0],
    "columns_joined_as_rows": [[0.0, 1.0], [2.0, 3.0]],
    "average_starts_again": [[3.0]],
    "gradient_beside_the_source": [[3.0], [0.0]],
    "gathered_rows_in_order": [[[0.0, 1.0], [2.0, 3.0]]],
    "restored_as_rearranged": [[0.0, 1.0, 2.0, 3.0]],
}
"""Answers worked out by hand or by another way of the computation, the same on all ranks."""


if __name__ == "__main__":
    show(__spec__.name, BLIND_NINTH)
