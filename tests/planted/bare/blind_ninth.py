"""Programs of DTensor alone, one for each defect of `tests.planted.blind_ninth`, which `tests.planted.shown` runs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests.planted.bare.operators import Pair, _full, _gradient, _numbers, _put


def mean_of_the_largest(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 4)
    return _full(_put(x, mesh, Shard(0)).amax(0).mean()), x.amax(0).mean()


def first_summed_dim_remembered(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 4)
    _put(x, mesh, Shard(0)).sum(0)
    return _full(_put(x, mesh, Shard(0)).sum(1)), x.sum(1)


def variance_of_shares(mesh: DeviceMesh) -> Pair:
    """The last layer's columns are divided, so that its result is a partial sum."""
    x, weight = _numbers(2, 4), _numbers(4, 3)
    product = _put(x, mesh, Shard(1)) @ _put(weight, mesh, Shard(0))
    return _full(product.var(1)), (x @ weight).var(1)


def root_mean_squares_of_own_columns(mesh: DeviceMesh) -> Pair:
    x = _numbers(2, 4)
    return _full((_put(x, mesh, Shard(1)) ** 2).mean(1).rsqrt()), (x**2).mean(1).rsqrt()


def gradient_of_a_summed_loss_averaged(mesh: DeviceMesh) -> Pair:
    targets = torch.tensor([0, 2, 1, 1])
    return _gradient(
        _numbers(4, 3), Shard(0), mesh, lambda x, put: F.cross_entropy(x, put(targets, Shard(0)), reduction="sum")
    )


def median_of_own_columns(mesh: DeviceMesh) -> Pair:
    x = _numbers(2, 4)
    return _full(_put(x, mesh, Shard(1)).median(1)[0]), x.median(1)[0]


def one_on_every_rank(mesh: DeviceMesh) -> Pair:
    """Counts the tokens of a batch.  One rank has none."""
    mask = torch.tensor([1.0, 1.0, 0.0, 0.0])
    return _full(_put(mask, mesh, Shard(0)).sum().clamp_min(1)), mask.sum().clamp_min(1)


def evaluated_by_the_batch(mesh: DeviceMesh) -> Pair:
    x, means, scales = _numbers(4, 2), torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    statistics = [_put(each.clone(), mesh, Shard(0)) for each in (means, scales)]
    return _full(F.batch_norm(_put(x, mesh, Shard(1)), *statistics)), F.batch_norm(x, means, scales)


def scores_by_shares(mesh: DeviceMesh) -> Pair:
    """Divides the columns of each head, so that the scores are a partial sum."""
    query, keys = _numbers(2, 3, 4) / 4, _numbers(2, 4, 3) / 4
    scores = _put(query, mesh, Shard(2)) @ _put(keys, mesh, Shard(1))
    return _full(scores.softmax(-1)), (query @ keys).softmax(-1)


def mean_in_its_own_dtype(mesh: DeviceMesh) -> Pair:
    x = _numbers(4).to(torch.bfloat16)
    return _full(_put(x, mesh, Shard(0)).mean(dtype=torch.float32)), x.mean(dtype=torch.float32)


def first_expansion_remembered(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 1)
    put = _put(x, mesh, Shard(0))
    put.expand(4, 2)
    return _full(put.expand(4, 3)), x.expand(4, 3)


def first_selected_dim_remembered(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 4, 4)
    put = _put(x, mesh, Shard(1))
    put.select(2, 0)
    return _full(put.select(0, 0).sum(1)), x.select(0, 0).sum(1)


def rows_of_a_transposed_matrix_stay(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 4)
    return _full(_put(x, mesh, Shard(0)).t().sum(0)), x.t().sum(0)


def whole_stacked_on_every_rank(mesh: DeviceMesh) -> Pair:
    x, y = _numbers(4), _numbers(4) + 1
    found = torch.stack([_put(x, mesh, Partial()), _put(y, mesh, Replicate())])
    return _full(found), torch.stack([x, y])


def experts_by_shares(mesh: DeviceMesh) -> Pair:
    x, weight = _numbers(2, 4), _numbers(4, 4)
    scores = _put(x, mesh, Shard(1)) @ _put(weight, mesh, Shard(0))
    return _full(scores.topk(2, 1)[0]), (x @ weight).topk(2, 1)[0]


