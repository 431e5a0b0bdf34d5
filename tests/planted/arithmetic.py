# ruff: noqa: E501  (a row of a table is a line)
"""Operators of DTensors that are wrong in one way each: pointwise ones, reductions, norms, losses, lists.

They were written without a look at the gate's cases, in places where torch had defects.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor, Partial, Shard, _nonlinear_redux
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor._ops import _math_ops
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.parallel import loss

from tests.planted.operators import WrongOperator, handled, remembered, replaced, rule, wrapped
from tests.planted.rules import MAX, SUM, WHOLE, always

aten = torch.ops.aten


def _ints_and_number_widened(op: Any, args: Any, kwargs: Any) -> Any:
    result = op(*args, **kwargs)
    ints = isinstance(args[0], DTensor) and not args[0].dtype.is_floating_point
    return result.to(torch.float64) if ints and isinstance(args[1], float) else result


def _evenly_on_each_axis(right: Any, shape: Any, spec: DTensorSpec, dim: int) -> bool:
    sizes = [spec.mesh.size(axis) for axis, each in enumerate(spec.placements) if each.is_shard(dim)]
    return all(shape[dim] % size == 0 for size in sizes)


def _flat_places_by_offset(right: Any, idx: Any, shape: Any, mesh: Any, placements: Any, dim: Any) -> Any:
    if dim is not None:
        return right(idx, shape, mesh, placements, dim)
    _, offsets = _nonlinear_redux.compute_local_shape_and_global_offset(shape, mesh, placements)
    return 0, idx + sum(offset * shape[each + 1 :].numel() for each, offset in enumerate(offsets))


def _dims_from_the_front(right: Any, schema: Any) -> Any:
    with patch.object(_math_ops, "normalize_dim", lambda dim, ndim: dim):
        return right(schema)


def _largest_of_own_classes(right: Any, *args: Any) -> Any:
    reduced = loss.funcol.all_reduce

    def all_reduce(tensor: Any, reduceOp: str, group: Any) -> Any:
        return tensor if reduceOp.lower() == "max" else reduced(tensor, reduceOp, group)

    with patch.object(loss.funcol, "all_reduce", all_reduce):
        return right(*args)


def _written_where_it_lies(op: Any, args: Any, kwargs: Any) -> Any:
    first, second = args[:2]
    if isinstance(second, DTensor) and second.placements != first.placements:
        return aten.sub.Tensor(*args, **kwargs)
    return op(*args, **kwargs)


def _lists_added_up(right: Any, schema: Any) -> Any:
    reduction = _math_ops.common_reduction_strategy
    with patch.object(
        _math_ops,
        "common_reduction_strategy",
        lambda *args, **rest: reduction(*args, **{**rest, "reduction_op": "sum"}),
    ):
        return right(schema)


def _summed_loss_averaged(right: Any, schema: Any) -> Any:
    strategy = right(schema)
    if schema.args_schema[3] == _math_ops.Reduction.SUM.value:
        for each in strategy.strategies:
            value, total = each.output_specs
            placements = tuple(Partial("avg") if place.is_partial() else place for place in value.placements)
            each.output_specs = (DTensorSpec(value.mesh, placements), total)
    return strategy


WRONG_ARITHMETIC: dict[str, WrongOperator] = {
    # Pointwise, type promotion, numbers as arguments.
    "minus_a_norm": WrongOperator("minus the norm of shards is the norm", "172601, 149768", rule([aten.neg.default], always(_NormPartial(2), _NormPartial(2)))),
    "whole_minus_the_largest": WrongOperator("whole minus a partial maximum is a partial maximum", "172601, 174800", rule([aten.sub.Tensor], always(MAX, WHOLE, MAX))),
    "magnitude_of_the_largest": WrongOperator("the magnitude of a partial maximum is the largest magnitude", "172601", rule([aten.abs.default], always(MAX, MAX))),
    "ints_and_a_number_widened": WrongOperator("ints plus a Python float have float64", "74400", handled(aten.add.Tensor, _ints_and_number_widened)),
    # Reductions.
    "all_like_any": WrongOperator("all is reduced by a sum of bools", "165923, 155420", lambda: patch.dict(_math_ops.LINEAR_REDUCTION_OP_MAP, {aten.all.default: "sum", aten.all.dim: "sum"})),
    "evenly_on_each_axis": WrongOperator("a mean takes shards of two axes for even if each axis divides the dim", "162692, 163241", replaced(_math_ops, "is_tensor_evenly_shardable_on_dim", _evenly_on_each_axis)),
    "order_of_a_norm_remembered": WrongOperator("the cache of rules for a norm ignores its order", "134146, 159189", remembered(aten.linalg_vector_norm.default, RuntimeSchemaInfo(2)), stays=True),
    "flat_place_of_own_columns": WrongOperator("argmax without a dim counts by each rank's columns", "168983, 170066", replaced(_nonlinear_redux, "_convert_to_global_idxs", _flat_places_by_offset)),
    "places_of_a_partial_largest": WrongOperator("max of a partial maximum takes the largest of the places", "175776, 168940", rule([aten.max.dim], always(MAX, MAX, MAX))),
    "bins_of_own_range": WrongOperator("histc without bounds takes the bounds of each rank's elements", "158298", rule([aten.histc.default], lambda s, a: [[SUM, Shard(dim)] for dim in range(len(s[0]))])),
    # Layers.
    "mean_of_own_lines": WrongOperator("group_norm takes the mean of each rank's lines of an image", "184825, 177412", rule([aten.native_group_norm.default], lambda s, a: [[Shard(2), WHOLE, WHOLE, Shard(2), *[WHOLE] * (len(s) - 1)]] if len(s[0]) > 2 else [])),
    "gradient_by_own_rows": WrongOperator("batch_norm's gradient of the input takes the sums of each rank's rows", "182743, 184825", rule([aten.native_batch_norm_backward.default], lambda s, a: [[Shard(0), SUM, SUM, Shard(0), Shard(0), *[WHOLE] * (len(s) - 2)]])),
    # Losses, softmax.
    "largest_of_own_classes": WrongOperator("loss_parallel subtracts the largest of each rank's classes", "119877, 190746", replaced(loss, "_log_softmax", _largest_of_own_classes)),
    "summed_loss_averaged": WrongOperator("nll_loss with reduction sum is averaged over ranks", "185167, 180936", wrapped(aten.nll_loss_forward.default, _summed_loss_averaged)),
    "last_classes_of_own": WrongOperator("softmax's gradient does not see a dim that is counted from the end", "152016, 111750", wrapped(aten._softmax_backward_data.default, _dims_from_the_front)),
    # In place, lists.
    "not_written_in_place": WrongOperator("sub_ with an operand that lies otherwise does not write", "163374, 172477", handled(aten.sub_.Tensor, _written_where_it_lies)),
    "largest_of_lists_added_up": WrongOperator("the largest of each shard are added, for lists", "140066, 170035", wrapped(aten._foreach_max.default, _lists_added_up)),
}  # fmt: skip
