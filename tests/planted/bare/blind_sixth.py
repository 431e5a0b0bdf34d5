"""Programs of DTensor alone, one for each defect of `tests.planted.blind_sixth`, which `tests.planted.shown` runs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from tests.planted.bare.operators import Pair, _full, _gradient, _numbers, _put


def _own(mesh: DeviceMesh, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    return x.chunk(mesh.size(), dim)[mesh.get_rank()].contiguous()


def _shares(mesh: DeviceMesh, reduce_op: str, first: list[float], others: list[float]) -> Any:
    own = torch.tensor(others if mesh.get_rank() else first)
    return DTensor.from_local(own, mesh, [Partial(reduce_op)])


class _Columns(nn.Module):
    """Adds up all rows of a keyword argument."""

    def forward(self, *, x: Any) -> Any:
        return x.sum(0)


class _Twice(nn.Module):
    """Returns its rows and its columns."""

    def forward(self, rows: Any, columns: Any) -> Any:
        return rows, columns


def keyword_inputs_stay(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 3)
    plan = PrepareModuleInput(
        input_kwarg_layouts={"x": Shard(0)}, desired_input_kwarg_layouts={"x": Replicate()}, use_local_output=True
    )
    return parallelize_module(_Columns(), mesh, plan)(x=_own(mesh, x)), x.sum(0)


def second_output_placed_as_the_first(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 4)
    plan = PrepareModuleOutput(
        output_layouts=(Shard(0), Shard(1)), desired_output_layouts=(Replicate(), Shard(0)), use_local_output=True
    )
    _, columns = parallelize_module(_Twice(), mesh, plan)(_own(mesh, x), _own(mesh, x, 1))
    return columns, _own(mesh, x)


def sequence_not_divided(mesh: DeviceMesh) -> Pair:
    x, layer = _numbers(4, 3), nn.LayerNorm(3).double()
    right = _own(mesh, layer(x).detach())
    plan = SequenceParallel(sequence_dim=0, use_local_output=True)
    return parallelize_module(layer, mesh, plan)(_put(x, mesh, Replicate())).detach(), right


def source_of_a_plan_ignored(mesh: DeviceMesh) -> Pair:
    """Each rank has its own weights, and keeps its part of them."""
    layer = nn.Linear(2, 2 * mesh.size(), bias=False)
    nn.init.constant_(layer.weight, mesh.get_rank() + 1.0)
    layers, plan = nn.Sequential(layer), dict[str, ParallelStyle]({"0": ColwiseParallel(use_local_output=False)})
    found = parallelize_module(layers, mesh, plan, src_data_rank=None)(torch.ones(1, 2))
    return _full(found).detach(), 2 * torch.arange(1.0, mesh.size() + 1).repeat_interleave(2)[None]


def copies_of_the_first(mesh: DeviceMesh) -> Pair:
    own = torch.full((2,), mesh.get_rank() + 1.0)
    return distribute_tensor(own, mesh, [Replicate()], src_data_rank=1).to_local(), torch.full((2,), 2.0)


def local_grad_placements_ignored(mesh: DeviceMesh) -> Pair:
    """Each rank's gradient is a share of the whole gradient."""
    whole: Any = _put(_numbers(3), mesh, Replicate()).detach().requires_grad_()
    (whole.to_local(grad_placements=[Partial()]) * (mesh.get_rank() + 1)).sum().backward()
    return _full(whole.grad), torch.full((3,), mesh.size() * (mesh.size() + 1) / 2, dtype=torch.float64)


def permuted_the_other_way(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 4, 4)
    return _full(_put(x, mesh, Shard(0)).permute(1, 2, 0).sum(1)), x.permute(1, 2, 0).sum(1)


def second_axis_of_a_slice_overlooked(mesh: DeviceMesh) -> Pair:
    x, two_axes = _numbers(4, 2), init_device_mesh("cpu", (1, mesh.size()))
    return _full(_put(x, two_axes, Shard(0), Shard(0))[1:3]), x[1:3]


def row_of_a_gradient_not_counted(mesh: DeviceMesh) -> Pair:
    weights = _numbers(2, 3) ** 2
    return _gradient(_numbers(2, 2, 3), Shard(1), mesh, lambda x, put: x[0] * put(weights, Shard(0)))


