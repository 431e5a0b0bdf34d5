"""Programs of DTensor alone, one for each defect of `tests.planted.blind_fourth`, which `tests.planted.shown` runs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.experimental import implicit_replication, local_map, register_sharding

from tests.planted.bare.blind_others import _two_axes
from tests.planted.bare.operators import Pair, _full, _gradient, _numbers, _put, _share


def padding_counts_as_rows(mesh: DeviceMesh) -> Pair:
    """Three rows on two ranks."""
    x = _numbers(3, 2)
    own = x.chunk(mesh.size())[mesh.get_rank()]
    put: Any = DTensor.from_local(own, mesh, [Shard(0)], shape=x.shape, stride=x.stride())
    return _full(put), x


def length_by_the_last_axis(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 2)
    own = x[mesh.get_rank() : mesh.get_rank() + 1]
    put: Any = DTensor.from_local(own, _two_axes(mesh), [Shard(0), Shard(0)])
    return _full(put.sum() / len(put)), x.sum() / 4


def gradients_placed_as_inputs(mesh: DeviceMesh) -> Pair:
    """A weight that all ranks have, beside rows that are divided."""
    x, weight = _numbers(4, 3), _numbers(3, 2)
    put: Any = _put(weight, mesh, Replicate()).detach().requires_grad_()
    product = local_map(
        torch.mm,
        out_placements=[Shard(0)],
        in_placements=([Shard(0)], [Replicate()]),
        in_grad_placements=([Shard(0)], [Partial()]),
        device_mesh=mesh,
    )
    product(_put(x, mesh, Shard(0)), put).sum().backward()
    return _full(put.grad), x.sum(0)[:, None].expand(3, 2)


def results_placed_as_the_first(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 4)
    both = local_map(
        lambda rows: (rows * 2, rows.sum(0)), out_placements=([Shard(0)], [Partial()]), in_placements=([Shard(0)],)
    )
    return _full(both(_put(x, mesh, Shard(0)))[1]), x.sum(0)


def frozen_parameters_learn(mesh: DeviceMesh) -> Pair:
    plain = nn.Linear(3, 1).double()
    nn.init.ones_(plain.weight)
    plain.weight.requires_grad = False
    layer: Any = distribute_module(plain, mesh)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    layer(_put(_numbers(4, 3), mesh, Shard(0))).sum().backward()
    optimizer.step()
    return _full(layer.weight.detach()), torch.ones(1, 3, dtype=torch.float64)


def plain_tensor_is_a_share(mesh: DeviceMesh) -> Pair:
    x, y = _numbers(4, 2), torch.tensor([3.0, 5.0], dtype=torch.float64)
    with implicit_replication():
        return _full(_put(x, mesh, Shard(0)) * y), x * y


def mask_of_the_first_lookup(mesh: DeviceMesh) -> Pair:
    weight, ids = _numbers(4, 2) + 10, torch.tensor([0, 1, 2])
    table = _put(weight, mesh, Shard(0))
    _full(F.embedding(_put(ids, mesh, Replicate()), table))
    return _full(F.embedding(_put(3 - ids, mesh, Replicate()), table)), F.embedding(3 - ids, weight)


def first_flipped_dims_remembered(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 2)
    put = _put(x, mesh, Shard(0))
    put.flip(1)
    return _full(put.flip(0)), x.flip(0)


def own_rule_remembered(mesh: DeviceMesh) -> Pair:
    """A rule of the user's own for cummin, which keeps shards of all other dims."""
    op, x = torch.ops.aten.cummin.default, _numbers(4, 4)
    propagator = DTensor._op_dispatcher.sharding_propagator
    before = propagator.op_strategy_funcs[op], propagator.op_to_schema_info[op]

    def of_other_dims(x: Any, dim: int) -> Any:
        kept = [([Shard(each)] * 2, [Shard(each), None]) for each in range(x.ndim) if each != dim]
        return [([Replicate()] * 2, [Replicate(), None]), *kept]

    registered: Any = register_sharding(op)
    registered(of_other_dims)
    try:
        put = _put(x, mesh, Shard(0))
        put.cummin(1)
        return _full(put.cummin(0)[0]), x.cummin(0)[0]
    finally:
        propagator.op_strategy_funcs[op], propagator.op_to_schema_info[op] = before


def last_row_of_own(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 3)
    return _full(_put(x, mesh, Shard(0))[-1]), x[-1]


def target_included_in_spite(mesh: DeviceMesh) -> Pair:
    x, index, source = _numbers(4, 2), torch.tensor([0, 2, 2]), _numbers(3, 2) / 2
    found = _put(x, mesh, Shard(1)).index_reduce(
        0, _put(index, mesh, Replicate()), _put(source, mesh, Shard(1)), "amax", include_self=False
    )
    return _full(found), x.index_reduce(0, index, source, "amax", include_self=False)


def places_of_the_first_axis(mesh: DeviceMesh) -> Pair:
    """The largest of four is on the last rank."""
    x = torch.tensor([1.0, 5.0, 2.0, 7.0])
    return _full(_put(x, _two_axes(mesh), Shard(0), Shard(0)).argmax(0)), x.argmax(0)


def largest_less_than_a_number(mesh: DeviceMesh) -> Pair:
    return _full(_share(mesh, "max") < 2.5), torch.tensor([False, False])


