# ruff: noqa: E501  (a row of a table is a line)
"""Operators of DTensors that are wrong in one way each, in rules, local kernels, caches and placements of torch.

They were written without a look at the gate's cases, in places where torch had defects.  `tests.planted.rules` has
rules that differ only in placements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, _nonlinear_redux, placement_types
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor._ops import _math_ops, _tensor_ops
from torch.distributed.tensor.placement_types import _MaskPartial

from tests.planted.rules import AVG, MAX, SUM, WHOLE, Rule, WrongRule, always, kept, planted

aten = torch.ops.aten
PROPAGATOR = DTensor._op_dispatcher.sharding_propagator
HANDLERS = DTensor._op_dispatcher._custom_op_handlers


@dataclass(frozen=True)
class WrongOperator:
    """One defect.

    Attributes:
        kind: What is wrong, in a few words.
        near: Issues of pytorch that it resembles.
        plant: Makes torch wrong within its context.
        stays: True if the defect needs two calls, because a cache is wrong: it is planted once for a process.
    """

    kind: str
    near: str
    plant: Callable[[], AbstractContextManager[Any]]
    stays: bool = False


def rule(ops: Sequence[Any], wrong: Rule) -> Callable[[], AbstractContextManager[None]]:
    return lambda: planted(WrongRule("", "", tuple(ops), wrong))


def edited(op: Any, edit: Callable[[list[Any], Any], list[Any]]) -> Callable[[], AbstractContextManager[Any]]:
    """Edits each combination [results, operands] of torch's own rule, which names one axis of the mesh."""
    info = PROPAGATOR.op_single_dim_strategy_funcs[op]

    def func(op: Any, args: Any, kwargs: Any) -> Any:
        return [edit(each, args) for each in info.func(op, args, kwargs)]

    changed = dataclasses.replace(info, func=func)
    return lambda: patch.dict(PROPAGATOR.op_single_dim_strategy_funcs, {op: changed})


def wrapped(op: Any, wrong: Callable[[Any, Any], Any]) -> Callable[[], AbstractContextManager[Any]]:
    """Replaces torch's rule by `wrong(rule, schema)`."""
    right = PROPAGATOR.op_strategy_funcs[op]
    return lambda: patch.dict(PROPAGATOR.op_strategy_funcs, {op: partial(wrong, right)})


def placed(results: slice, placement: Placement) -> Callable[[list[Any], Any], list[Any]]:
    """Replaces the placement of some results that are partial."""

    def edit(combination: list[Any], args: Any) -> list[Any]:
        partials = [placement if isinstance(each, Partial) else each for each in combination[results]]
        return combination[: results.start] + partials + combination[results.stop :]

    return edit


def handled(op: Any, call: Callable[..., Any]) -> Callable[[], AbstractContextManager[Any]]:
    """Answers the operator by `call(op, args, kwargs)`, which may call the operator."""

    def handler(op: Any, args: Any, kwargs: Any) -> Any:
        del HANDLERS[op]
        try:
            return call(op, args, kwargs)
        finally:
            HANDLERS[op] = handler

    return lambda: patch.dict(HANDLERS, {op: handler})


def remembered(op: Any, info: RuntimeSchemaInfo) -> Callable[[], AbstractContextManager[Any]]:
    """Lets the cache of rules look at other arguments of the operator than it should."""
    return lambda: patch.dict(PROPAGATOR.op_to_schema_info, {op: info})


def replaced(owner: Any, name: str, wrong: Callable[..., Any]) -> Callable[[], AbstractContextManager[Any]]:
    right = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return wrong(right, *args, **kwargs)

    return lambda: patch.object(owner, name, call)


def _scalar(shapes: Any, args: Any, placement: Placement) -> list[list[Placement]]:
    return [[placement, placement]] if len(shapes) == 1 and isinstance(args[1], int | float) else []


def _kept_dims_moved(shapes: Any, args: Any) -> list[list[Placement]]:
    """With several dims and keepdim, a shard behind a reduced dim moves as it would without keepdim."""
    if len(args) < 3 or not args[2] or len(args[1] or ()) < 2:
        return []
    dims = {dim % len(shapes[0]) for dim in args[1]}
    others = [dim for dim in range(len(shapes[0])) if dim not in dims]
    return [[Shard(dim - sum(each < dim for each in dims)), Shard(dim)] for dim in others]


def _even_offsets(right: Any, shape: Any, mesh: DeviceMesh, placements: Any, *rest: Any) -> Any:
    local, _ = right(shape, mesh, placements, *rest)
    offsets = [0] * len(shape)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            offsets[placement.dim] = mesh.get_local_rank(axis) * local[placement.dim]
    return local, tuple(offsets)


