# ruff: noqa: E501  (a row of a table is a line)
"""Operators of DTensors that are wrong in one way each: strides, axes, in-place forms, dims, dtypes, options.

They were written without a look at the cases, the judge or the table of operators, on the history of torch's defects.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard, _redistribute
from torch.distributed.tensor.parallel import PrepareModuleInputOutput, RowwiseParallel, loss
from torch.distributed.tensor.placement_types import Partial, _StridedShard

from tests.planted.blind_fifth import source
from tests.planted.blind_sixth import _cut, _given, _without
from tests.planted.operators import WrongOperator, handled, rule
from tests.planted.rules import AVG, WHOLE, always, dim_named

aten = torch.ops.aten
Shapes = list[tuple[int, ...]]


def _later_dims(shapes: Shapes, args: Any) -> list[Any]:
    """Takes each rank's part of all named dims except the first for the whole."""
    return [[WHOLE, Shard(dim)] for dim in dim_named(1)(shapes, args)[1:]]


def _not_counted_down(shapes: Shapes, args: Any) -> list[Any]:
    """Leaves shards of the dims behind a removed one in place."""
    first = args[1] % len(shapes[0]) + 1
    return [] if len(args) > 2 and args[2] else [[Shard(dim)] * 2 for dim in range(first, len(shapes[0]) - 1)]


def _deviation_squared(op: Any, args: Any, kwargs: Any) -> Any:
    mean, std = list(args[1:]) + [0.0, 1.0][len(args) - 1 :]
    return op(args[0], mean, std**0.5, **kwargs)


BLIND_SEVENTH: dict[str, WrongOperator] = {
    # Plans of modules, losses, initial values.
    "ids_of_each_rank": WrongOperator("RowwiseParallel takes each rank's ids of an embedding for all ids", "118242, torchtitan 314", source(RowwiseParallel._prepare_input_fn, "device_mesh,\n            input_layouts,", "device_mesh,\n            input_layouts if input_tensor.is_floating_point() else desired_input_layouts,")),
    "local_inputs_beside_local_outputs": WrongOperator("PrepareModuleInputOutput makes inputs local if use_local_output is true", "150372", source(PrepareModuleInputOutput.__init__, "use_local_output=use_local_input", "use_local_output=use_local_output")),
    "scale_of_a_loss_lost": WrongOperator("loss_parallel's gradient of a mean ignores what the loss is multiplied by", "119877", source(loss._nll_loss_and_log_softmax_backward, "grad_output = grad_output / total_weight", "grad_output = torch.ones_like(grad_output) / total_weight")),
    "deviation_taken_for_a_variance": WrongOperator("normal_ takes the standard deviation for the variance", "103235, 147025", handled(aten.normal_.default, _deviation_squared)),
    "positive_weight_ignored": WrongOperator("binary_cross_entropy_with_logits ignores pos_weight", "174422", handled(aten.binary_cross_entropy_with_logits.default, _given(3, value=None))),
    # Redistribution, to and from local tensors.
    "strides_taken_for_equal": WrongOperator("strided shards of two split factors are equal", "178735, 168134", source(_StridedShard.__eq__, "and _split_factor_key(self.split_factor)\n        == _split_factor_key(other.split_factor)", "")),
    "gradient_not_rounded": WrongOperator("redistribute ignores backward_dtype", "182032, 179495", source(DTensor.redistribute, '"op_dtype": backward_dtype or input_dtype', '"op_dtype": input_dtype')),
    "averages_split_as_sums": WrongOperator("a whole tensor that becomes a partial average is divided by the ranks", "157340, 149768", source(Partial._partition_value, 'if self.reduce_op == "sum":', 'if self.reduce_op in ("sum", "avg"):')),
    "piece_by_the_first_axis": WrongOperator("a whole tensor that is divided on the second axis of a mesh gives each rank the piece of its place on the first", "129229, 166598", source(_redistribute.redistribute_local_tensor, "mesh_to_use, i, mesh_to_use._sym_get_coordinate(i)", "mesh_to_use, i, mesh_to_use._sym_get_coordinate(0)")),
    # Reductions.
    "products_of_own_parts_averaged": WrongOperator("a dot product of shards is the average of the ranks' products", "118600", rule([aten.dot.default], always(AVG, Shard(0), Shard(0)))),
    "later_dims_overlooked": WrongOperator("logsumexp over several dims looks at the first alone for shards", "166483", rule([aten.logsumexp.default], _later_dims)),
    "commonest_of_own_columns": WrongOperator("mode takes the commonest of each rank's part of the dim", "173936", rule([aten.mode.default], lambda s, a: [[WHOLE, Shard(dim)] for dim in dim_named(1)(s, a)])),
    "dims_behind_a_largest_stay": WrongOperator("max leaves shards behind the removed dim in place", "170934", rule([aten.max.dim], _not_counted_down)),
    "norm_in_its_own_dtype": WrongOperator("a norm ignores dtype", "149768", handled(aten.linalg_vector_norm.default, _without("dtype"))),
    # Indices.
    "row_written_by_each_rank": WrongOperator("select_scatter writes a row into each rank's part of the dim", "172350", rule([aten.select_scatter.default], lambda s, a: [[Shard(a[2]), Shard(a[2]), WHOLE]])),
    "part_scattered_into_by_each_rank": WrongOperator("scatter of a number writes into each rank's part of the dim", "172350, 170934", rule([aten.scatter.value], lambda s, a: [[Shard(a[1]), Shard(a[1]), WHOLE]])),
    "added_rows_not_scaled": WrongOperator("index_add ignores alpha", "163193", handled(aten.index_add.default, _without("alpha"))),
    "main_diagonal_instead": WrongOperator("tril ignores diagonal", "161368", handled(aten.tril.default, _cut(1))),
    # Layers, pointwise, lists.
    "usual_eps_of_groups": WrongOperator("group_norm ignores eps", "115683", handled(aten.native_group_norm.default, _given(7, value=1e-5))),
    "scores_not_scaled": WrongOperator("baddbmm ignores alpha", "163193, 172350", handled(aten.baddbmm.default, _without("alpha"))),
    "quotients_not_rounded": WrongOperator("a division in place ignores rounding_mode", "163374", handled(aten.div_.Tensor_mode, lambda op, args, kwargs: aten.div_.Tensor(*args))),
    "squares_not_weighted": WrongOperator("a list of products is added without its factor", "120238", handled(aten._foreach_addcmul_.Scalar, _cut(3))),
}  # fmt: skip
"""Name -> wrong operator."""