def both_on_one_rank(mesh: DeviceMesh) -> Pair:
    """One rank has the positive number, the other one the negative number."""
    x = torch.tensor([[1.0, 0.0], [0.0, -1.0]])
    put = _put(x, mesh, Shard(0))
    return _full(torch.logical_and((put > 0).any(), (put < 0).any())), torch.logical_and((x > 0).any(), (x < 0).any())


def other_dims_of_any_overlooked(mesh: DeviceMesh) -> Pair:
    x = torch.zeros(2, 4)
    x[1, 3] = 1.0
    return _full(torch.any(_put(x, mesh, Shard(1)) > 0, (0, 1))), torch.any(x > 0)


def factor_of_a_quotient_ignored(mesh: DeviceMesh) -> Pair:
    weight, x, y = _numbers(4), _numbers(4), _numbers(4) ** 2 + 1
    put = [_put(each.clone(), mesh, Shard(0)) for each in (weight, x, y)]
    return _full(put[0].addcdiv_(put[1], put[2], value=-0.1)), weight.addcdiv(x, y, value=-0.1)


def drawn_by_shares(mesh: DeviceMesh) -> Pair:
    """All 100 probabilities are one; each rank has a share of one half."""
    share = DTensor.from_local(torch.full((100,), 0.5), mesh, [Partial()])
    return _full(torch.bernoulli(share)).aminmax().max, torch.tensor(1.0)


def lower_bound_ignored(mesh: DeviceMesh) -> Pair:
    put = _put(torch.zeros(40), mesh, Shard(0))
    return _full(torch.randint_like(put, 5, 6)).amin(), torch.tensor(5.0)


def pools_of_own_lines_averaged(mesh: DeviceMesh) -> Pair:
    x = _numbers(1, 2, 6, 4)
    return _full(F.adaptive_avg_pool2d(_put(x, mesh, Shard(2)), 2)), F.adaptive_avg_pool2d(x, 2)


def shares_of_pooled_gradients(mesh: DeviceMesh) -> Pair:
    """Each rank has some columns of the weight behind the pool, so its gradient is a share."""

    def loss(x: Any, put: Any) -> Any:
        return (F.max_pool2d(x, 2).flatten(1) @ put(_numbers(4, 4), Shard(1))) ** 2

    return _gradient(_numbers(2, 1, 4, 4), Replicate(), mesh, loss)


def not_orthonormal(mesh: DeviceMesh) -> Pair:
    x = torch.complex(_numbers(2, 4), _numbers(2, 4) + 1)
    return _full(torch.fft.fft(_put(x, mesh, Shard(0)), norm="ortho")), torch.fft.fft(x, norm="ortho")


def classes_of_pixels_weigh_the_same(mesh: DeviceMesh) -> Pair:
    x, target, weight = (
        _numbers(2, 3, 2, 2),
        torch.arange(8).reshape(2, 2, 2) % 3,
        torch.tensor([1.0, 2.0, 5.0]).double(),
    )
    put = [_put(x, mesh, Shard(0)), _put(target, mesh, Shard(0)), _put(weight, mesh, Replicate())]
    return _full(F.cross_entropy(put[0], put[1], put[2], reduction="sum")), F.cross_entropy(
        x, target, weight, reduction="sum"
    )


def place_from_the_end_in_own_columns(mesh: DeviceMesh) -> Pair:
    x = _numbers(3, 4)
    return _full(_put(x, mesh, Shard(1)).argmax(-1)), x.argmax(-1)


def diagonal_of_own_rows_written(mesh: DeviceMesh) -> Pair:
    x, diagonal = _numbers(4, 4), _numbers(4) + 20
    found = torch.diagonal_scatter(_put(x, mesh, Shard(0)), _put(diagonal, mesh, Shard(0)))
    return _full(found), torch.diagonal_scatter(x, diagonal)


def factor_ignored_beside_out(mesh: DeviceMesh) -> Pair:
    x, y = _numbers(4), _numbers(4) ** 2
    put = [_put(each, mesh, Shard(0)) for each in (x, y, torch.zeros_like(x))]
    torch.add(put[0], put[1], alpha=3, out=put[2])
    return _full(put[2]), x + 3 * y


def dtype_of_a_running_sum_ignored(mesh: DeviceMesh) -> Pair:
    x = torch.arange(8.0).reshape(4, 2)
    return _full(_put(x, mesh, Shard(0)).cumsum(1, dtype=torch.float64)), x.cumsum(1, dtype=torch.float64)


def logarithms_of_shares(mesh: DeviceMesh) -> Pair:
    x = torch.tensor([2.0, 0.5])
    return _full(torch.xlogy(_put(x, mesh, Replicate()), _share(mesh, "sum"))), torch.xlogy(x, torch.tensor([4.0, 7.0]))


def local_part_is_a_copy(mesh: DeviceMesh) -> Pair:
    """Each rank fills its own part."""
    put = _put(_numbers(2), mesh, Shard(0))
    put.to_local().fill_(mesh.get_rank())
    return _full(put * 1), torch.tensor([0.0, 1.0], dtype=torch.float64)


WORLD_SIZES = {"length_by_the_last_axis": 4, "places_of_the_first_axis": 4}
"""Numbers of ranks that show a wrong operator, if two do not."""
