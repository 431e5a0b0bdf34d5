# ruff: noqa: E501  (a row of a table is a line)
"""Operators of DTensors that are wrong in one way each: statistics, losses, shapes, indices, shares of sums, caches.

They were written without a look at the cases, the judge or the table of operators, on the history of torch's defects.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard, _api
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.placement_types import _MaskPartial

from tests.planted.blind_fifth import source
from tests.planted.blind_sixth import _cut, _given, _without
from tests.planted.operators import WrongOperator, _scalar, handled, remembered, replaced, rule
from tests.planted.rules import AVG, MAX, MIN, SUM, WHOLE, always, dim_named, kept

aten = torch.ops.aten
Shapes = list[tuple[int, ...]]


def _from_the_front(shapes: Shapes, args: Any) -> list[Any]:
    """Divides a term with fewer dims along the dim of the same number."""
    is_shorter = len(shapes) == 2 and len(shapes[1]) < len(shapes[0])
    return [[Shard(dim)] * 3 for dim in range(len(shapes[1]))] if is_shorter else []


def _new_dims_not_counted(shapes: Shapes, args: Any) -> list[Any]:
    """Leaves shards in place, although repeat adds dims before them."""
    return [[Shard(dim)] * 2 for dim in range(len(shapes[0])) if len(args[1]) > len(shapes[0])]


def _smallest_by_largest(right: Any, self: Partial, *rest: Any) -> Any:
    return right(MAX if self == MIN else self, *rest)


def _along_the_first_axis(right: Any, self: Any, tensor: torch.Tensor, mesh: DeviceMesh, axis: int, *rest: Any) -> Any:
    return right(self, tensor, mesh, 0, *rest)


def _earlier_rows_not_masked(right: Any, self: Any, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int) -> Any:
    """Takes each rank's first row for the rows of the ranks before it."""
    rows, rank = self.offset_shape[self.offset_dim], mesh.get_local_rank(mesh_dim)
    size, offset = Shard.local_shard_size_and_offset(rows, mesh.size(mesh_dim), rank)
    mask, masked = _MaskPartial._mask_tensor(tensor.clamp(min=offset), offset, size)
    self.mask_buffer.materialize_mask(mask)
    return masked


def _gradient_divided(right: Any, ctx: Any, gradient: Any) -> Any:
    """Divides the gradient of a partial sum by the ranks, as if it were an average."""
    own, *rest = right(ctx, gradient)
    for axis, placement in enumerate(ctx.forward_input_placements):
        if own is not None and placement == SUM:
            own = own / ctx.forward_input_device_mesh.size(axis)
    return own, *rest


def _rows_of_own_source(op: Any, args: Any, kwargs: Any) -> Any:
    """Adds each rank's own rows, and takes the result for the whole."""
    target, dim, index, rows = args
    if target.placements != (WHOLE,) or index.placements != (Shard(0),) or rows.placements != (Shard(dim),):
        return op(*args, **kwargs)
    found = op(target.to_local(), dim, index.to_local(), rows.to_local(), **kwargs)
    return DTensor.from_local(found, target.device_mesh, [WHOLE])


