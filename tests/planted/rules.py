# ruff: noqa: E501  (a row of a table is a line)
"""Operators of DTensors with wrong rules, each wrong in one way: planted in torch's own table of rules, on every rank.

A rule says which placements of the operands let an operator compute on each rank's local tensors, and which
placement the result then has.  A planted rule replaces torch's own rules for the same operands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSpec, OpStrategy
from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder
from torch.distributed.tensor._ops.utils import generate_redistribute_costs
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from equivtest.cases.subject import Answers, Given
from equivtest.families.operators.case import OperatorCase
from equivtest.families.operators.subject import call_torch, run_operator

aten = torch.ops.aten
Shapes = list[tuple[int, ...]]
Combination = list[Placement]
"""Placements of the result, then of each operand, on a mesh of one axis."""
Rule = Callable[[Shapes, Sequence[Any]], list[Combination]]
"""The combinations, of the operands' shapes and of all arguments."""

WHOLE, SUM, AVG, MAX, MIN = Replicate(), Partial("sum"), Partial("avg"), Partial("max"), Partial("min")


@dataclass(frozen=True)
class WrongRule:
    """One defect.

    Attributes:
        kind: What is wrong, in a few words.
        operator: Of the table, by which cases are drawn.
        ops: Whose rule it is.
        listed: The operator in torch's own list, by which its validation asks for it.
        world_size: The fewest ranks that show it.
    """

    kind: str
    operator: str
    ops: tuple[Any, ...]
    rule: Rule
    listed: str = ""
    world_size: int = 2


def always(*placements: Placement) -> Rule:
    return lambda shapes, args: [list(placements)]


def kept(*, num: int = 1, along: Callable[[Shapes, Sequence[Any]], Sequence[int]] | None = None) -> Rule:
    """Keeps shards on the dims that `along` names, or on all dims without it."""

    def rule(shapes: Shapes, args: Sequence[Any]) -> list[Combination]:
        dims = range(len(shapes[0])) if along is None else along(shapes, args)
        return [[Shard(dim)] * (1 + num) for dim in dims]

    return rule


def reduced_to(placement: Placement) -> Rule:
    """Shards of a dim that is reduced give such a result."""

    def rule(shapes: Shapes, args: Sequence[Any]) -> list[Combination]:
        named = args[1] if len(args) > 1 and isinstance(args[1], int | list | tuple) else ()
        dims = (named,) if isinstance(named, int) else tuple(named) or tuple(range(len(shapes[0])))
        return [[placement, Shard(dim % len(shapes[0]))] for dim in dims if len(shapes[0])]

    return rule


def dim_named(place: int) -> Callable[[Shapes, Sequence[Any]], Sequence[int]]:
    """The dim that stands at that place among the arguments."""

    def along(shapes: Shapes, args: Sequence[Any]) -> Sequence[int]:
        given = args[place] if len(args) > place else -1
        dims = given if isinstance(given, list | tuple) else [given]
        return [dim % len(shapes[0]) for dim in dims if len(shapes[0])]

    return along


def picked(result: Placement, *, place: int = 1) -> Rule:
    """An operand that is divided along the dim named there, beside a whole index, gives such a result."""

    def rule(shapes: Shapes, args: Sequence[Any]) -> list[Combination]:
        return [[result, Shard(dim), WHOLE] for dim in dim_named(place)(shapes, args)]

    return rule


def shifted(by: int, *, behind: Callable[[Shapes, Sequence[Any]], int]) -> Rule:
    """Leaves shards of the dims behind one in place, though they should move."""

    def rule(shapes: Shapes, args: Sequence[Any]) -> list[Combination]:
        dims = range(behind(shapes, args), len(shapes[0]) - max(0, by))
        return [[Shard(dim), Shard(dim)] for dim in dims]

    return rule


def first_of(place: int) -> Callable[[Shapes, Sequence[Any]], int]:
    return lambda shapes, args: min(dim_named(place)(shapes, args), default=0) + 1


