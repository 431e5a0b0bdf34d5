"""Programs of DTensor alone, one for each defect of `tests.planted.arithmetic`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

from tests.planted.bare.operators import Pair, _full, _gradient, _numbers, _put, _share


def minus_a_norm(mesh: DeviceMesh) -> Pair:
    x = _numbers(4)
    return _full(-_put(x, mesh, Shard(0)).norm()), -x.norm()


def whole_minus_the_largest(mesh: DeviceMesh) -> Pair:
    x = torch.tensor([1.0, 2.0])
    return _full(_put(x, mesh, Replicate()) - _share(mesh, "max")), x - torch.tensor([3.0, 5.0])


def magnitude_of_the_largest(mesh: DeviceMesh) -> Pair:
    own = torch.tensor([-9.0 if mesh.get_rank() == 0 else 2.0])
    return _full(DTensor.from_local(own, mesh, [Partial("max")]).abs()), torch.tensor([2.0])


def ints_and_a_number_widened(mesh: DeviceMesh) -> Pair:
    x = torch.arange(4)
    return _full(_put(x, mesh, Shard(0)) + 0.5), x + 0.5


def all_like_any(mesh: DeviceMesh) -> Pair:
    x = torch.tensor([True, True, False, False])
    return _full(_put(x, mesh, Shard(0)).all()), x.all()


def evenly_on_each_axis(mesh: DeviceMesh) -> Pair:
    two_axes, x = init_device_mesh("cpu", (2, mesh.size() // 2)), _numbers(6)
    return _full(_put(x, two_axes, Shard(0), Shard(0)).mean()), x.mean()


def order_of_a_norm_remembered(mesh: DeviceMesh) -> Pair:
    x = _numbers(4)
    torch.linalg.vector_norm(_put(x, mesh, Shard(0)), 2.0)
    return _full(torch.linalg.vector_norm(_put(x, mesh, Shard(0)), 1.0)), torch.linalg.vector_norm(x, 1.0)


def flat_place_of_own_columns(mesh: DeviceMesh) -> Pair:
    x = torch.tensor([[0.0, 1.0, 2.0, 3.0], [9.0, 1.0, 2.0, 3.0]])
    return _full(_put(x, mesh, Shard(1)).argmax()), x.argmax()


def places_of_a_partial_largest(mesh: DeviceMesh) -> Pair:
    own = torch.tensor([9.0, 1.0] if mesh.get_rank() == 0 else [0.0, 2.0])
    return _full(DTensor.from_local(own, mesh, [Partial("max")]).max(0).indices), torch.tensor(0)


def bins_of_own_range(mesh: DeviceMesh) -> Pair:
    x = torch.tensor([0.0, 1.0, 2.0, 9.0])
    return _full(torch.histc(_put(x, mesh, Shard(0)), 3)), torch.histc(x, 3)


def mean_of_own_lines(mesh: DeviceMesh) -> Pair:
    x = _numbers(2, 4, 4, 3)
    return _full(F.group_norm(_put(x, mesh, Shard(2)), 2)), F.group_norm(x, 2)


def gradient_by_own_rows(mesh: DeviceMesh) -> Pair:
    factor = _numbers(4, 2) ** 2
    return _gradient(
        _numbers(4, 2),
        Shard(0),
        mesh,
        lambda x, put: F.batch_norm(x, None, None, training=True) * put(factor, Shard(0)),
    )


def largest_of_own_classes(mesh: DeviceMesh) -> Pair:
    x, target = _numbers(2, 4), torch.tensor([0, 3])
    with loss_parallel():
        return _full(F.cross_entropy(_put(x, mesh, Shard(1)), _put(target, mesh, Replicate()))), F.cross_entropy(
            x, target
        )


def summed_loss_averaged(mesh: DeviceMesh) -> Pair:
    x, target = _numbers(4, 3), torch.tensor([0, 2, 1, 1])
    put = [_put(each, mesh, Shard(0)) for each in (x, target)]
    return _full(F.nll_loss(put[0], put[1], reduction="sum")), F.nll_loss(x, target, reduction="sum")


def last_classes_of_own(mesh: DeviceMesh) -> Pair:
    factor = _numbers(2, 4) ** 2
    return _gradient(_numbers(2, 4), Shard(1), mesh, lambda x, put: x.softmax(-1) * put(factor, Shard(1)))


def not_written_in_place(mesh: DeviceMesh) -> Pair:
    x, y = _numbers(4), _numbers(4) + 20
    put = _put(x.clone(), mesh, Shard(0))
    put.sub_(_put(y, mesh, Replicate()))
    return _full(put), x - y


def largest_of_lists_added_up(mesh: DeviceMesh) -> Pair:
    x = _numbers(4)
    return _full(torch._foreach_max([_put(x, mesh, Shard(0))])[0]), x.max()


WORLD_SIZES = {"evenly_on_each_axis": 4}
"""Numbers of ranks that show a wrong operator, if two do not."""