BLIND_NINTH: dict[str, WrongOperator] = {
    # Reductions, norms, losses, statistics.
    "mean_of_the_largest": WrongOperator("a mean of a partial maximum is a partial maximum", "170035, 165962", rule([aten.mean.default, aten.mean.dim], always(MAX, MAX))),
    "first_summed_dim_remembered": WrongOperator("the cache of rules for sum ignores the dim", "159289, 134146", remembered(aten.sum.dim_IntList, RuntimeSchemaInfo(100)), stays=True),
    "variance_of_shares": WrongOperator("var of each rank's share of a sum", "165962, 163374", rule([aten.var.correction], always(SUM, SUM))),
    "root_mean_squares_of_own_columns": WrongOperator("rsqrt of a partial average is a partial average", "165962, 115683", rule([aten.rsqrt.default], always(AVG, AVG))),
    "gradient_of_a_summed_loss_averaged": WrongOperator("nll_loss's gradient ignores reduction", "185167, 180936", handled(aten.nll_loss_backward.default, _given(4, value=1))),
    "median_of_own_columns": WrongOperator("median along a dim takes the median of each rank's part of it", "179200, 173936", rule([aten.median.dim], lambda s, a: [[WHOLE, Shard(dim)] for dim in dim_named(1)(s, a)])),
    "one_on_every_rank": WrongOperator("clamp_min of each rank's share of a count", "163374, 165962", rule([aten.clamp_min.default], always(SUM, SUM))),
    "evaluated_by_the_batch": WrongOperator("batch_norm in an evaluation takes the statistics of the batch", "182743, 184825", handled(aten.native_batch_norm.default, _given(5, value=True))),
    "scores_by_shares": WrongOperator("softmax of each rank's share of a sum", "165962, 134050", rule([aten._softmax.default], always(SUM, SUM))),
    "mean_in_its_own_dtype": WrongOperator("mean ignores dtype", "163374, 112576", handled(aten.mean.default, _without("dtype"))),
    # Views, indices, shapes, factories, sorting.
    "first_expansion_remembered": WrongOperator("the cache of rules for expand ignores the sizes", "183021, 183246", remembered(aten.expand.default, RuntimeSchemaInfo(100)), stays=True),
    "first_selected_dim_remembered": WrongOperator("the cache of rules for select ignores the dim", "159289, 134050", remembered(aten.select.int, RuntimeSchemaInfo(2)), stays=True),
    "rows_of_a_transposed_matrix_stay": WrongOperator("t leaves shards in place", "179502, 111750", rule([aten.t.default], kept())),
    "whole_stacked_on_every_rank": WrongOperator("stack joins the whole tensor to each rank's share", "163193, 172350", rule([aten.stack.default], lambda s, a: [[SUM, SUM, *[WHOLE] * (len(s) - 1)]])),
    "experts_by_shares": WrongOperator("topk of each rank's share of a sum", "165962, 126711", rule([aten.topk.default], always(SUM, SUM))),
    "own_place_not_hidden": WrongOperator("triu ignores diagonal", "161368, 174422", handled(aten.triu.default, _cut(1))),
    "removed_dims_not_counted": WrongOperator("squeeze without a dim leaves shards in place", "173563, 174136", rule([aten.squeeze.default], kept())),
    "rows_of_own_source_added": WrongOperator("index_add adds each rank's own rows alone", "178350, 170934", handled(aten.index_add.default, _rows_of_own_source)),
    "backward_begins_with_shares": WrongOperator("ones_like of a partial sum is a partial sum", "163193, 190795", rule([aten.ones_like.default], always(SUM, SUM))),
    "repeated_rows_stay": WrongOperator("repeat to more dims leaves shards in place", "179502, 163320", rule([aten.repeat.default], _new_dims_not_counted)),
    # Pointwise, products, attention, embeddings, redistribution, local tensors.
    "product_not_scaled": WrongOperator("addmm ignores alpha", "172387, 163193", handled(aten.addmm.default, _without("alpha"))),
    "term_from_the_front": WrongOperator("a term with fewer dims is divided as the other, dims counted from the front", "158538, 179136", rule([aten.add.Tensor], _from_the_front)),
    "smallest_by_largest": WrongOperator("a partial minimum becomes whole as a maximum", "170035, 157340", replaced(Partial, "_reduce_value", _smallest_by_largest)),
    "gathered_along_the_first_axis": WrongOperator("shards on the second axis of a mesh are gathered along the first", "166598, 129229", replaced(Shard, "_to_replicate_tensor", _along_the_first_axis)),
    "last_dim_taken_for_the_second": WrongOperator("from_local counts a negative dim as a matrix has it", "113924, 111750", source(DTensor.from_local, "placement.dim + local_tensor.ndim", "placement.dim + 2")),
    "number_from_each_share": WrongOperator("a number is subtracted from each rank's share", "163193, 149768", rule([aten.sub.Tensor], lambda s, a: _scalar(s, a, SUM))),
    "positive_on_one_rank": WrongOperator("a partial sum is compared with a number on each rank's share", "155420, 172601", rule([aten.gt.Scalar], always(SUM, SUM))),
    "gradient_of_a_share_divided": WrongOperator("from_local divides the gradient of a partial sum by the ranks", "173153, 172932", replaced(_api._FromTorchTensor, "backward", _gradient_divided)),
    "earlier_rows_not_masked": WrongOperator("an embedding takes a rank's first row for the rows of the ranks before it", "118513, 133499", replaced(_MaskPartial, "_partition_value", _earlier_rows_not_masked)),
    "gradient_of_relu_by_shares": WrongOperator("relu's gradient takes each rank's share of a gradient for the whole", "118600, 163374", rule([aten.threshold_backward.default], always(WHOLE, SUM, WHOLE))),
}  # fmt: skip
"""Name -> wrong operator."""
