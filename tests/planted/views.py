# ruff: noqa: E501  (a row of a table is a line)
"""Operators of DTensors that are wrong in one way each: views, indices, scans, products, factories and redistribution.

They were written without a look at the cases, the judge or the table of operators, on the history of torch's defects.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, _api, _redistribute
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor._ops import _view_ops
from torch.distributed.tensor._ops._view_ops import _ViewShardingPropagator
from torch.distributed.tensor._redistribute import _TransformInfo
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard

from tests.planted.operators import HANDLERS, WrongOperator, handled, remembered, replaced, rule
from tests.planted.rules import AVG, MAX, SUM, WHOLE, always

aten = torch.ops.aten


def _strided_from_the_front(right: Any, self: Any, p: Any, mesh_dim: int, placements: Any, claimed: Any, sizes: Any, *rest: Any) -> Any:  # fmt: skip
    placement, local = right(self, p, mesh_dim, placements, claimed, sizes, *rest)
    if isinstance(placement, _StridedShard):
        placement = _StridedShard(placement.dim, split_factor=math.prod(sizes[: p.dim]))
    return placement, local


def _not_masked(right: Any, self: Any, *args: Any) -> Any:
    self.mask_buffer.release_mask()
    return Partial._reduce_shard_value(self, *args)


def _larger_source(shapes: Any, args: Any) -> list[list[Placement]]:
    target, index, source = shapes
    dims = [d for d in range(len(target)) if d != args[1] % len(target) and target[d] == index[d]]
    return [[Shard(d)] * 4 for d in dims if source[d] != index[d]]


def _shares_of_gradients_kept(op: Any, args: Any, kwargs: Any) -> Any:
    with patch.object(DTensor, "redistribute", lambda self, *rest, **options: self):
        return _CONVOLUTION_BACKWARD(op, args, kwargs)


_CONVOLUTION_BACKWARD = HANDLERS[aten.convolution_backward.default]


def _old_dim_still_padded(right: Any, shape: Sequence[int], tensor: torch.Tensor, num: int, old: int, new: int, rank: int) -> Any:  # fmt: skip
    padded = list(shape)
    padded[old] = -(-shape[old] // num) * num
    return right(padded, tensor, num, old, new, rank)


def _outer_axis_by_itself(right: Any, current: Any, target: Any, *rest: Any) -> Any:
    """Redistributes only the outer of two axes that divide a dim, although the inner axis divides each of its parts."""
    if current.mesh.ndim != 2:
        return right(current, target, *rest)
    outer, inner = zip(current.placements, target.placements, strict=True)
    shard, shape = inner[0], list(current.shape)
    if not isinstance(shard, Shard) or shard != inner[1] or set(outer) != {shard, Replicate()}:
        return right(current, target, *rest)
    if shape[shard.dim] % current.mesh.size():
        return right(current, target, *rest)
    shape[shard.dim] //= current.mesh.size(1)
    return [_TransformInfo(0, outer, shape)]


def _gradients_stay_partial(right: Any, ctx: Any, gradient: Any) -> Any:
    if ctx.grad_placements is None:
        ctx.grad_placements = ctx.dtensor_spec.placements
    return right(ctx, gradient)


def _gradients_divided(right: Any, gradient: Any, previous: Any, **options: Any) -> Any:
    found, spec = right(gradient, previous, **options)
    for axis, (now, before) in enumerate(zip(gradient.placements, previous.placements, strict=True)):
        if before == SUM and not now.is_partial():
            found = found / previous.mesh.size(axis)
    return found, spec


def _first_arguments() -> AbstractContextManager[Any]:
    """Passes the arguments of an earlier call to an operator with redistributed operands, because the cache holds them."""
    right = OpDispatcher.redistribute_local_args

    def call(info: Any, schema: Any, use_val: Any) -> None:
        right(info, schema, use_val_from_redistribute_schema=True)

    return patch.object(OpDispatcher, "redistribute_local_args", staticmethod(call))


def _equal_by_own(op: Any, args: Any, kwargs: Any) -> bool:
    first, second = args
    return torch.equal(first.to_local(), second.redistribute(placements=first.placements).to_local())


WRONG_VIEWS: dict[str, WrongOperator] = {
    # Views and shapes.
    "strided_from_the_front": WrongOperator("a flattened dim counts rows of the dims before it too", "166483, 179632", replaced(_ViewShardingPropagator, "_rewrite_plain_shard", _strided_from_the_front)),
    "shards_to_the_outer_dim": WrongOperator("a dim that is split gives strided shards to its outer dim", "166483, 186282", replaced(_view_ops, "_split_factor_matches", lambda right, expected, actual: expected is not None)),
    "padded_on_every_rank": WrongOperator("each rank's share is padded with the whole value", "175656", rule([aten.constant_pad_nd.default], always(SUM, SUM))),
    # Indices.
    "larger_source_divided": WrongOperator("scatter divides a source that is larger than the index as it divides the index", "186149", rule([aten.scatter.src], _larger_source)),
    "values_put_on_every_rank": WrongOperator("index_put puts the whole values into each rank's share", "157671, 172894", rule([aten.index_put.default], always(SUM, SUM, WHOLE, WHOLE))),
    "rows_of_others_scattered": WrongOperator("an embedding does not mask rows of other ranks when its sum is scattered", "118080, 118513", replaced(_MaskPartial, "_reduce_shard_value", _not_masked)),
    # Sorting and scans.
    "places_of_largest_shares": WrongOperator("the largest of the ranks' places is the place of the largest so far", "175776, 176820", rule([aten.cummax.default], always(MAX, MAX))),
    "buckets_of_shares": WrongOperator("each rank puts its share of a sum into buckets", "173937", rule([aten.bucketize.Tensor], always(SUM, SUM, WHOLE))),
    "first_sorted_dim_remembered": WrongOperator("the cache of rules for a stable sort ignores its keyword dim", "159189, 159289", remembered(aten.sort.stable, RuntimeSchemaInfo(1)), stays=True),
    # Products.
    "products_of_averages_added": WrongOperator("a product with a partial average is a partial sum", "174926", rule([aten.mm.default, aten.bmm.default], lambda s, a: [[SUM, AVG, WHOLE], [SUM, WHOLE, AVG]])),
    "convolution_of_shares_of_gradients": WrongOperator("the backward of a convolution takes each rank's share of a gradient for the whole", "113123, 118600", lambda: patch.dict(HANDLERS, {aten.convolution_backward.default: _shares_of_gradients_kept})),
    # Factories.
    "first_filling_remembered": WrongOperator("the cache of rules for new_full ignores its value", "159289, 149071", remembered(aten.new_full.default, RuntimeSchemaInfo(100, ["dtype"])), stays=True),
    # Redistribution.
    "old_dim_still_padded": WrongOperator("a shard that moves to another dim keeps the padding of the old one", "115525", replaced(Shard, "_unpad_for_new_shard_dim", _old_dim_still_padded)),
    "outer_axis_by_itself": WrongOperator("the outer of two axes that divide one dim is redistributed without the inner one", "131210, 160266", replaced(_redistribute, "_gen_transform_infos", _outer_axis_by_itself)),
    # Gradients.
    "gradients_stay_partial": WrongOperator("to_local takes each rank's gradient of a partial sum for a share", "172932, 173454", replaced(_api._ToTorchTensor, "backward", _gradients_stay_partial)),
    "gradients_divided_by_ranks": WrongOperator("redistribute divides the gradient of a partial sum by the ranks", "115967, 170147", replaced(_redistribute, "_redistribute_backward", _gradients_divided)),
    "placements_of_gradients_ignored": WrongOperator("full_tensor ignores grad_placements", "110629", replaced(DTensor, "full_tensor", lambda right, self, *, grad_placements=None: right(self))),
    # Dispatch and caches.
    "first_sliced_gradient_remembered": WrongOperator("the cache of rules for the backward of slice ignores its place", "149071, 150357", remembered(aten.slice_backward.default, RuntimeSchemaInfo(100)), stays=True),
    "first_number_remembered": WrongOperator("an operator with a redistributed operand takes the number of its first call", "153603, 159289", _first_arguments, stays=True),
    "equal_by_own_parts": WrongOperator("equal compares each rank's parts alone", "99014", handled(aten.equal.default, _equal_by_own)),
}  # fmt: skip
