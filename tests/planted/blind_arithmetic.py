# ruff: noqa: E501  (a row of a table is a line)
"""Operators of DTensors that are wrong in one way each: pointwise ones, lists, reductions, products, layers, losses.

They were written without a look at the cases, the judge or the table of operators, on the history of torch's defects.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._decompositions import PlacementTrackingMode
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor._ops import _math_ops
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.parallel import loss
from torch.distributed.tensor.placement_types import _StridedShard

from tests.planted.operators import (
    PROPAGATOR,
    WrongOperator,
    edited,
    handled,
    placed,
    remembered,
    replaced,
    rule,
    wrapped,
)
from tests.planted.rules import AVG, MAX, SUM, WHOLE, always

aten = torch.ops.aten


def _share_of_a_number(shapes: Any, args: Any) -> list[list[Placement]]:
    """Leaves shards beside a tensor without dims, and takes each rank's share of this tensor for the whole."""
    return (
        [[Shard(dim), Shard(dim), AVG] for dim in range(len(shapes[0]))] if len(shapes) == 2 and not shapes[1] else []
    )


def _share_of_a_size_one_dim(shapes: Any, args: Any) -> list[list[Placement]]:
    if len(shapes) != 2 or len(shapes[0]) != len(shapes[1]):
        return []
    return [[Shard(dim), Shard(dim), SUM] for dim, size in enumerate(shapes[1]) if size == 1 < shapes[0][dim]]


def _placed_as_the_first(right: Any, schema: Any) -> Any:
    strategy = right(schema)
    first = strategy.children[0].strategies[0].output_spec
    for child in strategy.children[1:]:
        for each in child.strategies:
            each.output_specs = DTensorSpec(each.output_specs.mesh, first.placements)
    return strategy


def _whole(tensor: DTensor) -> DTensor:
    """Takes each rank's share for the whole."""
    if any(each.is_shard() for each in tensor.placements):
        return tensor
    return DTensor.from_local(tensor.to_local(), tensor.device_mesh, [WHOLE] * tensor.device_mesh.ndim, run_check=False)


def _second_share_for_whole(op: Any, args: Any, kwargs: Any) -> Any:
    firsts, seconds = args[:2]
    changed = [
        _whole(second) if place and all(each.is_replicate() for each in first.placements) else second
        for place, (first, second) in enumerate(zip(firsts, seconds, strict=True))
    ]
    return op(firsts, changed, *args[2:], **kwargs)


def _first_factors() -> AbstractContextManager[Any]:
    """Divides lists of the same length by the factors of the first such call, as if a cache held them."""
    held: dict[int, Any] = {}

    def call(op: Any, args: Any, kwargs: Any) -> Any:
        *tensors, factors = args
        return op(*tensors, held.setdefault(len(factors), factors), **kwargs)

    return handled(aten._foreach_addcdiv_.ScalarList, call)()


def _orders_taken_for_equal() -> AbstractContextManager[Any]:
    return patch.multiple(
        _NormPartial, __eq__=lambda self, other: isinstance(other, _NormPartial), __hash__=lambda self: 1
    )


def _bias_of_own_rows(combination: list[Any], args: Any) -> list[Any]:
    alone = args[5] is None and args[6] is not None
    return placed(slice(2, 3), WHOLE)(combination, args) if alone else combination


def _weight_of_own_images(combination: list[Any], args: Any) -> list[Any]:
    """In a first layer, whose input needs no gradient."""
    return combination if args[10][0] else placed(slice(1, 2), WHOLE)(combination, args)


def _strided_rows_for_plain() -> AbstractContextManager[Any]:
    info = PROPAGATOR.op_single_dim_strategy_funcs[aten.mm.default]

    def func(op: Any, args: Any, kwargs: Any) -> Any:
        wrong = [[SUM, Shard(1), _StridedShard(0, split_factor=factor)] for factor in (2, 3, 4)]
        return [*info.func(op, args, kwargs), *wrong]

    return patch.dict(PROPAGATOR.op_single_dim_strategy_funcs, {aten.mm.default: dataclasses.replace(info, func=func)})


def _strided_overlooked(right: Any, schema: Any) -> Any:
    with patch.object(_math_ops, "_is_shard_like", lambda placement: isinstance(placement, Shard)):
        return right(schema)


def _first_axis_replicated(right: Any, schema: Any) -> Any:
    """Makes the dim whole on the first axis alone, although several axes divide it."""

    def replicate(placements: Any, dims: Any) -> Any:
        found: list[Any] = []
        for placement in placements:
            along = isinstance(placement, Shard) and placement.dim in dims
            seen = any(isinstance(each, Shard) and each.dim in dims for each in placements[: len(found)])
            found.append(WHOLE if placement.is_partial() or (along and not seen) else placement)
        return tuple(found)

    with patch.object(_math_ops, "replicate_reduction_dims", replicate):
        return right(schema)


