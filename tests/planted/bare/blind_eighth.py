"""Programs of DTensor alone, one for each defect of `tests.planted.blind_eighth`, which `tests.planted.shown` runs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from tests.planted.bare.blind_sixth import _shares
from tests.planted.bare.operators import Pair, _full, _gradient, _numbers, _put


def logits_of_shares(mesh: DeviceMesh) -> Pair:
    """The last layer's columns are divided, so that its logits are a partial sum."""
    x, weight = _numbers(2, 4), _numbers(4, 3)
    logits = _put(x, mesh, Shard(1)) @ _put(weight, mesh, Shard(0))
    return _full(logits.log_softmax(1)), (x @ weight).log_softmax(1)


def normalized_by_shares(mesh: DeviceMesh) -> Pair:
    x, gains = _numbers(2, 4), torch.ones(4, dtype=torch.float64)
    share, whole = _put(x, mesh, Partial()), _put(gains, mesh, Replicate())
    return _full(F.layer_norm(share, (4,), whole, whole, eps=1.0)), F.layer_norm(x, (4,), gains, gains, eps=1.0)


def sum_of_a_loss_averaged(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 2).sigmoid()
    found = F.binary_cross_entropy(_put(x, mesh, Shard(0)), _put(1 - x, mesh, Shard(0)), reduction="sum")
    return _full(found), F.binary_cross_entropy(x, 1 - x, reduction="sum")


def first_softmax_remembered(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 4)
    _put(x, mesh, Shard(0)).softmax(1)
    return _full(_put(x, mesh, Shard(0)).softmax(0)), x.softmax(0)


def norm_of_own_last_columns(mesh: DeviceMesh) -> Pair:
    x = _numbers(2, 4)
    return _full(torch.linalg.vector_norm(_put(x, mesh, Shard(1)), dim=-1)), torch.linalg.vector_norm(x, dim=-1)


def kept_dim_counted(mesh: DeviceMesh) -> Pair:
    x = _numbers(2, 4, 4)
    return _full(_put(x, mesh, Shard(2)).amax(1, keepdim=True)), x.amax(1, keepdim=True)


def gradient_of_weights_by_shares(mesh: DeviceMesh) -> Pair:
    """The ranks divide the columns of the values. An attention may have such values."""
    values = _numbers(3, 4)
    return _gradient(_numbers(2, 3), Replicate(), mesh, lambda x, put: (x / 4).softmax(1) @ put(values, Shard(1)))


def largest_instead_of_smallest(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 4)
    return _full(_put(x, mesh, Shard(0)).topk(2, 1, largest=False)[0]), x.topk(2, 1, largest=False)[0]


def root_of_own_means(mesh: DeviceMesh) -> Pair:
    x = _numbers(2, 4)
    return _full((_put(x, mesh, Shard(1)) ** 2).mean(1).sqrt()), (x**2).mean(1).sqrt()


def rows_of_a_batch_to_the_sequence(mesh: DeviceMesh) -> Pair:
    x, weight = _numbers(2, 2, 3), _numbers(4, 3)
    return _full(F.linear(_put(x, mesh, Shard(0)), _put(weight, mesh, Replicate()))), F.linear(x, weight)


def stacked_from_the_end(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 4)
    put = _put(x, mesh, Shard(1))
    return _full(torch.stack([put, put + 1], -1).sum(-1)), torch.stack([x, x + 1], -1).sum(-1)


def padded_with_zeros(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 2)
    return _full(F.pad(_put(x, mesh, Shard(0)), (0, 1), value=7.0)), F.pad(x, (0, 1), value=7.0)


def columns_behind_the_first_ids(mesh: DeviceMesh) -> Pair:
    """Adds up the rows of each line of ids."""
    table, ids = _numbers(4, 4), torch.tensor([[0, 3, 1, 1], [2, 1, 0, 3]])
    found = F.embedding(_put(ids, mesh, Replicate()), _put(table, mesh, Shard(1))).sum(1)
    return _full(found), F.embedding(ids, table).sum(1)


