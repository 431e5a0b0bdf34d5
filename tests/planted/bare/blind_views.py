"""Programs of DTensor alone, one for each defect of `tests.planted.blind_views`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, full

from tests.planted.bare.operators import Pair, _full, _gradient, _numbers, _put, _share


def flattened_by_whole_rows(mesh: DeviceMesh) -> Pair:
    x, two_axes = _numbers(4, 4), init_device_mesh("cpu", (2, mesh.size() // 2))
    return _full(_put(x, two_axes, Shard(0), Shard(1)).flatten()), x.flatten()


def one_row_expanded(mesh: DeviceMesh) -> Pair:
    x = _numbers(2, 3)
    return _full(_put(x, mesh, Shard(0)).expand(4, 2, 3)), x.expand(4, 2, 3)


def selected_row_is_a_copy(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 4)
    put = _put(x, mesh, Shard(1))
    put[0].zero_()
    x[0].zero_()
    return _full(put), x


def steps_of_own_rows(mesh: DeviceMesh) -> Pair:
    x = _numbers(6)
    return _full(_put(x, mesh, Shard(0))[::2]), x[::2]


def slice_written_on_every_rank(mesh: DeviceMesh) -> Pair:
    source, total = torch.tensor([9.0]), torch.tensor([4.0, 7.0])
    found = torch.slice_scatter(_share(mesh, "sum"), _put(source, mesh, Replicate()), 0, 1, 2)
    return _full(found), torch.slice_scatter(total, source, 0, 1, 2)


def joined_dim_from_the_end(mesh: DeviceMesh) -> Pair:
    x = _numbers(2, 4)
    return _full(torch.cat([_put(x, mesh, Shard(1)), _put(-x, mesh, Shard(1))], -1)), torch.cat([x, -x], -1)


def strided_dim_not_seen(mesh: DeviceMesh) -> Pair:
    x = _numbers(2, 4)
    flat = _put(x, mesh, Shard(1)).flatten()
    return _full(torch.cat([flat, flat])), torch.cat([x.flatten(), x.flatten()])


def indices_from_the_front(mesh: DeviceMesh) -> Pair:
    x, rows, columns = _numbers(4, 4), torch.tensor([[3], [0], [2], [1]]), torch.tensor([0, 2, 1, 3])
    put = [_put(rows, mesh, Shard(0)), _put(columns, mesh, Shard(0))]
    return _full(_put(x, mesh, Replicate())[put[0], put[1]]), x[rows, columns]


def colon_before_an_index_dropped(mesh: DeviceMesh) -> Pair:
    x, index = _numbers(4, 4), torch.tensor([1, 2])
    put = _put(x.clone(), mesh, Replicate())
    put[:, _put(index, mesh, Replicate())] = 9.0
    x[:, index] = 9.0
    return _full(put), x


def gathered_by_the_first_dim(mesh: DeviceMesh) -> Pair:
    x, index = _numbers(2, 4), torch.tensor([[3], [0]])
    return _full(_put(x, mesh, Shard(1)).gather(1, _put(index, mesh, Replicate()))), x.gather(1, index)


def shorter_index_divided(mesh: DeviceMesh) -> Pair:
    x, index = _numbers(4, 3), torch.tensor([[0], [2]])
    return _full(_put(x, mesh, Shard(0)).scatter(1, _put(index, mesh, Shard(0)), 9.0)), x.scatter(1, index, 9.0)


def embedding_gradient_averaged(mesh: DeviceMesh) -> Pair:
    ids = torch.tensor([0, 1, 1, 2])
    return _gradient(_numbers(3, 2), Replicate(), mesh, lambda w, put: F.embedding(put(ids, Shard(0)), w))


def copied_on_every_rank(mesh: DeviceMesh) -> Pair:
    share, x = _share(mesh, "sum"), torch.tensor([9.0, 8.0])
    return _full(share.copy_(_put(x, mesh, Replicate()))), x


def descending_ignored(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 4)
    found = _put(x, mesh, Shard(0)).sort(dim=1, descending=True, stable=True)[0]
    return _full(found), x.sort(dim=1, descending=True, stable=True)[0]


def shifted_by_own_parts(mesh: DeviceMesh) -> Pair:
    x = _numbers(2, 4)
    return _full(F.pad(_put(x, mesh, Shard(1)), (1, -1))), F.pad(x, (1, -1))


def rolled_flat_by_own_parts(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 2)
    return _full(_put(x, mesh, Shard(0)).roll(1)), x.roll(1)


def mask_from_the_front(mesh: DeviceMesh) -> Pair:
    x, mask = _numbers(4, 2), torch.tensor([True, False])
    return _full(_put(x, mesh, Shard(0)).masked_fill(_put(mask, mesh, Shard(0)), 9.0)), x.masked_fill(mask, 9.0)


def dtype_of_the_first_choice(mesh: DeviceMesh) -> Pair:
    mask, x, y = torch.tensor([True, False, True, False]), torch.arange(4), torch.arange(4) / 8
    return _full(torch.where(*(_put(each, mesh, Shard(0)) for each in (mask, x, y)))), torch.where(mask, x, y)


def first_dtype_remembered(mesh: DeviceMesh) -> Pair:
    share = DTensor.from_local(torch.tensor([0.5, 1.5]), mesh, [Partial()])
    share.to(torch.float64)
    return _full(share.to(torch.int64)), torch.tensor([1, 3])


def full_shards_for_all(mesh: DeviceMesh) -> Pair:
    return _full(full((3,), 5.0, device_mesh=mesh, placements=[Shard(0)]).sum()), torch.full((3,), 5.0).sum()


def random_shares(mesh: DeviceMesh) -> Pair:
    share = DTensor.from_local(torch.ones(100), mesh, [Partial()])
    return (_full(torch.rand_like(share)) < 1).all(), (torch.ones(100) > 0).all()


def source_rank_ignored(mesh: DeviceMesh) -> Pair:
    own = _numbers(4) + mesh.get_rank()
    return _full(distribute_tensor(own, mesh, [Shard(0)], src_data_rank=1)), _numbers(4) + 1


def evenly_chunked(mesh: DeviceMesh) -> Pair:
    x = _numbers(4)
    return _full(_put(x, mesh, Shard(0))), x


def padding_kept(mesh: DeviceMesh) -> Pair:
    share = DTensor.from_local(torch.full((3,), 0.5), mesh, [Partial()])
    return _full(share.redistribute(mesh, [Shard(0)]).exp().sum()), torch.ones(3).exp().sum()


def pieces_of_one_length(mesh: DeviceMesh) -> Pair:
    x = _numbers(2, 3)
    return _full(_put(x, mesh, Shard(1)).flatten()), x.flatten()


def offset_of_the_last_axis(mesh: DeviceMesh) -> Pair:
    x, two_axes = torch.arange(8.0), init_device_mesh("cpu", (2, mesh.size() // 2))
    return _full(_put(x, two_axes, Shard(0), Shard(0)).argmax(0)), x.argmax(0)


def plan_of_another_shape(mesh: DeviceMesh) -> Pair:
    _full(_put(_numbers(3), mesh, Shard(0)))
    return _full(_put(_numbers(4), mesh, Shard(0))), _numbers(4)


def gathered_by_memory(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 4)
    return _full(_put(x, mesh, Shard(0)).t()), x.t()


def divided_by_all_ranks(mesh: DeviceMesh) -> Pair:
    two_axes = init_device_mesh("cpu", (2, mesh.size() // 2), mesh_dim_names=("outer", "inner"))
    two_axes._flatten()
    return _full(DTensor.from_local(torch.ones(2), two_axes, [Partial("sum"), Partial("avg")])), torch.full((2,), 2.0)


def grad_placements_ignored(mesh: DeviceMesh) -> Pair:
    x = _numbers(4).requires_grad_()
    whole = DTensor.from_local(x, mesh, [Replicate()], grad_placements=[Partial()])
    total: Any = (whole.to_local(grad_placements=[Partial()]) * (1 + mesh.get_rank())).sum()
    total.backward()
    assert x.grad is not None
    return x.grad, torch.full((4,), 1.0 + mesh.get_rank(), dtype=torch.float64)


def share_of_a_gradient(mesh: DeviceMesh) -> Pair:
    x, factor = _numbers(3).requires_grad_(), _numbers(4, 3)
    total: Any = (DTensor.from_local(x, mesh, [Replicate()]) * _put(factor, mesh, Shard(0))).sum()
    total.backward()
    assert x.grad is not None
    return x.grad, factor.sum(0)


def gradient_in_forward_dtype(mesh: DeviceMesh) -> Pair:
    """Each rank's part of the gradient has the dtype bfloat16, their sum 257 does not."""
    x: Any = _put(torch.ones(2, 1), mesh, Shard(0)).detach().requires_grad_()
    weight = _put(torch.tensor([[256.0, 1.0]], dtype=torch.bfloat16), mesh, Shard(1))
    (x.redistribute(mesh, [Replicate()], forward_dtype=torch.bfloat16) @ weight).sum().backward()
    assert x.grad is not None
    return _full(x.grad), torch.full((2, 1), 257.0)


WORLD_SIZES = {
    "flattened_by_whole_rows": 4,
    "evenly_chunked": 3,
    "offset_of_the_last_axis": 4,
    "divided_by_all_ranks": 4,
}
"""Numbers of ranks that show a wrong operator, if two do not."""