def own_place_not_hidden(mesh: DeviceMesh) -> Pair:
    x = torch.ones(4, 4)
    return _full(_put(x, mesh, Shard(0)).triu(1)), x.triu(1)


def removed_dims_not_counted(mesh: DeviceMesh) -> Pair:
    x = _numbers(1, 4, 4)
    return _full(_put(x, mesh, Shard(1)).squeeze().sum(1)), x.squeeze().sum(1)


def rows_of_own_source_added(mesh: DeviceMesh) -> Pair:
    """Adds up the rows of tokens by their place."""
    x, index, rows = torch.zeros(3, 2, dtype=torch.float64), torch.tensor([0, 2, 1, 0]), _numbers(4, 2)
    put = _put(index, mesh, Shard(0)), _put(rows, mesh, Shard(0))
    return _full(_put(x, mesh, Replicate()).index_add(0, *put)), x.index_add(0, index, rows)


def backward_begins_with_shares(mesh: DeviceMesh) -> Pair:
    return _gradient(_numbers(4), Shard(0), mesh, lambda x, put: x * x)


def repeated_rows_stay(mesh: DeviceMesh) -> Pair:
    x = _numbers(4)
    return _full(_put(x, mesh, Shard(0)).repeat(4, 1).sum(0)), x.repeat(4, 1).sum(0)


def product_not_scaled(mesh: DeviceMesh) -> Pair:
    x, weight, bias = _numbers(4, 3), _numbers(3, 2), _numbers(2)
    put = _put(bias, mesh, Replicate()), _put(x, mesh, Shard(0)), _put(weight, mesh, Replicate())
    return _full(torch.addmm(*put, alpha=0.5)), torch.addmm(bias, x, weight, alpha=0.5)


def term_from_the_front(mesh: DeviceMesh) -> Pair:
    x, bias = _numbers(4, 2), _numbers(2)
    return _full(_put(x, mesh, Shard(0)) + _put(bias, mesh, Shard(0))), x + bias


def smallest_by_largest(mesh: DeviceMesh) -> Pair:
    x = _numbers(4, 3)
    return _full(_put(x, mesh, Shard(0)).amin(0)), x.amin(0)


def gathered_along_the_first_axis(mesh: DeviceMesh) -> Pair:
    x, two_axes = _numbers(4, 3), init_device_mesh("cpu", (2, mesh.size() // 2))
    return _full(_put(x, two_axes, Replicate(), Shard(0))), x


def last_dim_taken_for_the_second(mesh: DeviceMesh) -> Pair:
    """Divides the columns of a batch of sequences."""
    x = _numbers(2, 3, 4)
    own = x.chunk(mesh.size(), -1)[mesh.get_rank()].contiguous()
    return _full(DTensor.from_local(own, mesh, [Shard(-1)])), x


def number_from_each_share(mesh: DeviceMesh) -> Pair:
    x = _numbers(4)
    return _full(_put(x, mesh, Shard(0)).sum() - 3), x.sum() - 3


def positive_on_one_rank(mesh: DeviceMesh) -> Pair:
    x = torch.tensor([5.0, 5.0, -1.0, -1.0])
    return _full(_put(x, mesh, Shard(0)).sum() > 9), x.sum() > 9


def gradient_of_a_share_divided(mesh: DeviceMesh) -> Pair:
    """Each rank's share counts once in the sum."""
    own = _numbers(4).requires_grad_()
    _full((DTensor.from_local(own, mesh, [Partial()]) * 3).sum()).backward()
    assert own.grad is not None
    return own.grad, torch.full((4,), 3.0, dtype=torch.float64)


def earlier_rows_not_masked(mesh: DeviceMesh) -> Pair:
    table, ids = _numbers(4, 3), torch.tensor([0, 3, 1, 2])
    return _full(F.embedding(_put(ids, mesh, Replicate()), _put(table, mesh, Shard(0)))), F.embedding(ids, table)


def gradient_of_relu_by_shares(mesh: DeviceMesh) -> Pair:
    """The columns of the second layer are divided."""
    weight: Any = _numbers(3, 4)
    return _gradient(_numbers(2, 3), Replicate(), mesh, lambda x, put: x.relu() @ put(weight, Shard(1)))


WORLD_SIZES = {"gathered_along_the_first_axis": 4}
"""Numbers of ranks that show a wrong operator, if two do not."""