def place_among_own_bounds(mesh: DeviceMesh) -> Pair:
    x, bounds = torch.tensor([0.5, 2.5, 4.5]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    found = torch.bucketize(_put(x, mesh, Replicate()), _put(bounds, mesh, Shard(0)))
    return _full(found), torch.bucketize(x, bounds)


def rare_words_weigh_the_same(mesh: DeviceMesh) -> Pair:
    ids = torch.tensor([0, 1, 1, 2])
    return _gradient(
        _numbers(3, 2), Replicate(), mesh, lambda w, put: F.embedding(put(ids, Replicate()), w, scale_grad_by_freq=True)
    )


def whole_less_the_largest(mesh: DeviceMesh) -> Pair:
    whole, share = torch.tensor([10.0, 10.0]), _shares(mesh, "max", [1.0, 5.0], [3.0, 2.0])
    return _full(torch.add(_put(whole, mesh, Replicate()), share, alpha=-1)), torch.tensor([7.0, 5.0])


def reciprocal_of_the_smallest(mesh: DeviceMesh) -> Pair:
    return _full(_shares(mesh, "min", [-1.0, 2.0], [4.0, 4.0]).reciprocal()), torch.tensor([-1.0, 0.5])


def truth_of_the_largest(mesh: DeviceMesh) -> Pair:
    found = _shares(mesh, "max", [0.0, -1.0], [-3.0, -2.0]).bool()
    return _full(found).float(), torch.tensor([0.0, 1.0])


def dropped_by_shares(mesh: DeviceMesh) -> Pair:
    """Every number should be dropped or doubled."""
    torch.manual_seed(mesh.get_rank())
    share: Any = DTensor.from_local(torch.ones(64), mesh, [Partial()])
    found = _full(torch.native_dropout(share, 0.5, train=True)[0])
    return ((found != 0) & (found != 2 * mesh.size())).sum(), torch.tensor(0)


def bounds_of_numbers_ignored(mesh: DeviceMesh) -> Pair:
    torch.manual_seed(1)
    drawn = _full(nn.init.uniform_(_put(torch.zeros(64), mesh, Shard(0)), -0.25, 0.25))
    return (drawn.abs() > 0.25).sum(), torch.tensor(0)


def medians_averaged(mesh: DeviceMesh) -> Pair:
    x = torch.tensor([1.0, 9.0, 2.0, 3.0, 8.0, 7.0])
    return _full(_put(x, mesh, Shard(0)).median()), x.median()


def place_of_own_largest(mesh: DeviceMesh) -> Pair:
    return _full(_shares(mesh, "max", [1.0, 2.0, 0.0], [5.0, 0.0, 1.0]).argmax()), torch.tensor(0)


def first_dim_of_topk_remembered(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 4)
    _put(x, mesh, Shard(0)).topk(2, 1)
    return _full(_put(x, mesh, Shard(0)).topk(2, 0)[0]), x.topk(2, 0)[0]


def columns_of_groups_taken_for_rows(mesh: DeviceMesh) -> Pair:
    x, y = _numbers(8, 16).bfloat16(), _numbers(16, 16).bfloat16()
    ends = torch.tensor([8, 16], dtype=torch.int32)
    put = _put(x, mesh, Replicate()), _put(y, mesh, Shard(1))
    found = F.grouped_mm(*put, offs=_put(ends, mesh, Replicate()))
    return _full(found.sum(1)), torch.stack([x[:, :8] @ y[:8], x[:, 8:] @ y[8:]]).sum(1)


def padding_counts_in_averages(mesh: DeviceMesh) -> Pair:
    x = _numbers(2, 1, 4, 4)
    found = F.avg_pool2d(_put(x, mesh, Shard(0)), 2, padding=1, count_include_pad=False)
    return _full(found), F.avg_pool2d(x, 2, padding=1, count_include_pad=False)


def corners_not_aligned(mesh: DeviceMesh) -> Pair:
    x, options = _numbers(2, 1, 3, 3), dict[str, Any](size=(5, 5), mode="bilinear", align_corners=True)
    return _full(F.interpolate(_put(x, mesh, Shard(0)), **options)), F.interpolate(x, **options)


def first_transformed_dim_overlooked(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 4)
    return torch.view_as_real(_full(torch.fft.fft2(_put(x, mesh, Shard(0))))), torch.view_as_real(torch.fft.fft2(x))


def diagonal_in_spite_of_ones(mesh: DeviceMesh) -> Pair:
    a, b = _numbers(2, 3, 3).triu() + 9 * torch.eye(3), _numbers(2, 3, 2)
    put = _put(a, mesh, Shard(0)), _put(b, mesh, Shard(0))
    options = dict[str, Any](upper=True, unitriangular=True)
    return _full(torch.linalg.solve_triangular(*put, **options)), torch.linalg.solve_triangular(a, b, **options)


def rows_counted_for_weights(mesh: DeviceMesh) -> Pair:
    target, weights = torch.tensor([0, 2, 1, 3]), torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    with loss_parallel():
        return _gradient(
            _numbers(4, 4),
            Shard(1),
            mesh,
            lambda x, put: F.cross_entropy(x, put(target, Replicate()), put(weights, Replicate())),
        )


def classes_along_the_first_axis(mesh: DeviceMesh) -> Pair:
    x, target, two_axes = _numbers(4, 4), torch.tensor([0, 2, 1, 3]), init_device_mesh("cpu", (1, mesh.size()))
    put = _put(x, two_axes, Replicate(), Shard(1)), _put(target, two_axes, Replicate(), Replicate())
    with loss_parallel():
        found = F.cross_entropy(*put, reduction="sum")
    return _full(found), F.cross_entropy(x, target, reduction="sum")


def infinity_of_own_rows(mesh: DeviceMesh) -> Pair:
    """One gradient is infinite, so no rank should make a step."""
    x, weights = torch.ones(4), torch.tensor([1.0, 1.0, 1.0, torch.inf])
    parameter = nn.Parameter(_put(x.clone(), mesh, Shard(0)))
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.5), torch.amp.GradScaler("cpu", init_scale=2.0)
    scaled: Any = scaler.scale((parameter * _put(weights, mesh, Shard(0))).sum())
    scaled.backward()
    scaler.step(optimizer)
    return _full(parameter.detach()), x


def bend_of_a_loss_ignored(mesh: DeviceMesh) -> Pair:
    x, y = _numbers(4), _numbers(4) ** 2
    found = F.huber_loss(_put(x, mesh, Shard(0)), _put(y, mesh, Shard(0)), delta=3.0)
    return _full(found), F.huber_loss(x, y, delta=3.0)


WORLD_SIZES: dict[str, int] = {}
"""Numbers of ranks that show a wrong operator, if two do not."""
