"""Programs of DTensor alone, one for each defect of `tests.planted.operators`.

Each returns what DTensor says, and what torch says without DTensor: see `tests.planted.shown`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

Pair = tuple[torch.Tensor, torch.Tensor]
Program = Callable[[DeviceMesh], Pair]


def _numbers(*shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float64) * 7 % 11 - 3).reshape(shape)


def _put(whole: torch.Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def _share(mesh: DeviceMesh, reduce_op: str) -> DTensor:
    own = torch.tensor([1.0, 5.0]) if mesh.get_rank() == 0 else torch.tensor([3.0, 2.0])
    return DTensor.from_local(own, mesh, [Partial(reduce_op)])


def _full(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def scalar_on_every_rank(mesh: DeviceMesh) -> Pair:
    return _full(_share(mesh, "sum") + 10), torch.tensor([14.0, 17.0])


def largest_scaled_by_a_negative(mesh: DeviceMesh) -> Pair:
    return _full(_share(mesh, "max") * -2), torch.tensor([-6.0, -10.0])


def shares_clamped_in_place(mesh: DeviceMesh) -> Pair:
    return _full(_share(mesh, "sum").clamp_(max=2.0)), torch.tensor([2.0, 2.0])


def promoted_by_a_wider_scalar(mesh: DeviceMesh) -> Pair:
    x, factor = torch.ones(2), torch.tensor(3.0, dtype=torch.float64)
    return _full(_put(x, mesh, Shard(0)) * _put(factor, mesh, Replicate())), x * factor


def averages_scattered_as_sums(mesh: DeviceMesh) -> Pair:
    term = torch.tensor([4.0, 6.0])
    return _full(_share(mesh, "avg") + _put(term, mesh, Shard(0))), torch.tensor([6.0, 9.5])


def kept_dims_counted_as_removed(mesh: DeviceMesh) -> Pair:
    x = _numbers(2, 2, 4)
    return _full(_put(x, mesh, Shard(2)).sum((0, 1), keepdim=True)), x.sum((0, 1), keepdim=True)


def place_by_even_shards(mesh: DeviceMesh) -> Pair:
    x = torch.tensor([1.0, 0.0, 2.0])
    return _full(_put(x, mesh, Shard(0)).argmax(0)), x.argmax(0)


def last_of_equal_largest(mesh: DeviceMesh) -> Pair:
    x = torch.tensor([1.0, 2.0, 2.0, 0.0])
    return _full(_put(x, mesh, Shard(0)).argmax(0)), x.argmax(0)


def first_dim_remembered(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 4)
    _put(x, mesh, Shard(0)).cumsum(1)
    return _full(_put(x, mesh, Shard(0)).cumsum(0)), x.cumsum(0)


def foreach_norms_added_up(mesh: DeviceMesh) -> Pair:
    x = torch.tensor([3.0, 4.0])
    return _full(torch._foreach_norm([_put(x, mesh, Shard(0))])[0]), x.norm()


def inner_dim_takes_the_shards(mesh: DeviceMesh) -> Pair:
    x = _numbers(4)
    return _full(_put(x, mesh, Shard(0)).unflatten(0, (2, 2))), x.unflatten(0, (2, 2))


def unbound_dim_not_counted(mesh: DeviceMesh) -> Pair:
    x = _numbers(2, 2, 2)
    piece = _put(x, mesh, Shard(1)).unbind(0)[1]
    return piece.to_local(), _put(x.unbind(0)[1], mesh, *piece.placements).to_local()


def filled_dim_from_the_end(mesh: DeviceMesh) -> Pair:
    x, index = _numbers(2, 4), torch.tensor([1])
    sharded = _put(x, mesh, Shard(1))
    return _full(sharded.index_fill(-1, _put(index, mesh, Replicate()), 9.0)), x.index_fill(-1, index, 9.0)


def rows_of_even_shards(mesh: DeviceMesh) -> Pair:
    table, ids = _numbers(3, 2), torch.tensor([0, 1, 2])
    return _full(F.embedding(_put(ids, mesh, Replicate()), _put(table, mesh, Shard(0)))), F.embedding(ids, table)


def _gradient(whole: torch.Tensor, placement: Placement, mesh: DeviceMesh, program: Any) -> Pair:
    """Returns the gradient of `program(x, put).sum()` at `whole`, by DTensor and without."""
    sharded = _put(whole, mesh, placement).detach().requires_grad_()
    program(sharded, lambda x, each: _put(x, mesh, each)).sum().backward()
    plain = whole.clone().requires_grad_()
    program(plain, lambda x, each: x).sum().backward()
    assert sharded.grad is not None and plain.grad is not None
    return _full(sharded.grad), plain.grad


def padding_row_has_a_gradient(mesh: DeviceMesh) -> Pair:
    ids = torch.tensor([0, 1, 1, 2])
    return _gradient(
        _numbers(3, 2), Replicate(), mesh, lambda w, put: F.embedding(put(ids, Shard(0)), w, padding_idx=1)
    )


def gains_of_own_rows(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 3)
    return _gradient(_numbers(3), Replicate(), mesh, lambda w, put: F.layer_norm(put(x, Shard(0)), (3,), w))


def statistics_of_own_rows(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 2)
    return _full(F.batch_norm(_put(x, mesh, Shard(0)), None, None, training=True)), F.batch_norm(
        x, None, None, training=True
    )


def kernels_gradient_averaged(mesh: DeviceMesh) -> Pair:
    x = _numbers(2, 1, 3, 3)
    return _gradient(_numbers(1, 1, 2, 2), Replicate(), mesh, lambda w, put: F.conv2d(put(x, Shard(0)), w))


def total_weight_of_own_rows(mesh: DeviceMesh) -> Pair:
    target = torch.tensor([0, 2, 1, 1])
    return _gradient(_numbers(4, 3), Shard(0), mesh, lambda x, put: F.nll_loss(x, put(target, Replicate())))


def attention_to_own_keys(mesh: DeviceMesh) -> Pair:
    x = _numbers(2, 4)
    return _full(torch.ops.aten._safe_softmax(_put(x, mesh, Shard(1)), -1)), x.softmax(-1)


def norm_of_shares(mesh: DeviceMesh) -> Pair:
    return _full(torch.linalg.vector_norm(_share(mesh, "sum"))), torch.tensor([4.0, 7.0]).norm()


def first_reduction_remembered(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 4)
    _put(x, mesh, Shard(0)).amax(1)
    return _full(_put(x, mesh, Shard(0)).amax(0)), x.amax(0)


def number_minus_shares(mesh: DeviceMesh) -> Pair:
    return _full(10 - _share(mesh, "sum")), torch.tensor([6.0, 3.0])


def largest_added_in_turn(mesh: DeviceMesh) -> Pair:
    return _full(_share(mesh, "max").cumsum(0)), torch.tensor([3.0, 8.0])


def divided_by_two_ranks(mesh: DeviceMesh) -> Pair:
    share, term = DTensor.from_local(torch.ones(2), mesh, [Partial()]), _put(torch.ones(2), mesh, Replicate())
    return _full(share + term), torch.full((2,), mesh.size() + 1.0)


def second_axis_not_reduced(mesh: DeviceMesh) -> Pair:
    two_axes = init_device_mesh("cpu", (1, mesh.size()))
    share = DTensor.from_local(torch.ones(2), two_axes, [Replicate(), Partial()])
    return _full(share), torch.full((2,), float(mesh.size()))


def rows_of_first_axis(mesh: DeviceMesh) -> Pair:
    two_axes, whole = init_device_mesh("cpu", (1, mesh.size())), Replicate()
    table, ids = _numbers(4, 2), torch.tensor([0, 3, 1])
    put = (_put(ids, two_axes, whole, whole), _put(table, two_axes, whole, Shard(0)))
    return _full(F.embedding(*put)), F.embedding(ids, table)


def rows_of_own_process(mesh: DeviceMesh) -> Pair:
    two_axes, whole = init_device_mesh("cpu", (2, mesh.size() // 2)), Replicate()
    table, ids = _numbers(4, 2), torch.tensor([0, 3, 1])
    put = (_put(ids, two_axes, whole, whole), _put(table, two_axes, Shard(0), whole))
    return _full(F.embedding(*put)), F.embedding(ids, table)


def copied_from_the_same_dim(mesh: DeviceMesh) -> Pair:
    target, source = _numbers(2, 2, 2), _numbers(2, 2) + 20
    copy = _put(target, mesh, Shard(0))
    return _full(copy.copy_(_put(source, mesh, Shard(0)))), target.clone().copy_(source)


def target_on_every_rank(mesh: DeviceMesh) -> Pair:
    x, index, terms = _numbers(4), torch.tensor([0, 1, 1, 3]), _numbers(4) + 20
    put = [_put(x, mesh, Replicate()), *(_put(each, mesh, Shard(0)) for each in (index, terms))]
    return _full(put[0].scatter_add(0, put[1], put[2])), x.scatter_add(0, index, terms)


def filled_like_a_share(mesh: DeviceMesh) -> Pair:
    return _full(torch.full_like(_share(mesh, "sum"), 3.0)), torch.full((2,), 3.0)


def parts_exchanged_in_reverse(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 4)
    return _put(x, mesh, Shard(0)).redistribute(mesh, [Shard(1)]).full_tensor(), x


def gradient_of_own_ids(mesh: DeviceMesh) -> Pair:
    ids = torch.tensor([0, 1, 1, 2])
    return _gradient(_numbers(3, 2), Replicate(), mesh, lambda w, put: F.embedding(put(ids, Shard(0)), w))


def smallest_magnitude_by_largest(mesh: DeviceMesh) -> Pair:
    x = torch.tensor([5.0, -2.0, 4.0, 3.0])
    return _full(torch.linalg.vector_norm(_put(x, mesh, Shard(0)), -torch.inf)), torch.linalg.vector_norm(x, -torch.inf)


def second_rolled_dim_overlooked(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 4)
    return _full(_put(x, mesh, Shard(1)).roll((1, 1), (0, 1))), x.roll((1, 1), (0, 1))


def second_flipped_dim_overlooked(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 4)
    return _full(_put(x, mesh, Shard(1)).flip(0, 1)), x.flip(0, 1)


def outer_normalized_dim_overlooked(mesh: DeviceMesh) -> Pair:
    x = _numbers(2, 4, 3)
    return _full(F.layer_norm(_put(x, mesh, Shard(1)), (4, 3))), F.layer_norm(x, (4, 3))


def last_of_equal_places_written(mesh: DeviceMesh) -> Pair:
    x, index, terms = _numbers(4), torch.tensor([1, 1]), _numbers(2) + 20
    put = [_put(each, mesh, Replicate()) for each in (x, index, terms)]
    return _full(put[0].index_put((put[1],), put[2], accumulate=True)), x.index_put((index,), terms, accumulate=True)


def first_transposed_dims_remembered(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 4, 4)
    _put(x, mesh, Shard(0)).transpose(1, 2)
    return _full(_put(x, mesh, Shard(0)).transpose(0, 1)), x.transpose(0, 1)


def first_sliced_dim_remembered(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 4)
    torch.ops.aten.slice.Tensor(_put(x, mesh, Shard(0)), 1, 0, 3)
    return _full(torch.ops.aten.slice.Tensor(_put(x, mesh, Shard(0)), 0, 1, 4)), x[1:]


def dtype_of_a_sum_ignored(mesh: DeviceMesh) -> Pair:
    x = torch.ones(4, 2)
    return _full(_put(x, mesh, Shard(0)).sum(0, dtype=torch.float64)), x.sum(0, dtype=torch.float64)


def ignored_targets_counted(mesh: DeviceMesh) -> Pair:
    x, target = _numbers(4, 3), torch.tensor([0, 2, 1, 2])
    put = [_put(each, mesh, Replicate()) for each in (x, target)]
    return _full(F.nll_loss(put[0], put[1], ignore_index=2)), F.nll_loss(x, target, ignore_index=2)


def averages_over_the_whole_mesh(mesh: DeviceMesh) -> Pair:
    two_axes = init_device_mesh("cpu", (2, mesh.size() // 2))
    share = DTensor.from_local(torch.ones(2), two_axes, [Replicate(), Partial("avg")])
    return _full(share), torch.ones(2)


def first_factor_for_the_whole_list(mesh: DeviceMesh) -> Pair:
    x = _numbers(4)
    found = torch._foreach_mul([_put(x, mesh, Shard(0)), _put(x, mesh, Shard(0))], [2.0, 3.0])
    return _full(found[1]), 3 * x


def factor_of_the_added_ignored(mesh: DeviceMesh) -> Pair:
    x = _numbers(4)
    return _full(_put(x, mesh, Shard(0)).add_(_put(x, mesh, Shard(0)), alpha=3)), 4 * x


WORLD_SIZES = {"divided_by_two_ranks": 3, "rows_of_own_process": 4, "averages_over_the_whole_mesh": 4}
"""Numbers of ranks that show a wrong operator, if two do not."""