WRONG: dict[str, WrongRule] = {
    # Allowed though it is not linear.
    "magnitude_of_shares": WrongRule("not linear", "abs", (aten.abs.default,), always(SUM, SUM)),
    "relu_of_shares": WrongRule("not linear", "relu", (aten.relu.default,), always(SUM, SUM), "nn.functional.relu"),
    "exponential_of_shares": WrongRule("not linear", "exp", (aten.exp.default,), always(AVG, AVG)),
    "root_of_shares": WrongRule("not linear", "square", (aten.pow.Tensor_Scalar,), always(SUM, SUM), "pow"),
    "product_of_shares": WrongRule("not linear", "mul", (aten.mul.Tensor,), always(SUM, SUM, SUM)),
    "quotient_by_shares": WrongRule("not linear", "div", (aten.div.Tensor,), always(SUM, WHOLE, SUM)),
    "clamped_shares": WrongRule("not linear", "clamp", (aten.clamp.default,), always(AVG, AVG)),
    "sigmoid_of_shares": WrongRule("not linear", "sigmoid", (aten.sigmoid.default,), always(SUM, SUM)),
    "matrices_of_shares": WrongRule("not linear", "mm", (aten.mm.default,), always(SUM, SUM, SUM)),
    "inverse_of_shares": WrongRule(
        "not linear", "linalg.inv_ex", (aten.linalg_inv_ex.default,), lambda shapes, args: [[SUM, SUM, SUM]]
    ),
    # Extrema of a partial.
    "extrema_not_swapped": WrongRule("extremum", "neg", (aten.neg.default,), always(MAX, MAX)),
    "larger_of_sums": WrongRule("extremum", "maximum", (aten.maximum.default,), always(SUM, SUM, SUM)),
    "smaller_of_largest": WrongRule("extremum", "minimum", (aten.minimum.default,), always(MAX, MAX, MAX)),
    "largest_added_up": WrongRule("extremum", "amax", (aten.amax.default,), reduced_to(SUM)),
    "smallest_of_the_largest": WrongRule("extremum", "amax", (aten.amax.default,), reduced_to(MIN)),
    "product_added_up": WrongRule(
        "extremum", "prod", (aten.prod.default, aten.prod.dim_int), reduced_to(SUM)
    ),
    # Another reduction than the right one.
    "sums_averaged_by_rule": WrongRule("wrong reduction", "sum", (aten.sum.default, aten.sum.dim_IntList), reduced_to(AVG)),
    "means_added_up": WrongRule("wrong reduction", "mean", (aten.mean.default, aten.mean.dim), reduced_to(SUM)),
    "mean_of_uneven_means": WrongRule("mean of means", "mean", (aten.mean.default, aten.mean.dim), reduced_to(AVG)),
    "variances_averaged": WrongRule("mean of means", "var", (aten.var.correction,), reduced_to(AVG)),
    "norms_added_up": WrongRule(
        "wrong reduction", "linalg.vector_norm", (aten.linalg_vector_norm.default,), lambda s, a: reduced_to(SUM)(s, [a[0], a[2] if len(a) > 2 else ()])
    ),
    "logarithms_added_up": WrongRule("wrong reduction", "logsumexp", (aten.logsumexp.default,), reduced_to(SUM)),
    "first_rank_says_all": WrongRule("reduction missing", "all of bools", (aten.all.default, aten.all.dim), reduced_to(WHOLE)),
    "products_not_added_up": WrongRule("reduction missing", "mm", (aten.mm.default,), always(WHOLE, Shard(1), Shard(0))),
    "products_averaged": WrongRule("wrong reduction", "bmm", (aten.bmm.default,), always(AVG, Shard(2), Shard(1))),
    # A dim that is divided is one that the operator works along.
    "own_parts_softmax": WrongRule("divided dim", "softmax", (aten._softmax.default,), kept(along=dim_named(1))),
    "own_parts_added": WrongRule("divided dim", "cumsum", (aten.cumsum.default,), kept(along=dim_named(1))),
    "own_parts_sorted": WrongRule("divided dim", "sort", (aten.sort.default, aten.sort.stable), kept(along=lambda s, a: dim_named(2 if isinstance(a[1], bool) or a[1] is None else 1)(s, a))),
    "own_parts_reversed": WrongRule("divided dim", "flip", (aten.flip.default,), kept(along=dim_named(1))),
    "own_parts_rolled": WrongRule("divided dim", "roll", (aten.roll.default,), kept()),
    "own_parts_padded": WrongRule("divided dim", "constant_pad_nd", (aten.constant_pad_nd.default,), kept()),
    "own_parts_joined": WrongRule("divided dim", "cat", (aten.cat.default,), lambda s, a: [[Shard(dim)] * (1 + len(s)) for dim in dim_named(1)(s, [*a, 0] if len(a) < 2 else a)]),
    "dim_from_the_end_not_seen": WrongRule(
        "dim not normalised",
        "logcumsumexp",
        (aten.logcumsumexp.default,),
        lambda s, a: [[Shard(dim)] * 2 for dim in range(len(s[0])) if dim != a[1]],
    ),
    # Wrong starts of shards.
    "triangle_of_own_rows": WrongRule("offset of a shard", "tril", (aten.tril.default,), kept()),
    "place_in_own_rows": WrongRule("offset of a shard", "max", (aten.max.dim,), reduced_to(WHOLE)),
    "rows_picked_of_own": WrongRule("offset of a shard", "index_select", (aten.index_select.default,), picked(WHOLE)),
    "mask_dropped": WrongRule("mask of a partial", "gather", (aten.gather.default,), picked(SUM)),
    # A view whose sharded dim moves.
    "moved_dim_left": WrongRule("view", "transpose", (aten.transpose.int,), kept(along=lambda s, a: [dim for dim in range(len(s[0])) if s[0][a[1]] == s[0][a[2]]])),
    "reversed_dims_left": WrongRule("view", "permute", (aten.permute.default,), kept()),
    "selected_dim_not_counted": WrongRule("view", "select", (aten.select.int,), shifted(1, behind=lambda s, a: a[1] % len(s[0]))),
    "new_dim_not_counted": WrongRule("view", "unsqueeze", (aten.unsqueeze.default,), lambda s, a: [[Shard(dim), Shard(dim)] for dim in range(a[1] % (len(s[0]) + 1), len(s[0]))]),
    # Gradients.
    "gradient_on_every_rank": WrongRule("gradient's placement", "sum", (aten.expand.default,), always(SUM, WHOLE), "expand"),
    "gradient_of_shares": WrongRule("gradient's placement", "nn.functional.silu", (aten.silu_backward.default,), always(SUM, WHOLE, SUM)),
    "gradient_of_own_parts": WrongRule("gradient's placement", "softmax", (aten._softmax_backward_data.default,), lambda s, a: [[Shard(dim)] * 3 for dim in dim_named(2)(s, a)], "_softmax_backward_data"),
    # Others.
    "term_on_every_rank": WrongRule("term on every rank", "add", (aten.add.Tensor,), always(SUM, SUM, WHOLE)),
    "filled_on_every_rank": WrongRule("term on every rank", "masked_fill", (aten.masked_fill.Scalar,), always(SUM, SUM, WHOLE)),
    "written_without_its_sum": WrongRule("in place", "add in place", (aten.add_.Tensor,), always(WHOLE, WHOLE, SUM), "add"),
    "averages_taken_for_sums": WrongRule("wrong reduction", "clone", (aten.clone.default,), always(SUM, AVG)),
}  # fmt: skip
"""Name -> wrong rule."""