def _last_first(right: Any, gather_dim: int, *rest: Any) -> Any:
    return tuple(each.flip(gather_dim) for each in right(gather_dim, *rest))


def _rows_of_even_shards(right: Any, self: Any, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int) -> Any:
    rows, rank = self.offset_shape[self.offset_dim], mesh.get_local_rank(mesh_dim)
    size, _ = Shard.local_shard_size_and_offset(rows, mesh.size(mesh_dim), rank)
    mask, masked = _MaskPartial._mask_tensor(tensor, rank * size, size)
    self.mask_buffer.materialize_mask(mask)
    return masked


def _padding_ignored(op: Any, args: Any, kwargs: Any) -> Any:
    return op(args[0], args[1], args[2], -1, args[4])


def _own_total_weight(right: Any, schema: Any) -> Any:
    strategy = right(schema)
    for each in strategy.strategies:
        loss, total = each.output_specs
        each.output_specs = (loss, DTensorSpec(total.mesh, (Replicate(),) * total.mesh.ndim))
    return strategy


def _norms_added(right: Any, schema: Any) -> Any:
    with patch.object(_math_ops, "_get_norm_reduction_op", lambda norm_type: "sum"):
        return right(schema)


def _unbound_dim_kept(right: Any, schema: Any) -> Any:
    with patch.object(_tensor_ops, "shift_shard_dims_after_remove", lambda placements, dim: placements):
        return right(schema)


def _scattered_sum(right: Any, self: Partial, *rest: Any) -> Any:
    return right(SUM if self == AVG else self, *rest)


def _promoted_by_scalar(op: Any, args: Any, kwargs: Any) -> Any:
    result = op(*args, **kwargs)
    first, second = args[:2]
    if isinstance(second, DTensor) and second.dim() == 0 < first.dim():
        result = result.to(torch.promote_types(first.dtype, second.dtype))
    return result


def _rows_of_own(combination: list[Any], args: Any) -> list[Any]:
    out, *statistics = [Shard(0), WHOLE, WHOLE]
    return [out, *statistics, Shard(0), *[WHOLE] * (len(combination) - 4)]


def _reduced_on_first_axis(right: Any, self: Partial, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int) -> Any:
    return right(self, tensor, mesh, 0) if mesh_dim == 0 else tensor


def _masked_on_first_axis(right: Any, self: Any, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int) -> Any:
    return right(self, tensor, mesh, 0)


def _masked_by_process(right: Any, self: Any, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int) -> Any:
    with patch.object(DeviceMesh, "_sym_get_coordinate", lambda mesh, dim: torch.distributed.get_rank()):
        return right(self, tensor, mesh, mesh_dim)


def _halved(right: Any, self: Partial, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int) -> Any:
    return tensor / 2 if self == SUM and mesh.size(mesh_dim) > 1 else right(self, tensor, mesh, mesh_dim)


def _averaged_over_mesh(right: Any, self: Partial, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int) -> Any:
    found = right(self, tensor, mesh, mesh_dim)
    return found * mesh.size(mesh_dim) / mesh.size() if self == AVG else found


def _exchanged_in_reverse(right: Any, tensor: torch.Tensor, gather_dim: int, *rest: Any) -> Any:
    mesh, mesh_dim = rest[-2:]
    parts = right(tensor, gather_dim, *rest).chunk(mesh.size(mesh_dim), gather_dim)
    return torch.cat(parts[::-1], gather_dim)


def _same_dim(shapes: Any, args: Any) -> list[list[Placement]]:
    """Shards the target and a source with fewer dims on dims of the same number."""
    target, source = shapes
    return [[Shard(dim)] * 3 for dim in range(len(source)) if len(source) < len(target)]


def _all_but_first(shapes: Any, named: Any) -> list[list[Placement]]:
    """With several named dims, keeps shards of all dims except the first of these."""
    dims = [dim % len(shapes[0]) for dim in named[0]] if named else []
    return [[Shard(dim)] * 2 for dim in range(len(shapes[0])) if len(dims) > 1 and dim != dims[0]]


