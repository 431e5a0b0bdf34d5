"""Programs of DTensor alone, one for each defect of `tests.planted.blind_others`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

from tests.planted.bare.operators import Pair, _full, _gradient, _numbers, _put, _share


def _two_axes(mesh: DeviceMesh) -> DeviceMesh:
    return init_device_mesh("cpu", (2, mesh.size() // 2), mesh_dim_names=("rows", "columns"))


def drawn_from_own_categories(mesh: DeviceMesh) -> Pair:
    """Some of 500 draws from four categories are the last category."""
    weights = _put(torch.ones(4), mesh, Shard(0))
    return _full(torch.multinomial(weights, 500, replacement=True)).amax(), torch.tensor(3)


def small_base_to_the_largest(mesh: DeviceMesh) -> Pair:
    return _full(0.5 ** _share(mesh, "max")), 0.5 ** torch.tensor([3.0, 5.0])


def column_times_own_part_of_a_row(mesh: DeviceMesh) -> Pair:
    column, row = _numbers(4, 1), _numbers(1, 4)
    return _full(_put(column, mesh, Shard(0)) * _put(row, mesh, Shard(1))), column * row


def out_not_written(mesh: DeviceMesh) -> Pair:
    x, y = _numbers(4), _numbers(4) ** 2
    target = _put(torch.zeros(4, dtype=torch.float64), mesh, Shard(0))
    torch.mul(_put(x, mesh, Shard(0)), _put(y, mesh, Replicate()), out=target)
    return _full(target), x * y


def norms_of_order_three_joined_as_of_two(mesh: DeviceMesh) -> Pair:
    x = _numbers(4)
    return _full(torch.linalg.vector_norm(_put(x, mesh, Shard(0)), 3)), torch.linalg.vector_norm(x, 3)


def pixels_of_own_places(mesh: DeviceMesh) -> Pair:
    """The places are a sum of products, which each rank has a part of."""
    x, first, second = _numbers(1, 1, 4, 4), _numbers(2, 4) / 50, _numbers(4, 4) / 10
    put = [_put(x, mesh, Replicate()), _put(first, mesh, Shard(1)), _put(second, mesh, Shard(0))]
    found = F.grid_sample(put[0], (put[1] @ put[2]).view(1, 2, 2, 2), align_corners=False)
    return _full(found), F.grid_sample(x, (first @ second).view(1, 2, 2, 2), align_corners=False)


def not_squeezed_from_the_end(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 1)
    return _full(_put(x, mesh, Shard(0)).squeeze(-1)), x.squeeze(-1)


def shape_of_the_first_piece(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 5)
    put: Any = _put(x, mesh, Shard(0))
    last = put.split(2, 1)[-1]
    return _full(last.sum() / last.numel()), x[:, 4:].mean()


def first_step_again(mesh: DeviceMesh) -> Pair:
    weights = [_put(_numbers(4), mesh, Shard(0)).detach().requires_grad_(), _numbers(4).requires_grad_()]
    for weight in weights:
        optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
        for step in range(2):
            optimizer.zero_grad()
            torch.autograd.backward((weight ** (step + 2)).sum())
            optimizer.step()
    return _full(weights[0].detach()), weights[1].detach()


def inner_dims_remembered(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 4)
    put = _put(x, mesh, Shard(1))
    F.glu(put, 0)
    return _full(F.glu(put, 1)), F.glu(x, 1)


def first_reduction_of_a_loss_remembered(mesh: DeviceMesh) -> Pair:
    x, y = _numbers(4), _numbers(4) ** 2
    put = [_put(each, mesh, Shard(0)) for each in (x, y)]
    F.huber_loss(put[0], put[1], delta=2.0)
    found = F.huber_loss(put[0], put[1], reduction="sum", delta=2.0)
    return _full(found), F.huber_loss(x, y, reduction="sum", delta=2.0)


def mesh_of_the_first_remembered(mesh: DeviceMesh) -> Pair:
    x, two_axes = _numbers(4), _two_axes(mesh)
    _full(_put(x, two_axes["rows"], Shard(0)) * 2)
    return _full(_put(x, two_axes["columns"], Shard(0)) * 2), x * 2


def whole_norm_on_every_rank(mesh: DeviceMesh) -> Pair:
    x, y = _numbers(4), _numbers(4) + 1
    put = [_put(x, mesh, Shard(0)), _put(y, mesh, Replicate())]
    return _full(torch.nn.utils.get_total_norm(put)), torch.nn.utils.get_total_norm([x, y])


def second_dim_for_the_last(mesh: DeviceMesh) -> Pair:
    x = _numbers(2, 4, 4)
    found = _put(x, mesh, Shard(0)).redistribute(mesh, [Shard(-1)])
    return found.to_local(), x.chunk(mesh.size(), -1)[mesh.get_rank()]


def checked_along_the_first_axis(mesh: DeviceMesh) -> Pair:
    """Ranks 0 and 1 hold the first row, ranks 2 and 3 the second; only ranks 0 and 2 have it right."""
    own = torch.tensor([float(mesh.get_rank())])
    found = DTensor.from_local(own, _two_axes(mesh), [Shard(0), Replicate()], run_check=True)
    return _full(found), torch.tensor([0.0, 2.0])


def conjugation_lost(mesh: DeviceMesh) -> Pair:
    x = torch.complex(_numbers(4), _numbers(4) + 1)
    return _full(_put(x, mesh, Shard(0)).conj()), x.conj().resolve_conj()


def chunk_shares_memory(mesh: DeviceMesh) -> Pair:
    whole = _put(_numbers(4), mesh, Replicate())
    whole.redistribute(mesh, [Shard(0)]).zero_()
    return _full(whole), _numbers(4)


def empty_shard_is_padded(mesh: DeviceMesh) -> Pair:
    x = torch.tensor([[2.0, 3.0]])
    return _full(distribute_tensor(x, mesh, [Shard(0)]).exp().sum()), x.exp().sum()


def parts_as_long_as_the_first(mesh: DeviceMesh) -> Pair:
    x = _numbers(5)
    return _full(_put(x, _two_axes(mesh), Shard(0), Shard(0))), x


def gradient_of_the_exact_gelu(mesh: DeviceMesh) -> Pair:
    return _gradient(_numbers(4) / 4, Shard(0), mesh, lambda x, put: F.gelu(x, approximate="tanh"))


def second_gradients_stop(mesh: DeviceMesh) -> Pair:
    """A loss with a penalty on its gradient."""

    def penalized(weight: torch.Tensor, gathered: Callable[[Any], Any]) -> torch.Tensor:
        loss = (gathered(weight) ** 3).sum()
        (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
        torch.autograd.backward(loss + (gradient**2).sum())
        assert weight.grad is not None
        return _full(weight.grad)

    put = _put(_numbers(4), mesh, Shard(0)).detach().requires_grad_()
    whole = _numbers(4).requires_grad_()
    return penalized(put, lambda weight: weight.redistribute(mesh, [Replicate()])), penalized(
        whole, lambda weight: weight
    )


def loss_of_own_rows_for_all(mesh: DeviceMesh) -> Pair:
    x, target, two_axes = _numbers(4, 4), torch.tensor([0, 3, 1, 2]), _two_axes(mesh)
    logits, labels = _put(x, two_axes, Shard(0), Shard(1)), _put(target, two_axes, Shard(0), Replicate())
    with loss_parallel():
        return _full(F.cross_entropy(logits, labels, reduction="sum")), F.cross_entropy(x, target, reduction="sum")


WORLD_SIZES = {
    "mesh_of_the_first_remembered": 4,
    "checked_along_the_first_axis": 4,
    "parts_as_long_as_the_first": 4,
    "loss_of_own_rows_for_all": 4,
}
"""Numbers of ranks that show a wrong operator, if two do not."""