FROM_HISTORY: dict[str, WrongRule] = {
    # Terms that each rank adds: pytorch 163193.
    "bias_on_every_rank": WrongRule("term on every rank", "addmm", (aten.addmm.default,), always(SUM, WHOLE, Shard(1), Shard(0))),
    "batched_bias_on_every_rank": WrongRule("term on every rank", "baddbmm", (aten.baddbmm.default,), always(SUM, WHOLE, Shard(2), Shard(1))),
    "difference_on_every_rank": WrongRule("term on every rank", "sub", (aten.sub.Tensor,), always(SUM, SUM, WHOLE)),
    "whole_joined_to_shares": WrongRule("term on every rank", "cat", (aten.cat.default,), lambda s, a: [[SUM, SUM, *[WHOLE] * (len(s) - 1)]]),
    # Operators that are not linear: pytorch 163374, 165962.
    "floor_of_shares": WrongRule("not linear", "floor", (aten.floor.default,), always(SUM, SUM)),
    "sign_of_shares": WrongRule("not linear", "sign", (aten.sign.default,), always(SUM, SUM)),
    "angle_of_shares": WrongRule("not linear", "atan2", (aten.atan2.default,), always(SUM, SUM, SUM)),
    "shares_times_shares": WrongRule("not linear", "addcmul", (aten.addcmul.default,), always(SUM, SUM, SUM, SUM)),
    "largest_of_sums": WrongRule("extremum", "amax", (aten.amax.default,), lambda s, a: [[SUM, SUM]]),
    "shares_chosen": WrongRule("not linear", "where", (aten.where.self,), always(SUM, WHOLE, SUM, WHOLE)),
    # Mean of means: pytorch 162692.
    "deviations_averaged": WrongRule("mean of means", "std", (aten.std.correction,), reduced_to(AVG)),
    # Dims that an operator works along: pytorch 172350, 170934, 186149.
    "own_parts_multiplied": WrongRule("divided dim", "cumprod", (aten.cumprod.default,), kept(along=dim_named(1))),
    "largest_of_own_rows": WrongRule("divided dim", "topk", (aten.topk.default,), kept(along=dim_named(2))),
    "rows_of_own_written": WrongRule("divided dim", "scatter_add", (aten.scatter_add.default,), kept(num=3, along=dim_named(1))),
    "median_of_own_rows": WrongRule("divided dim", "kthvalue", (aten.kthvalue.default,), kept(along=dim_named(2))),
    "logarithms_of_own_rows": WrongRule("divided dim", "log_softmax", (aten._log_softmax.default,), kept(along=dim_named(1))),
    "diagonal_of_own_rows": WrongRule("divided dim", "diagonal", (aten.diagonal.default,), lambda s, a: [[Shard(len(s[0]) - 2), Shard(0)]]),
    "copies_of_own_rows": WrongRule("view", "repeat", (aten.repeat.default,), lambda s, a: [[Shard(dim + len(a[1]) - len(s[0])), Shard(dim)] for dim in range(len(s[0]))]),
    # Gradients that are summed or divided: pytorch 118600.
    "gradient_of_logarithms_of_own_rows": WrongRule("gradient's placement", "log_softmax", (aten._log_softmax_backward_data.default,), lambda s, a: [[Shard(dim)] * 3 for dim in dim_named(2)(s, a)]),
    "gradient_by_shares": WrongRule("gradient's placement", "tanh_backward", (aten.tanh_backward.default,), always(SUM, WHOLE, SUM)),
}  # fmt: skip
"""Further wrong rules, in places where torch had defects.  They were written after the enumerated calls, unseen by them."""
WRONG |= FROM_HISTORY