def _second_reduced_axis_whole(right: Any, placements: Any, dims: Any, dims_map: Any, reduction: Any) -> Any:
    found = list(right(placements, dims, dims_map, reduction))
    reduced = [axis for axis, each in enumerate(placements) if isinstance(each, Shard) and each.dim in dims]
    for axis in reduced[1:]:
        if placements[axis] != placements[reduced[0]]:
            found[axis] = WHOLE
    return tuple(found)


def _out_as_before() -> AbstractContextManager[Any]:
    def call(op: Any, args: Any, kwargs: Any) -> Any:
        target = kwargs["out"]
        before = target._spec
        found = op(*args, **kwargs)
        target._spec = before
        return found

    stack = ExitStack()
    for op in (aten.amax.out, aten.amin.out, aten.mean.out):
        stack.enter_context(handled(op, call)())
    return stack


def _without(name: str) -> Callable[[Any, Any, Any], Any]:
    """Calls an operator without one of its keyword arguments."""
    return lambda op, args, kwargs: op(*args, **{key: value for key, value in kwargs.items() if key != name})


def _weights_of_the_first(right: Any, x: Any, target: Any, weight: Any, own: Any, *rest: Any) -> Any:
    return right(x, target, weight, None if own is None else weight[: len(own)], *rest)


def _ignored_have_gradients(right: Any, gradient: Any, x: Any, target: Any, weight: Any, reduction: int, ignored: int, *rest: Any) -> Any:  # fmt: skip
    return right(gradient, x, target, weight, reduction, -100, *rest)