WRONG_OPERATORS: dict[str, WrongOperator] = {
    # Pointwise.
    "scalar_on_every_rank": WrongOperator("a scalar is added on every rank", "163193, 149768", rule([aten.add.Tensor], lambda s, a: _scalar(s, a, SUM))),
    "largest_scaled_by_a_negative": WrongOperator("a largest stays the largest times a negative scalar", "170035", rule([aten.mul.Tensor], lambda s, a: _scalar(s, a, MAX))),
    "shares_clamped_in_place": WrongOperator("clamp_ of each rank's share", "163374", rule([aten.clamp_.default], always(SUM, SUM))),
    "promoted_by_a_wider_scalar": WrongOperator("a tensor without dims counts as one with dims when dtypes are promoted", "163374", handled(aten.mul.Tensor, _promoted_by_scalar)),
    "averages_scattered_as_sums": WrongOperator("within an operator, a partial average becomes a shard of the sum", "157340", replaced(Partial, "_reduce_shard_value", _scattered_sum)),
    # Reductions.
    "kept_dims_counted_as_removed": WrongOperator("a shard moves behind several kept dims", "170934", rule([aten.sum.dim_IntList], _kept_dims_moved)),
    "place_by_even_shards": WrongOperator("argmax takes each shard for as long as its own", "173936, 161368", replaced(_nonlinear_redux, "compute_local_shape_and_global_offset", _even_offsets)),
    "last_of_equal_largest": WrongOperator("of equal elements argmax and max name the last rank's", "173936", replaced(_nonlinear_redux, "_gather_tensors", _last_first)),
    "first_dim_remembered": WrongOperator("the cache of rules for cumsum ignores the dim", "134050, 109306", remembered(aten.cumsum.default, RuntimeSchemaInfo(100)), stays=True),
    "foreach_norms_added_up": WrongOperator("norms of shards are added", "149768, 120238", wrapped(aten._foreach_norm.Scalar, _norms_added)),
    # Views and indices.
    "inner_dim_takes_the_shards": WrongOperator("a dim that is split gives its shards to the inner dim", "179502, 186282", rule([aten.view.default], lambda s, a: [[Shard(1), Shard(0)]] if len(a[1]) > len(s[0]) > 0 and a[1][0] != 1 else [])),
    "unbound_dim_not_counted": WrongOperator("unbind leaves shards behind the removed dim in place", "172350", wrapped(aten.unbind.int, _unbound_dim_kept)),
    "filled_dim_from_the_end": WrongOperator("index_fill does not see a dim that is counted from the end", "186149", rule([aten.index_fill.int_Scalar], lambda s, a: [[Shard(d), Shard(d), WHOLE] for d in range(len(s[0])) if d != a[1]])),
    "rows_of_even_shards": WrongOperator("the mask of an embedding takes each shard for as long as its own", "118513, 161368", replaced(_MaskPartial, "_partition_value", _rows_of_even_shards)),
    "rows_of_own_process": WrongOperator("an embedding finds its rows by the number of the process", "118513, 166598", replaced(_MaskPartial, "_partition_value", _masked_by_process)),
    "padding_row_has_a_gradient": WrongOperator("the backward of an embedding ignores padding_idx", "133499", handled(aten.embedding_dense_backward.default, _padding_ignored)),
    # Layers and losses.
    "gains_of_own_rows": WrongOperator("layer_norm's gradient of the weight counts own rows alone", "115683, 133499", edited(aten.native_layer_norm_backward.default, placed(slice(1, 3), WHOLE))),
    "statistics_of_own_rows": WrongOperator("batch_norm takes the mean of each rank's rows alone", "162692", edited(aten.native_batch_norm.default, _rows_of_own)),
    "kernels_gradient_averaged": WrongOperator("a convolution's gradients of weight and bias are averaged", "118600", edited(aten.convolution_backward.default, placed(slice(1, 3), AVG))),
    "total_weight_of_own_rows": WrongOperator("nll_loss divides gradients by the weight of each rank's rows alone", "185167", wrapped(aten.nll_loss_forward.default, _own_total_weight)),
    "attention_to_own_keys": WrongOperator("the softmax of an attention works on each rank's keys alone", "134050", rule([aten._safe_softmax.default], kept(along=lambda s, a: [a[1] % len(s[0])]))),
    # Planted later.
    "norm_of_shares": WrongOperator("each rank takes the norm of its share of a sum", "165962", rule([aten.linalg_vector_norm.default], always(SUM, SUM))),
    "first_reduction_remembered": WrongOperator("the cache of rules for amax ignores the dim", "159289, 134146", remembered(aten.amax.default, RuntimeSchemaInfo(100)), stays=True),
    "number_minus_shares": WrongOperator("each rank subtracts its share from the whole number", "163193", rule([aten.rsub.Scalar], always(SUM, SUM))),
    "largest_added_in_turn": WrongOperator("cumsum of a partial maximum stays a maximum", "170035, 165962", rule([aten.cumsum.default], always(MAX, MAX))),
    "divided_by_two_ranks": WrongOperator("a term of a sum is divided by two, whatever the number of ranks", "149768", replaced(Partial, "_partition_value", _halved)),
    "second_axis_not_reduced": WrongOperator("partial sums are reduced on the first axis of a mesh alone", "166598", replaced(Partial, "_reduce_value", _reduced_on_first_axis)),
    "rows_of_first_axis": WrongOperator("an embedding finds its rows by the rank on the first axis of a mesh", "118513, 166598", replaced(_MaskPartial, "_partition_value", _masked_on_first_axis)),
    "copied_from_the_same_dim": WrongOperator("copy_ from a tensor with fewer dims counts dims from the front", "158538", rule([aten.copy_.default], _same_dim)),
    "target_on_every_rank": WrongOperator("scatter_add counts its first operand on every rank", "172350, 170934", rule([aten.scatter_add.default], lambda s, a: [[SUM, WHOLE, Shard(a[1] % len(s[0])), Shard(a[1] % len(s[0]))]])),
    "filled_like_a_share": WrongOperator("full_like of a partial sum fills each share", "163193", rule([aten.full_like.default], always(SUM, SUM))),
    "parts_exchanged_in_reverse": WrongOperator("a shard that moves to another dim gets the ranks' parts in reverse order", "144109, 161368", replaced(placement_types, "shard_dim_alltoall", _exchanged_in_reverse)),
    "gradient_of_own_ids": WrongOperator("each rank's ids give the whole gradient of an embedding", "118513, 133499", rule([aten.embedding_dense_backward.default], lambda s, a: [[WHOLE, Shard(d), Shard(d)] for d in range(len(s[1]))])),
    # Arguments, caches, norms, views of several dims, averages on meshes.
    "smallest_magnitude_by_largest": WrongOperator("a norm of order -inf is reduced by the largest", "149768", replaced(_math_ops, "_get_norm_reduction_op", lambda right, order: "max" if order == -torch.inf else right(order))),
    "second_rolled_dim_overlooked": WrongOperator("roll works on each rank's part of its second dim", "161368", rule([aten.roll.default], lambda s, a: _all_but_first(s, a[2:]))),
    "second_flipped_dim_overlooked": WrongOperator("flip works on each rank's part of its second dim", "161368", rule([aten.flip.default], lambda s, a: _all_but_first(s, a[1:]))),
    "outer_normalized_dim_overlooked": WrongOperator("layer_norm works on each rank's part of its first normalized dim", "115683", rule([aten.native_layer_norm.default], lambda s, a: [[Shard(d), Shard(d), Shard(d), Shard(d), *[WHOLE] * (len(s) - 1)] for d in range(len(s[0]) - 1)] if len(a[1]) > 1 and len(s) == 1 else [])),
    "last_of_equal_places_written": WrongOperator("index_put does not accumulate", "170934", handled(aten.index_put.default, lambda op, args, kwargs: op(*args[:3]))),
    "first_transposed_dims_remembered": WrongOperator("the cache of rules for transpose ignores the dims", "134050", remembered(aten.transpose.int, RuntimeSchemaInfo(100)), stays=True),
    "first_sliced_dim_remembered": WrongOperator("the cache of rules for slice ignores all arguments", "134050", remembered(aten.slice.Tensor, RuntimeSchemaInfo(100)), stays=True),
    "dtype_of_a_sum_ignored": WrongOperator("sum ignores the argument dtype", "163374", handled(aten.sum.dim_IntList, lambda op, args, kwargs: op(*args))),
    "ignored_targets_counted": WrongOperator("nll_loss ignores ignore_index", "185167", handled(aten.nll_loss_forward.default, lambda op, args, kwargs: op(*args[:4], -100))),
    "averages_over_the_whole_mesh": WrongOperator("an average over one axis is divided by the number of ranks of all axes", "166598, 157340", replaced(Partial, "_reduce_value", _averaged_over_mesh)),
    "first_factor_for_the_whole_list": WrongOperator("a list is multiplied by the first of its factors", "120238", handled(aten._foreach_mul.ScalarList, lambda op, args, kwargs: op(args[0], args[1][:1] * len(args[1])))),
    "factor_of_the_added_ignored": WrongOperator("add_ ignores alpha", "163193", handled(aten.add_.Tensor, lambda op, args, kwargs: op(*args))),
}  # fmt: skip