def not_counted(place: int) -> Rule:
    """Leaves shards in place behind the dim named there, though a new dim moves them."""

    def rule(shapes: Shapes, args: Sequence[Any]) -> list[Combination]:
        dim = (args[place] if len(args) > place else 0) % (len(shapes[0]) + 1)
        return [[Shard(each)] * (1 + len(shapes)) for each in range(dim, len(shapes[0]))]

    return rule


LATER: dict[str, WrongRule] = {
    # Operators that are not linear: pytorch 163374, 165962.
    "rounded_shares": WrongRule("not linear", "round", (aten.round.default,), always(SUM, SUM)),
    "whole_numbers_of_shares": WrongRule("not linear", "long", (aten._to_copy.default,), always(SUM, SUM)),
    "remainder_of_shares": WrongRule("not linear", "remainder", (aten.remainder.Tensor,), always(SUM, SUM, WHOLE)),
    "quotients_of_shares_cut": WrongRule("not linear", "div to whole numbers", (aten.div.Tensor_mode,), always(SUM, SUM, WHOLE), "div"),
    "powers_of_shares": WrongRule("not linear", "pow", (aten.pow.Tensor_Tensor,), always(SUM, SUM, WHOLE)),
    "weights_of_shares": WrongRule("not linear", "lerp", (aten.lerp.Tensor,), always(SUM, SUM, SUM, SUM)),
    "smaller_of_sums": WrongRule("extremum", "fmin", (aten.fmin.default,), always(SUM, SUM, SUM)),
    # Reductions: pytorch 162692, 185167.
    "spreads_averaged": WrongRule("mean of means", "var_mean", (aten.var_mean.correction,), reduced_to(AVG)),
    "smallest_added_up": WrongRule("wrong reduction", "amin", (aten.amin.default,), reduced_to(SUM)),
    "losses_of_own_rows_averaged": WrongRule("mean of means", "nn.functional.nll_loss", (aten.nll_loss_forward.default,), always(AVG, Shard(0), Shard(0))),
    # Dims that an operator works along: pytorch 172350, 170934, 186149.
    "largest_so_far_of_own_rows": WrongRule("divided dim", "cummax", (aten.cummax.default,), kept(along=dim_named(1))),
    "upper_triangle_of_own_rows": WrongRule("offset of a shard", "triu", (aten.triu.default,), kept()),
    "slice_of_own_rows": WrongRule("divided dim", "slice", (aten.slice.Tensor,), kept()),
    "norm_of_own_columns": WrongRule("divided dim", "native_layer_norm", (aten.native_layer_norm.default,), always(Shard(1), Shard(1), Shard(0), Shard(0))),
    "rows_put_into_own": WrongRule("divided dim", "index_put", (aten.index_put.default,), always(Shard(0), Shard(0), WHOLE, Shard(0))),
    "rows_indexed_of_own": WrongRule("divided dim", "__getitem__", (aten.index.Tensor,), always(WHOLE, Shard(0), WHOLE)),
    "columns_resized_by_each_rank": WrongRule("divided dim", "nn.functional.interpolate", (aten.upsample_nearest2d.default,), always(Shard(3), Shard(3))),
    # Views: pytorch 179502.
    "merged_dim_taken_for_its_last": WrongRule("view", "view", (aten.view.default,), lambda s, a: [[Shard(0), Shard(1)]] if len(s[0]) > len(a[1]) else []),
    "stacked_dim_not_counted": WrongRule("view", "stack", (aten.stack.default,), not_counted(1)),
    "squeezed_dim_not_counted": WrongRule("view", "squeeze", (aten.squeeze.dim,), kept()),
}  # fmt: skip
"""Wrong rules that were written after the calls that reject all others, unseen by them."""
WRONG |= LATER


