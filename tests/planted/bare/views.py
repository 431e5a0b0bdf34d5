"""Programs of DTensor alone, one for each defect of `tests.planted.views`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests.planted.bare.operators import Pair, _full, _gradient, _numbers, _put, _share


def _two_axes(mesh: DeviceMesh) -> DeviceMesh:
    return init_device_mesh("cpu", (2, mesh.size() // 2))


def strided_from_the_front(mesh: DeviceMesh) -> Pair:
    x = _numbers(2, 4, 4)
    return _full(_put(x, mesh, Shard(2)).flatten(1)), x.flatten(1)


def shards_to_the_outer_dim(mesh: DeviceMesh) -> Pair:
    x, weight = _numbers(2, 4, 3), _numbers(2, 3)
    return _full(F.linear(_put(x, mesh, Shard(1)), _put(weight, mesh, Replicate()))), F.linear(x, weight)


def padded_on_every_rank(mesh: DeviceMesh) -> Pair:
    return _full(F.pad(_share(mesh, "sum"), (1, 0), value=1.0)), torch.tensor([1.0, 4.0, 7.0])


def larger_source_divided(mesh: DeviceMesh) -> Pair:
    x, index, source = _numbers(4, 3), torch.tensor([[0], [2], [1], [0]]), _numbers(6, 1) + 20
    put = [_put(each, mesh, Shard(0)) for each in (x, index, source)]
    return _full(put[0].scatter(1, put[1], put[2])), x.scatter(1, index, source)


def values_put_on_every_rank(mesh: DeviceMesh) -> Pair:
    index, values = torch.tensor([1]), torch.tensor([10.0])
    put = [_put(each, mesh, Replicate()) for each in (index, values)]
    return _full(_share(mesh, "sum").index_put((put[0],), put[1], accumulate=True)), torch.tensor([4.0, 17.0])


def rows_of_others_scattered(mesh: DeviceMesh) -> Pair:
    table, ids = _numbers(4, 2), torch.tensor([0, 3, 1, 2])
    found = F.embedding(_put(ids, mesh, Replicate()), _put(table, mesh, Shard(0)))
    return _full(found.redistribute(mesh, [Shard(0)])), F.embedding(ids, table)


def places_of_largest_shares(mesh: DeviceMesh) -> Pair:
    own = torch.tensor([[4.0, 1.0, 2.0], [1.0, 2.0, 3.0]])[mesh.get_rank()]
    share = DTensor.from_local(own, mesh, [Partial("max")])
    return _full(share.cummax(0)[1]), torch.tensor([0, 0, 0])


def buckets_of_shares(mesh: DeviceMesh) -> Pair:
    bounds, total = torch.tensor([0.0, 2.0, 6.0]), torch.tensor([4.0, 7.0])
    return _full(torch.bucketize(_share(mesh, "sum"), _put(bounds, mesh, Replicate()))), torch.bucketize(total, bounds)


def first_sorted_dim_remembered(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 4)
    _put(x, mesh, Shard(0)).sort(dim=1, stable=True)
    return _full(_put(x, mesh, Shard(0)).sort(dim=0, stable=True)[0]), x.sort(dim=0, stable=True)[0]


def products_of_averages_added(mesh: DeviceMesh) -> Pair:
    x, share = _numbers(2, 2), DTensor.from_local(_numbers(2, 2) + mesh.get_rank(), mesh, [Partial("avg")])
    return _full(share @ _put(x, mesh, Replicate())), (_numbers(2, 2) + 0.5) @ x


def convolution_of_shares_of_gradients(mesh: DeviceMesh) -> Pair:
    x, head = _numbers(2, 1, 3, 3), _numbers(4, 6)

    def program(kernel: Any, put: Any) -> Any:
        hidden = F.conv2d(put(x, Replicate()), kernel).flatten(1)
        return hidden @ put(head, Shard(1))

    return _gradient(_numbers(1, 1, 2, 2), Replicate(), mesh, program)


def first_filling_remembered(mesh: DeviceMesh) -> Pair:
    x = _put(_numbers(4), mesh, Shard(0))
    x.new_full(x.shape, 2.0)
    return _full(x.new_full(x.shape, 3.0)), _numbers(4).new_full((4,), 3.0)


def old_dim_still_padded(mesh: DeviceMesh) -> Pair:
    x = _numbers(3, 4)
    return _full(_put(x, mesh, Shard(0)).redistribute(mesh, [Shard(1)])), x


def outer_axis_by_itself(mesh: DeviceMesh) -> Pair:
    x, two_axes = _numbers(8, 2), _two_axes(mesh)
    return _full(_put(x, two_axes, Shard(0), Shard(0)).redistribute(two_axes, [Replicate(), Shard(0)])), x


def gradients_stay_partial(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 2)

    def program(weight: Any, put: Any) -> Any:
        product = put(x.T.contiguous(), Shard(1)) @ weight
        if isinstance(product, DTensor):
            product = DTensor.from_local(product.to_local(), mesh, product.placements)
        return product

    return _gradient(_numbers(4, 3), Shard(0), mesh, program)


def gradients_divided_by_ranks(mesh: DeviceMesh) -> Pair:
    x = _numbers(2, 4)

    def program(weight: Any, put: Any) -> Any:
        product = put(x, Shard(1)) @ weight
        return product.redistribute(mesh, [Replicate()]) if isinstance(product, DTensor) else product

    return _gradient(_numbers(4, 3), Shard(0), mesh, program)


def placements_of_gradients_ignored(mesh: DeviceMesh) -> Pair:
    x = _put(_numbers(4), mesh, Shard(0)).detach().requires_grad_()
    (x.full_tensor(grad_placements=[Partial()]) * (1 + mesh.get_rank())).sum().backward()
    assert x.grad is not None
    return _full(x.grad), torch.full((4,), 3.0, dtype=torch.float64)


def first_sliced_gradient_remembered(mesh: DeviceMesh) -> Pair:
    factors = _numbers(2, 4)
    _gradient(_numbers(4, 4), Shard(1), mesh, lambda x, put: x[:2] * put(factors, Shard(1)))
    return _gradient(_numbers(4, 4), Shard(1), mesh, lambda x, put: x[2:] * put(factors, Shard(1)))


def first_number_remembered(mesh: DeviceMesh) -> Pair:
    _share(mesh, "sum") + 2.0
    return _full(_share(mesh, "sum") + 3.0), torch.tensor([7.0, 10.0])


def equal_by_own_parts(mesh: DeviceMesh) -> Pair:
    x = _numbers(4)
    other = x.clone()
    other[3] += 1
    said = [torch.equal(_put(x, mesh, Shard(0)), _put(other, mesh, Shard(0)))]
    return torch.tensor(said), torch.tensor([torch.equal(x, other)])


WORLD_SIZES = {"outer_axis_by_itself": 4}
"""Numbers of ranks that show a wrong operator, if two do not."""
