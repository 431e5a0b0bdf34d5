"""Programs of DTensor alone, one for each defect of `tests.planted.blind_fifth`, which `tests.planted.shown` runs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import (
    PrepareModuleInput,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from tests.planted.bare.operators import Pair, _full, _gradient, _numbers, _put, _share


def strided_from_the_end_is_plain(mesh: DeviceMesh) -> Pair:
    """Each rank has every second column."""
    x = _numbers(3, 4)
    own = x[:, mesh.get_rank() :: mesh.size()].contiguous()
    return _full(DTensor.from_local(own, mesh, [_StridedShard(-1, split_factor=2)])), x


def inputs_stay_where_they_are(mesh: DeviceMesh) -> Pair:
    x = _numbers(3, 4)
    total: Any = local_map(
        lambda columns: columns.sum(1),
        out_placements=[Partial()],
        in_placements=([Shard(1)],),
        redistribute_inputs=True,
        device_mesh=mesh,
    )
    return _full(total(_put(x, mesh, Replicate()))), x.sum(1)


def norms_scattered_as_sums(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 4)
    norms: Any = torch.linalg.vector_norm(_put(x, mesh, Shard(1)), 2, 1)
    return _full(norms.redistribute(mesh, [Shard(0)])), torch.linalg.vector_norm(x, 2, 1)


def strided_rows_stay_where_they_are(mesh: DeviceMesh) -> Pair:
    """Each rank has every second row at first."""
    x = _numbers(4, 3)
    own = x[mesh.get_rank() :: mesh.size()].contiguous()
    put: Any = DTensor.from_local(own, mesh, [_StridedShard(0, split_factor=2)])
    return _full(put.redistribute(mesh, [Shard(0)])), x


def index_divided_beside_whole_rows(mesh: DeviceMesh) -> Pair:
    x, index = _numbers(4, 3), torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1]])
    return _full(_put(x, mesh, Replicate()).gather(1, _put(index, mesh, Shard(0)))), x.gather(1, index)


def end_from_the_end_is_the_end(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 2)
    return _full(_put(x, mesh, Shard(0))[:-1]), x[:-1]


def indices_apart_taken_for_adjacent(mesh: DeviceMesh) -> Pair:
    x, first, last = _numbers(4, 3, 2, 3), torch.tensor([1]), torch.tensor([2])
    put = [_put(x, mesh, Shard(0)), _put(first, mesh, Replicate()), _put(last, mesh, Replicate())]
    return _full(put[0][:, put[1], :, put[2]]), x[:, first, :, last]


def dims_of_a_squeeze_in_place_kept(mesh: DeviceMesh) -> Pair:
    x = _numbers(1, 4, 3)
    put = _put(x.clone(), mesh, Shard(1))
    put.squeeze_(0)
    return _full(put.sum(1)), x.squeeze(0).sum(1)


def negative_pads_overlooked(mesh: DeviceMesh) -> Pair:
    x = _numbers(2, 4)
    return _full(F.pad(_put(x, mesh, Shard(1)), (-1, 0))), F.pad(x, (-1, 0))


def last_dim_sorted_as_the_first(mesh: DeviceMesh) -> Pair:
    x = _numbers(2, 4)
    return _full(_put(x, mesh, Shard(1)).sort()[0]), x.sort()[0]


def places_right_of_equals_ignored(mesh: DeviceMesh) -> Pair:
    x, bounds = torch.tensor([1.0, 2.0, 2.5, 3.0]), torch.tensor([1.0, 2.0, 3.0])
    put = _put(x, mesh, Shard(0)), _put(bounds, mesh, Replicate())
    return _full(torch.bucketize(*put, right=True)), torch.bucketize(x, bounds, right=True)


def strides_lost_in_a_reduction(mesh: DeviceMesh) -> Pair:
    """Each rank has every second row."""
    x = _numbers(4, 3)
    own = x[mesh.get_rank() :: mesh.size()].contiguous()
    put: Any = DTensor.from_local(own, mesh, [_StridedShard(0, split_factor=2)])
    return _full(put.sum(1)), x.sum(1)


def evenness_of_the_first_dim(mesh: DeviceMesh) -> Pair:
    """Three columns on two ranks."""
    x = _numbers(2, 3)
    return _full(_put(x, mesh, Shard(1)).mean((0, 1))), x.mean((0, 1))


def inner_axis_of_a_partial_overlooked(mesh: DeviceMesh) -> Pair:
    two_axes = init_device_mesh("cpu", (1, mesh.size()))
    share: Any = DTensor.from_local(_share(mesh, "max").to_local(), two_axes, [Replicate(), Partial("max")])
    return _full(share.sum(0)), torch.tensor(8.0)


def least_rank_by_its_largest(mesh: DeviceMesh) -> Pair:
    x = torch.tensor([1.0, 9.0, 2.0, 3.0])
    return _full(_put(x, mesh, Shard(0)).argmin()), x.argmin()


def every_factor_multiplied(mesh: DeviceMesh) -> Pair:
    x = _numbers(4) + 0.5
    return _full(_put(x, mesh, Shard(0)).prod() * 3), x.prod() * 3


def keywords_lost_on_the_way(mesh: DeviceMesh) -> Pair:
    x, y = _numbers(4, 4), _numbers(4, 4) ** 2
    return _full(torch.add(_put(x, mesh, Shard(0)), _put(y, mesh, Shard(1)), alpha=3)), x + 3 * y


def copies_drawn_apart(mesh: DeviceMesh) -> Pair:
    """Compares the last rank's copy with the first one's."""
    torch.manual_seed(1)
    own: Any = _put(torch.zeros(4), mesh, Replicate()).normal_().to_local()
    copies = _full(DTensor.from_local(own, mesh, [Shard(0)])).chunk(mesh.size())
    return copies[-1], copies[0]


def first_weight_for_all_rows(mesh: DeviceMesh) -> Pair:
    target, weights = torch.tensor([0, 2, 1, 3]), _numbers(4)

    def loss(x: Any, put: Any) -> Any:
        return F.cross_entropy(x, put(target, Replicate()), reduction="none") * put(weights, Replicate())

    with loss_parallel():
        return _gradient(_numbers(4, 4), Shard(1), mesh, loss)


def loss_parallel_goes_on(mesh: DeviceMesh) -> Pair:
    with loss_parallel():
        pass
    weights = _numbers(4, 4) ** 2
    return _gradient(_numbers(4, 4), Shard(1), mesh, lambda x, put: x.log_softmax(1) * put(weights, Shard(1)))


def maximized_as_minimized(mesh: DeviceMesh) -> Pair:
    x, found = _numbers(4), []
    for parameter in (nn.Parameter(_put(x, mesh, Shard(0))), nn.Parameter(x.clone())):
        optimizer = torch.optim.Adam([parameter], lr=0.5, fused=True, maximize=True)
        (parameter**2).sum().backward()
        optimizer.step()
        found.append(_full(parameter.detach()))
    return found[0], found[1]


def sequence_along_the_usual_dim(mesh: DeviceMesh) -> Pair:
    """Each rank has some of the first dim."""
    x, layer = _numbers(4, 2, 3), nn.LayerNorm(3).double()
    right = layer(x).detach()
    own = x.chunk(mesh.size())[mesh.get_rank()]
    return _full(parallelize_module(layer, mesh, SequenceParallel(sequence_dim=0))(own)).detach(), right


class _Total(nn.Module):
    """Adds up all rows."""

    def forward(self, x: Any) -> Any:
        return x.sum(0)


def first_match_of_a_pattern(mesh: DeviceMesh) -> Pair:
    """Each of two layers gets some rows, and gathers them first."""
    x, layers = _numbers(4, 3), nn.Sequential(_Total(), _Total())
    gathered = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True)
    parallelize_module(layers, mesh, {"*": gathered})
    own = x.chunk(mesh.size())[mesh.get_rank()]
    return torch.stack([layer(own) for layer in layers]), torch.stack([x.sum(0)] * 2)


def buffers_of_each_rank(mesh: DeviceMesh) -> Pair:
    """Adds up the buffers that the ranks have: each should be the first rank's."""
    module = nn.Module()
    module.register_buffer("scale", torch.full((2,), mesh.get_rank() + 1.0))
    scale: Any = distribute_module(module, mesh).scale
    return _full(DTensor.from_local(scale.to_local(), mesh, [Partial()])), torch.full((2,), float(mesh.size()))


WORLD_SIZES: dict[str, int] = {}
"""Numbers of ranks that show a wrong operator, if two do not."""