@contextmanager
def planted(wrong: WrongRule) -> Iterator[None]:
    """Puts the wrong rule into torch's table for a while; no cached result of either rule outlives it."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    tables = (propagator.op_single_dim_strategy_funcs, propagator.op_strategy_funcs)
    before: list[tuple[dict[Any, Any], Any, Any]] = []
    for op in wrong.ops:
        table = next(each for each in tables if op in each)
        before.append((table, op, table[op]))
        table[op] = _single(table[op], wrong.rule) if table is tables[0] else _strategy(table[op], wrong.rule)
    _clear_sharding_prop_cache()
    try:
        yield
    finally:
        for table, op, right in before:
            table[op] = right
        _clear_sharding_prop_cache()


def _shapes(args: Any) -> Shapes:
    leaves = torch.utils._pytree.tree_leaves(args, is_leaf=lambda each: hasattr(each, "shape"))
    return [tuple(each.shape) for each in leaves if hasattr(each, "shape")]


def _single(info: Any, rule: Rule) -> Any:
    def func(op: Any, args: Any, kwargs: Any) -> Any:
        right = info.func(op, args, kwargs)
        found: list[Any] = []
        combination: Combination = [WHOLE, WHOLE]
        for combination in rule(_shapes((args, kwargs)), args):
            full = combination
            if right and len(right[0]) > len(combination):  # of several results each lies as the first
                full = [combination[0]] * (len(right[0]) - len(combination)) + combination
            found.append([_ShardingPlaceholder(each.dim) if isinstance(each, Shard) else each for each in full])
        replaced = [repr(each[-len(combination) + 1 :]) for each in found]
        return found + [each for each in right if repr(each[-len(combination) + 1 :]) not in replaced]

    return dataclasses.replace(info, func=func)


def _strategy(right: Any, rule: Rule) -> Any:
    def func(schema: Any) -> Any:
        strategy = right(schema)
        if not isinstance(strategy, OpStrategy) or strategy.strategies[0].mesh.ndim > 1:
            return strategy
        operands = [
            each for each in torch.utils._pytree.tree_leaves(schema.args_schema) if isinstance(each, OpStrategy)
        ]
        mesh = strategy.strategies[0].mesh
        found = []
        for out, *placements in rule(_shapes(schema.args_schema), schema.args_schema):
            specs = [
                DTensorSpec(mesh, (each,), operand.strategies[0].output_spec.tensor_meta)
                for each, operand in zip(placements, operands, strict=False)
            ]
            costs = [generate_redistribute_costs(operand, spec) for operand, spec in zip(operands, specs, strict=False)]
            outs = strategy.strategies[0].output_specs
            spec = DTensorSpec(mesh, (out,))
            found.append(OpSpec((spec,) * len(outs) if isinstance(outs, tuple) else spec, specs, costs))
        replaced = [_placements(each) for each in found]
        return OpStrategy([each for each in strategy.strategies if _placements(each) not in replaced] + found)

    return func


def _placements(spec: OpSpec) -> list[tuple[Placement, ...]]:
    return [each.placements for each in spec.input_specs or ()]


def _subject(wrong: WrongRule) -> Callable[[OperatorCase, DeviceMesh, Given], Answers]:
    def subject(case: OperatorCase, mesh: DeviceMesh, given: Given) -> Answers:
        with planted(wrong):
            return run_operator(case, mesh, given, call_torch)

    return subject


globals().update({name: _subject(wrong) for name, wrong in WRONG.items()})
