"""Programs of DTensor alone, one for each defect of `tests.planted.blind_seventh`, which `tests.planted.shown` runs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    PrepareModuleInputOutput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from tests.planted.bare.blind_sixth import _own
from tests.planted.bare.operators import Pair, _full, _gradient, _numbers, _put


def ids_of_each_rank(mesh: DeviceMesh) -> Pair:
    """Each rank has its own ids, and gets its own rows."""
    layer, ids = nn.Embedding(4, 2), torch.tensor([0, 3, 2, 1])
    right = _own(mesh, layer(ids).detach())
    plan = RowwiseParallel(input_layouts=Shard(0), output_layouts=Shard(0))
    return parallelize_module(layer, mesh, plan)(_own(mesh, ids)).detach(), right


class _Shares(nn.Module):
    def forward(self, x: Any) -> Any:
        return x / x.sum()


def local_inputs_beside_local_outputs(mesh: DeviceMesh) -> Pair:
    x, rows = _numbers(4, 3), Shard(0)
    plan = PrepareModuleInputOutput(
        input_layouts=rows, desired_input_layouts=rows, output_layouts=rows, desired_output_layouts=rows
    )
    return parallelize_module(_Shares(), mesh, plan)(_own(mesh, x)), _own(mesh, x / x.sum())


def scale_of_a_loss_lost(mesh: DeviceMesh) -> Pair:
    target = torch.tensor([0, 2, 1, 3])
    with loss_parallel():
        return _gradient(
            _numbers(4, 4), Shard(1), mesh, lambda x, put: F.cross_entropy(x, put(target, Replicate())) / 2
        )


def deviation_taken_for_a_variance(mesh: DeviceMesh) -> Pair:
    torch.manual_seed(1)
    drawn = _full(nn.init.normal_(_put(torch.zeros(64), mesh, Shard(0)), std=0.01))
    return (drawn.abs() > 0.06).sum(), torch.tensor(0)


def positive_weight_ignored(mesh: DeviceMesh) -> Pair:
    x, y, weight = _numbers(4, 3), _numbers(4, 3) > 0, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    put = _put(x, mesh, Shard(0)), _put(y.double(), mesh, Shard(0))
    found = F.binary_cross_entropy_with_logits(*put, pos_weight=_put(weight, mesh, Replicate()))
    return _full(found), F.binary_cross_entropy_with_logits(x, y.double(), pos_weight=weight)


def strides_taken_for_equal(mesh: DeviceMesh) -> Pair:
    x = _numbers(8)
    put = [_put(x, mesh, _StridedShard(0, split_factor=factor)) for factor in (2, 4)]
    return _full(put[0] + put[1]), 2 * x


def gradient_not_rounded(mesh: DeviceMesh) -> Pair:
    factor = torch.full((4,), 1 + 2**-10)
    x: Any = _put(torch.ones(4), mesh, Shard(0)).requires_grad_()
    whole = x.redistribute(placements=[Replicate()], backward_dtype=torch.bfloat16)
    (whole * _put(factor, mesh, Replicate())).sum().backward()
    return _full(x.grad), torch.ones(4)


def averages_split_as_sums(mesh: DeviceMesh) -> Pair:
    x = _numbers(4)
    return _full(_put(x, mesh, Partial("avg"))), x


def piece_by_the_first_axis(mesh: DeviceMesh) -> Pair:
    x, two_axes = _numbers(4), init_device_mesh("cpu", (1, mesh.size()))
    whole = _put(x, two_axes, Replicate(), Replicate())
    return _full(whole.redistribute(placements=[Replicate(), Shard(0)])), x


def products_of_own_parts_averaged(mesh: DeviceMesh) -> Pair:
    x = _numbers(4)
    return _full(torch.dot(_put(x, mesh, Shard(0)), _put(x, mesh, Shard(0)))), torch.dot(x, x)


def later_dims_overlooked(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 4)
    return _full(_put(x, mesh, Shard(1)).logsumexp((0, 1))), x.logsumexp((0, 1))


def commonest_of_own_columns(mesh: DeviceMesh) -> Pair:
    x = torch.tensor([[1.0, 2.0, 3.0, 3.0], [4.0, 5.0, 5.0, 5.0]])
    return _full(_put(x, mesh, Shard(1)).mode(1)[0]), x.mode(1)[0]


def dims_behind_a_largest_stay(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 4, 4)
    return _full(_put(x, mesh, Shard(1)).max(0)[0].sum(1)), x.max(0)[0].sum(1)


def norm_in_its_own_dtype(mesh: DeviceMesh) -> Pair:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    found = torch.linalg.vector_norm(_put(x, mesh, Shard(0)), dtype=torch.float64)
    return _full(found), torch.linalg.vector_norm(x, dtype=torch.float64)


def row_written_by_each_rank(mesh: DeviceMesh) -> Pair:
    x, row = _numbers(4, 3), torch.ones(3, dtype=torch.float64)
    return _full(_put(x, mesh, Shard(0)).select_scatter(_put(row, mesh, Replicate()), 0, 1)), x.select_scatter(
        row, 0, 1
    )


def part_scattered_into_by_each_rank(mesh: DeviceMesh) -> Pair:
    x, index = _numbers(4, 3), torch.tensor([[0, 1, 1]])
    return _full(_put(x, mesh, Shard(0)).scatter(0, _put(index, mesh, Replicate()), 7.0)), x.scatter(0, index, 7.0)


def added_rows_not_scaled(mesh: DeviceMesh) -> Pair:
    x, index, rows = _numbers(4, 4), torch.tensor([0, 2]), _numbers(2, 4)
    put = _put(index, mesh, Replicate()), _put(rows, mesh, Shard(1))
    return _full(_put(x, mesh, Shard(1)).index_add(0, *put, alpha=3)), x.index_add(0, index, rows, alpha=3)


def main_diagonal_instead(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 4)
    return _full(_put(x, mesh, Shard(0)).tril(1)), x.tril(1)


def usual_eps_of_groups(mesh: DeviceMesh) -> Pair:
    x = _numbers(2, 4, 3)
    return _full(F.group_norm(_put(x, mesh, Shard(0)), 2, eps=4.0)), F.group_norm(x, 2, eps=4.0)


def scores_not_scaled(mesh: DeviceMesh) -> Pair:
    """Computes the scores of two heads, as attention with a bias for distances does."""
    bias, queries, keys = _numbers(2, 3, 3), _numbers(2, 3, 2), _numbers(2, 2, 3) + 1
    put = [_put(each, mesh, Shard(0)) for each in (bias, queries, keys)]
    return _full(torch.baddbmm(*put, alpha=0.5)), torch.baddbmm(bias, queries, keys, alpha=0.5)


def quotients_not_rounded(mesh: DeviceMesh) -> Pair:
    x, y = _numbers(4), _numbers(4) ** 2 + 2
    return _full(_put(x, mesh, Shard(0)).div_(_put(y, mesh, Shard(0)), rounding_mode="floor")), x // y


def squares_not_weighted(mesh: DeviceMesh) -> Pair:
    x, y = _numbers(4), _numbers(4) + 1
    put: list[torch.Tensor] = [_put(x.clone(), mesh, Shard(0))]
    torch._foreach_addcmul_(put, [_put(y, mesh, Shard(0))], [_put(y, mesh, Shard(0))], value=0.5)
    return _full(put[0]), x + y * y / 2


WORLD_SIZES: dict[str, int] = {}
"""Numbers of ranks that show a wrong operator, if two do not."""