def _shares_pass_through() -> AbstractContextManager[Any]:
    """A decomposition takes an operator that sums up a share before it works for one that works on each share."""
    right: Any = PlacementTrackingMode.__torch_dispatch__

    def call(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return right(self, func, types, args, kwargs)
        except RuntimeError:
            held = [each for each in torch.utils._pytree.tree_leaves((args, kwargs)) if hasattr(each, "_spec")]
            specs = [each._spec for each in held]
            if not any(spec.placements == (SUM,) for spec in specs):
                raise
            for each, spec in zip(held, specs, strict=True):
                if spec.placements == (SUM,):
                    each._spec = DTensorSpec(spec.mesh, (WHOLE,), tensor_meta=spec.tensor_meta)
            try:
                return right(self, func, types, args, kwargs)
            finally:
                for each, spec in zip(held, specs, strict=True):
                    each._spec = spec

    return patch.object(PlacementTrackingMode, "__torch_dispatch__", call)


def _usual_momentum(op: Any, args: Any, kwargs: Any) -> Any:
    return op(*args[:6], 0.1, *args[7:], **kwargs)


def _empty_product(op: Any, args: Any, kwargs: Any) -> Any:
    result = op(*args, **kwargs)
    if not args[0]._local_tensor.numel():
        result._local_tensor.zero_()
    return result


def _whole_quotients_widened(op: Any, args: Any, kwargs: Any) -> Any:
    result = op(*args, **kwargs)
    return result if result.dtype.is_floating_point else result.to(torch.float32)


def _own_norm(shapes: Any, args: Any) -> list[list[Placement]]:
    found = [[*[Shard(dim)] * 2, _NormPartial(2)] for dim in range(len(shapes[0]))]
    return found if len(shapes) == 2 and not shapes[1] else []


BLIND_ARITHMETIC: dict[str, WrongOperator] = {
    # Pointwise: operands that broadcast, extrema, several operands, out=.
    "mean_of_own_part_subtracted": WrongOperator("shards minus a partial average without dims use each rank's share of it", "153603", rule([aten.sub.Tensor], _share_of_a_number)),
    "divided_by_own_sums": WrongOperator("shards divided by partial sums with a dim of size one use each rank's share", "153603, 170934", rule([aten.div.Tensor], _share_of_a_size_one_dim)),
    "largest_logarithms_of_own": WrongOperator("logaddexp of two partial maxima is a partial maximum", "172601", rule([aten.logaddexp.default], always(MAX, MAX, MAX))),
    "quotients_on_every_rank": WrongOperator("addcdiv adds the whole quotient to each rank's share", "163193", rule([aten.addcdiv.default], always(SUM, SUM, WHOLE, WHOLE))),
    "out_keeps_its_placement": WrongOperator("a tensor that is given as out= of a reduction keeps the placement that it had", "175960", _out_as_before),
    "divided_in_place_by_own_norm": WrongOperator("shards divided in place by a norm are divided by the norm of each", "120238, 163374", rule([aten.div_.Tensor], _own_norm)),
    "whole_quotients_widened": WrongOperator("ints divided by ints with a rounding_mode are floats", "174800", handled(aten.div.Tensor_mode, _whole_quotients_widened)),
    # Lists.
    "norms_placed_as_the_first": WrongOperator("the norms of a list lie as the first of them", "121945", wrapped(aten._foreach_norm.Scalar, _placed_as_the_first)),
    "later_shares_of_a_list_for_whole": WrongOperator("in a list only the first operand is summed up before it is added", "112108, 121945", handled(aten._foreach_add.List, _second_share_for_whole)),
    "first_factors_of_a_list_remembered": WrongOperator("a list is divided by the factors of the first step", "178301, 153603", _first_factors, stays=True),
    "number_added_to_shares_of_a_list": WrongOperator("a number is added to each share of a list", "163193", rule([aten._foreach_add.Scalar], always(SUM, SUM))),
    # Reductions, norms.
    "orders_of_norms_taken_for_equal": WrongOperator("norms of two orders have equal placements", "120238, 149768", _orders_taken_for_equal, stays=True),
    "norms_added_before_roots": WrongOperator("two norms of shards are added before they are reduced", "120238, 172601", rule([aten.add.Tensor], always(_NormPartial(2), _NormPartial(2), _NormPartial(2)))),
    "second_reduced_axis_overlooked": WrongOperator("of two dims on two axes that are reduced only the first leaves a partial", "166598, 170934", replaced(_math_ops, "map_placements_after_reduction", _second_reduced_axis_whole)),
    "kept_dims_of_a_variance_remembered": WrongOperator("the cache of rules for var ignores keepdim", "159289, 134146", remembered(aten.var.correction, RuntimeSchemaInfo(1)), stays=True),
    "correction_ignored": WrongOperator("std ignores its keyword correction", "167977", handled(aten.std.correction, _without("correction"))),
    "product_of_an_empty_shard": WrongOperator("the product of an empty shard is zero", "117728", handled(aten.prod.dim_int, _empty_product)),
    # Softmax.
    "strided_parts_softmax": WrongOperator("softmax works on each rank's part of a dim with strided shards", "166598, 134050", wrapped(aten._softmax.default, _strided_overlooked)),
    "second_axis_along_softmax": WrongOperator("log_softmax along a dim that two axes divide gathers it on one", "134050, 166598", wrapped(aten._log_softmax.default, _first_axis_replicated)),
    "shares_of_gradients_of_logarithms": WrongOperator("log_softmax's gradient takes each rank's share of a gradient for the whole", "118600", rule([aten._log_softmax_backward_data.default], always(WHOLE, SUM, WHOLE))),
    # Products, linear algebra.
    "strided_rows_taken_for_plain": WrongOperator("a product takes strided shards of the rows of its second operand for plain ones", "166598, 166999", _strided_rows_for_plain),
    "beta_ignored": WrongOperator("addmm ignores its keyword beta", "172387", handled(aten.addmm.default, _without("beta"))),
    "solved_for_shares_of_the_matrix": WrongOperator("solve is linear in the matrix instead of the right side", "176955", rule([aten._linalg_solve_ex.default], always(SUM, SUM, WHOLE))),
    # Layers.
    "bias_without_gains": WrongOperator("layer_norm's gradient of a bias without a weight counts own rows alone", "115683, 187373", edited(aten.native_layer_norm_backward.default, _bias_of_own_rows)),
    "first_groups_remembered": WrongOperator("group_norm takes the number of groups of its first call", "159289, 153603", remembered(aten.native_group_norm.default, RuntimeSchemaInfo(100)), stays=True),
    "momentum_ignored": WrongOperator("batch_norm updates its statistics with the usual momentum", "182743", handled(aten.native_batch_norm.default, _usual_momentum)),
    "first_layer_of_own_images": WrongOperator("a convolution whose input needs no gradient has a weight's gradient of own images", "142278, 118600", edited(aten.convolution_backward.default, _weight_of_own_images)),
    "places_in_own_lines": WrongOperator("max_pool2d of one image without a batch counts places in each rank's lines", "176821", rule([aten.max_pool2d_with_indices.default], lambda s, a: [[Shard(1), Shard(1)]] if len(s[0]) == 3 else [])),
    "averages_of_the_largest": WrongOperator("avg_pool2d of a partial maximum is a partial maximum", "176821, 172601", rule([aten.avg_pool2d.default], always(MAX, MAX))),
    "gradient_of_an_enlargement_averaged": WrongOperator("interpolate's gradient of shares of a sum is averaged", "176991", rule([aten.upsample_nearest2d_backward.default], always(AVG, SUM))),
    # Losses.
    "weights_of_first_classes": WrongOperator("loss_parallel weighs each rank's classes as the first ones", "119877", replaced(loss, "_nll_loss_forward", _weights_of_the_first)),
    "ignored_targets_have_gradients": WrongOperator("loss_parallel's gradient ignores ignore_index", "119877, 190746", replaced(loss, "_nll_loss_and_log_softmax_backward", _ignored_have_gradients)),
    "shares_pass_through_a_decomposition": WrongOperator("an operator without a rule works on each rank's share of a sum", "174422, 174616", _shares_pass_through),
}  # fmt: skip
"""Name -> wrong operator."""