def second_squeezed_dim_not_counted(mesh: DeviceMesh) -> Pair:
    x = _numbers(1, 1, 4, 4)
    return _full(_put(x, mesh, Shard(2)).squeeze((0, 1)).sum(1)), x.squeeze((0, 1)).sum(1)


def ones_of_each_rank(mesh: DeviceMesh) -> Pair:
    x = _numbers(4)
    return _full(_put(x, mesh, Partial()).new_ones(4)), torch.ones(4, dtype=torch.float64)


def zeros_in_its_own_dtype(mesh: DeviceMesh) -> Pair:
    x = torch.ones(4, dtype=torch.bfloat16)
    return _full(torch.zeros_like(_put(x, mesh, Shard(0)), dtype=torch.float32)), torch.zeros(4)


def shorter_index_added(mesh: DeviceMesh) -> Pair:
    x, index, rows = _numbers(4, 3), torch.tensor([[0, 1], [2, 2]]), _numbers(2, 2)
    put = _put(index, mesh, Replicate()), _put(rows, mesh, Replicate())
    return _full(_put(x, mesh, Shard(0)).scatter_add(1, *put)), x.scatter_add(1, index, rows)


def activation_of_shares(mesh: DeviceMesh) -> Pair:
    x = _numbers(4)
    return _full(F.silu(_put(x, mesh, Partial()))), F.silu(x)


def scale_by_the_largest(mesh: DeviceMesh) -> Pair:
    x = _numbers(4) + 4
    whole: Any = _put(torch.tensor(127.0, dtype=torch.float64), mesh, Replicate())
    return _full(whole / _put(x, mesh, Shard(0)).amax()), 127 / x.amax()


def none_on_one_rank(mesh: DeviceMesh) -> Pair:
    x = torch.tensor([1.0, 0.0, 0.0, 0.0])
    return _full(~_put(x > 0, mesh, Shard(0)).any()), ~(x > 0).any()


def gradients_added_unscaled(mesh: DeviceMesh) -> Pair:
    x, grad = _numbers(4), _numbers(4) + 1
    put: list[torch.Tensor] = [_put(x.clone(), mesh, Shard(0))]
    torch._foreach_add_(put, [_put(grad, mesh, Shard(0))], alpha=-0.5)
    return _full(put[0]), x - grad / 2


def start_on_every_rank(mesh: DeviceMesh) -> Pair:
    start, end = _numbers(4), _numbers(4) + 2
    return _full(torch.lerp(_put(start, mesh, Replicate()), _put(end, mesh, Partial()), 0.25)), start.lerp(end, 0.25)


def first_gathered_dim_remembered(mesh: DeviceMesh) -> Pair:
    x, index = _numbers(4, 4), torch.tensor([[0, 1, 1, 0]] * 4)
    put = _put(x, mesh, Shard(0)), _put(index, mesh, Shard(0))
    put[0].gather(1, put[1])
    return _full(put[0].gather(0, put[1])), x.gather(0, index)


def largest_scattered_as_sums(mesh: DeviceMesh) -> Pair:
    share = _shares(mesh, "max", [1.0, 5.0], [3.0, 2.0])
    return _full(share.redistribute(placements=[Shard(0)])), torch.tensor([3.0, 5.0])


def product_with_the_largest(mesh: DeviceMesh) -> Pair:
    """Takes the largest of each column of divided rows as the input of a layer."""
    x, weight = _numbers(4, 3), _numbers(3, 2) - 2
    largest = _put(x, mesh, Shard(0)).amax(0, keepdim=True)
    return _full(largest @ _put(weight, mesh, Replicate())), x.amax(0, keepdim=True) @ weight


WORLD_SIZES: dict[str, int] = {}
"""Numbers of ranks that show a wrong operator, if two do not."""
