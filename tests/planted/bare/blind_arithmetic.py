"""Programs of DTensor alone, one for each defect of `tests.planted.blind_arithmetic`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

from tests.planted.bare.operators import Pair, _full, _gradient, _numbers, _put, _share


def _two_axes(mesh: DeviceMesh) -> DeviceMesh:
    return init_device_mesh("cpu", (2, mesh.size() // 2))


def _shared(mesh: DeviceMesh, reduce_op: str, first: list[Any], second: list[Any]) -> DTensor:
    """Rank 0 has the first part and rank 1 the second part of a partial."""
    own = torch.tensor([first, second][mesh.get_rank()], dtype=torch.float64)
    return DTensor.from_local(own, mesh, [Partial(reduce_op)])


def mean_of_own_part_subtracted(mesh: DeviceMesh) -> Pair:
    x = _numbers(4)
    put = _put(x, mesh, Shard(0))
    return _full(put - put.mean()), x - x.mean()


def divided_by_own_sums(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 2) ** 2
    put = _put(x, mesh, Shard(0))
    return _full(put / put.sum(0, keepdim=True)), x / x.sum(0, keepdim=True)


def largest_logarithms_of_own(mesh: DeviceMesh) -> Pair:
    x, y = _shared(mesh, "max", [1, 5], [3, 2]), _shared(mesh, "max", [4, 0], [0, 3])
    return _full(torch.logaddexp(x, y)), torch.logaddexp(*torch.tensor([[3.0, 5.0], [4.0, 3.0]], dtype=torch.float64))


def quotients_on_every_rank(mesh: DeviceMesh) -> Pair:
    x, y = _put(torch.tensor([6.0, 8.0]), mesh, Replicate()), _put(torch.tensor([2.0, 4.0]), mesh, Replicate())
    return _full(torch.addcdiv(_share(mesh, "sum"), x, y)), torch.tensor([7.0, 9.0])


def out_keeps_its_placement(mesh: DeviceMesh) -> Pair:
    x, target = _numbers(4), _put(torch.zeros((), dtype=torch.float64), mesh, Replicate())
    torch.amax(_put(x, mesh, Shard(0)), 0, out=target)
    return _full(target), x.amax(0)


def norms_placed_as_the_first(mesh: DeviceMesh) -> Pair:
    x, y = _numbers(4), _numbers(4) + 1
    norms = torch._foreach_norm([_put(x, mesh, Shard(0)), _put(y, mesh, Replicate())])
    return _full(norms[1]), y.norm()


def later_shares_of_a_list_for_whole(mesh: DeviceMesh) -> Pair:
    x = torch.tensor([1.0, 2.0])
    found = torch._foreach_add([_put(x, mesh, Replicate())] * 2, [_share(mesh, "sum")] * 2)
    return _full(found[1]), x + torch.tensor([4.0, 7.0])


def first_factors_of_a_list_remembered(mesh: DeviceMesh) -> Pair:
    weights = [_put(_numbers(4), mesh, Shard(0)).detach().requires_grad_(), _numbers(4).requires_grad_()]
    for weight in weights:
        optimizer = torch.optim.Adam([weight], lr=0.1, foreach=True)
        for _ in range(2):
            optimizer.zero_grad()
            torch.autograd.backward((weight**2).sum())
            optimizer.step()
    return _full(weights[0].detach()), weights[1].detach()


def number_added_to_shares_of_a_list(mesh: DeviceMesh) -> Pair:
    return _full(torch._foreach_add([_share(mesh, "sum")], 10.0)[0]), torch.tensor([14.0, 17.0])


def orders_of_norms_taken_for_equal(mesh: DeviceMesh) -> Pair:
    x = _numbers(4)
    _full(torch.linalg.vector_norm(_put(x, mesh, Shard(0)), 1.0))
    return _full(torch.linalg.vector_norm(_put(x, mesh, Shard(0)), 2.0)), torch.linalg.vector_norm(x, 2.0)


def norms_added_before_roots(mesh: DeviceMesh) -> Pair:
    x, y = _numbers(4), _numbers(4) ** 2
    return _full(_put(x, mesh, Shard(0)).norm() + _put(y, mesh, Shard(0)).norm()), x.norm() + y.norm()


def second_reduced_axis_overlooked(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 4)
    return _full(_put(x, _two_axes(mesh), Shard(0), Shard(1)).sum()), x.sum()


def kept_dims_of_a_variance_remembered(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 4)
    put = _put(x, mesh, Shard(0))
    put.var(1, keepdim=True)
    return torch.zeros(put.var(1).shape), torch.zeros(4)


def correction_ignored(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 4)
    return _full(_put(x, mesh, Shard(1)).std(0, correction=0)), x.std(0, correction=0)


def strided_parts_softmax(mesh: DeviceMesh) -> Pair:
    x = _numbers(2, 4)
    return _full(_put(x, mesh, Shard(1)).flatten().softmax(0)), x.flatten().softmax(0)


def second_axis_along_softmax(mesh: DeviceMesh) -> Pair:
    x = _numbers(2, 4)
    return _full(_put(x, _two_axes(mesh), Shard(1), Shard(1)).log_softmax(1)), x.log_softmax(1)


def shares_of_gradients_of_logarithms(mesh: DeviceMesh) -> Pair:
    head = _numbers(3, 4) ** 2
    return _gradient(_numbers(2, 3), Replicate(), mesh, lambda x, put: x.log_softmax(-1) @ put(head, Shard(1)))


def strided_rows_taken_for_plain(mesh: DeviceMesh) -> Pair:
    x, weight = _numbers(3, 8), _numbers(2, 4, 3)
    rows = _put(weight, mesh, Shard(1)).flatten(0, 1)
    return _full(_put(x, mesh, Shard(1)) @ rows), x @ weight.flatten(0, 1)


def beta_ignored(mesh: DeviceMesh) -> Pair:
    bias, x, weight = _numbers(3), _numbers(2, 4), _numbers(4, 3)
    put = [_put(bias, mesh, Replicate()), _put(x, mesh, Shard(1)), _put(weight, mesh, Shard(0))]
    return _full(torch.addmm(*put, beta=2)), torch.addmm(bias, x, weight, beta=2)


def solved_for_shares_of_the_matrix(mesh: DeviceMesh) -> Pair:
    x, right = torch.tensor([[1.0, 2.0], [0.0, 1.0], [3.0, 1.0], [2.0, 5.0]]), torch.tensor([[1.0], [2.0]])
    rows = _put(x, mesh, Shard(0))
    return _full(torch.linalg.solve(rows.T @ rows, _put(right, mesh, Replicate()))), torch.linalg.solve(x.T @ x, right)


def bias_without_gains(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 3)
    return _gradient(_numbers(3), Replicate(), mesh, lambda b, put: F.layer_norm(put(x, Shard(0)), (3,), None, b))


def first_groups_remembered(mesh: DeviceMesh) -> Pair:
    x = _numbers(2, 4, 3)
    F.group_norm(_put(x, mesh, Shard(0)), 2)
    return _full(F.group_norm(_put(x, mesh, Shard(0)), 1)), F.group_norm(x, 1)


def momentum_ignored(mesh: DeviceMesh) -> Pair:
    x, means = _numbers(4, 2), [torch.zeros(2, dtype=torch.float64) for _ in range(2)]
    put = _put(means[0], mesh, Shard(0))
    scales = torch.ones(2, dtype=torch.float64)
    F.batch_norm(_put(x, mesh, Shard(1)), put, _put(scales.clone(), mesh, Shard(0)), training=True, momentum=0.5)
    F.batch_norm(x, means[1], scales.clone(), training=True, momentum=0.5)
    return _full(put), means[1]


def first_layer_of_own_images(mesh: DeviceMesh) -> Pair:
    x = _numbers(2, 1, 3, 3)
    return _gradient(_numbers(1, 1, 2, 2), Replicate(), mesh, lambda w, put: F.conv2d(put(x, Shard(0)), w))


def places_in_own_lines(mesh: DeviceMesh) -> Pair:
    x = _numbers(2, 4, 4)
    return _full(F.max_pool2d(_put(x, mesh, Shard(1)), 2, return_indices=True)[1]), F.max_pool2d(
        x, 2, return_indices=True
    )[1]


def averages_of_the_largest(mesh: DeviceMesh) -> Pair:
    x = _shared(mesh, "max", [[[1, 5], [2, 0]]], [[[3, 2], [0, 4]]])
    whole = torch.tensor([[[3.0, 5.0], [2.0, 4.0]]], dtype=torch.float64)
    return _full(F.avg_pool2d(x, 2)), F.avg_pool2d(whole, 2)


def weights_of_first_classes(mesh: DeviceMesh) -> Pair:
    x, target, weight = _numbers(2, 4), torch.tensor([0, 3]), torch.tensor([1.0, 2.0, 3.0, 5.0], dtype=torch.float64)
    logits = _put(x, mesh, Shard(1))
    labels, weights = (_put(each, mesh, Replicate()) for each in (target, weight))
    with loss_parallel():
        return _full(F.cross_entropy(logits, labels, weights)), F.cross_entropy(x, target, weight)


def ignored_targets_have_gradients(mesh: DeviceMesh) -> Pair:
    target = torch.tensor([0, 3])

    def program(x: Any, put: Any) -> Any:
        return F.cross_entropy(x, put(target, Replicate()), ignore_index=3, reduction="sum")

    with loss_parallel():
        return _gradient(_numbers(2, 4), Shard(1), mesh, program)


def shares_pass_through_a_decomposition(mesh: DeviceMesh) -> Pair:
    target = torch.tensor([1.0, 2.0])
    return _full(F.mse_loss(_share(mesh, "sum"), _put(target, mesh, Replicate()))), F.mse_loss(
        torch.tensor([4.0, 7.0]), target
    )


def divided_in_place_by_own_norm(mesh: DeviceMesh) -> Pair:
    x = _numbers(4)
    put = _put(x.clone(), mesh, Shard(0))
    return _full(put.div_(put.norm())), x / x.norm()


def whole_quotients_widened(mesh: DeviceMesh) -> Pair:
    x = torch.arange(4)
    put = [_put(each, mesh, Shard(0)) for each in (x, x + 1)]
    return _full(torch.div(put[0], put[1], rounding_mode="floor")), torch.div(x, x + 1, rounding_mode="floor")


def product_of_an_empty_shard(mesh: DeviceMesh) -> Pair:
    x = torch.tensor([[2.0, 3.0]])
    return _full(_put(x, mesh, Shard(0)).prod(0)), x.prod(0)


def gradient_of_an_enlargement_averaged(mesh: DeviceMesh) -> Pair:
    head = _numbers(4, 6)

    def program(x: Any, put: Any) -> Any:
        return F.interpolate(x, scale_factor=2.0).flatten(1) @ put(head, Shard(1))

    return _gradient(_numbers(1, 1, 1, 1), Replicate(), mesh, program)


WORLD_SIZES = {"second_axis_along_softmax": 4, "second_reduced_axis_overlooked": 4}
"""Numbers of ranks that show a wrong operator, if two do not."""
