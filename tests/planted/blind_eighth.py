# ruff: noqa: E501  (a row of a table is a line)
"""Operators of DTensors that are wrong in one way each: losses, norms, shapes, new tensors, lists, caches, partial results.

They were written without a look at the cases, the judge or the table of operators, on the history of torch's defects.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor._ops import _tensor_ops

from tests.planted.blind_fifth import source
from tests.planted.blind_sixth import _cut, _without
from tests.planted.operators import WrongOperator, edited, handled, remembered, replaced, rule
from tests.planted.rules import AVG, MAX, SUM, WHOLE, always

aten = torch.ops.aten
Shapes = list[tuple[int, ...]]


def _last_dim_from_the_end(shapes: Shapes, args: Any) -> list[Any]:
    """Takes the norm of each rank's part of a dim that is counted from the end for the whole norm."""
    dims = args[2] if len(args) > 2 and args[2] else []
    return [[WHOLE, Shard(dim % len(shapes[0]))] for dim in dims if dim < 0]


def _kept_dim_counted(shapes: Shapes, args: Any) -> list[Any]:
    """Moves the shards behind a reduced dim, although keepdim keeps it."""
    dims = [dim % len(shapes[0]) for dim in args[1]]
    is_kept = len(args) > 2 and args[2] and len(dims) == 1
    return [[Shard(dim - 1), Shard(dim)] for dim in range(1, len(shapes[0])) if is_kept and dim > dims[0]]


def _inner_dim(shapes: Shapes, args: Any) -> list[Any]:
    """Gives the shards of a dim that is split to the second of its parts."""
    return [[Shard(1), Shard(0)]] if len(args[1]) == 1 + len(shapes[0]) else []


def _first_of_the_squeezed(shapes: Shapes, args: Any) -> list[Any]:
    """Counts the first removed dim alone."""
    dims = sorted(dim % len(shapes[0]) for dim in args[1])
    return [[Shard(dim - 1), Shard(dim)] for dim in range(dims[-1] + 1, len(shapes[0])) if len(dims) > 1]


def _columns_second(combination: list[Any], args: Any) -> list[Any]:
    return [combination[1], *combination[1:]] if combination[1] == Shard(1) else combination


def _largest_scattered_as_sums(right: Any, self: Partial, *rest: Any) -> Any:
    return right(SUM if self == MAX else self, *rest)


BLIND_EIGHTH: dict[str, WrongOperator] = {
    # Reductions, norms, losses, softmax.
    "logits_of_shares": WrongOperator("log_softmax of each rank's share of a sum", "165962, 163374", rule([aten._log_softmax.default], always(SUM, SUM))),
    "normalized_by_shares": WrongOperator("layer_norm of each rank's share of a sum", "165962, 115683", rule([aten.native_layer_norm.default], always(SUM, SUM, WHOLE, WHOLE))),
    "sum_of_a_loss_averaged": WrongOperator("binary_cross_entropy ignores reduction", "174422, 185167", handled(aten.binary_cross_entropy.default, _cut(3))),
    "first_softmax_remembered": WrongOperator("the cache of rules for softmax ignores the dim", "159289, 134050", remembered(aten._softmax.default, RuntimeSchemaInfo(100)), stays=True),
    "norm_of_own_last_columns": WrongOperator("a norm along a dim that is counted from the end is of each rank's part", "111750, 168983", rule([aten.linalg_vector_norm.default], _last_dim_from_the_end)),
    "kept_dim_counted": WrongOperator("amax with keepdim moves the shards behind the dim", "170934", rule([aten.amax.default], _kept_dim_counted)),
    "gradient_of_weights_by_shares": WrongOperator("softmax's gradient takes each rank's share of a gradient for the whole", "118600, 152016", rule([aten._softmax_backward_data.default], always(WHOLE, SUM, WHOLE))),
    "largest_instead_of_smallest": WrongOperator("topk ignores largest", "159189, 179062", handled(aten.topk.default, _cut(3))),
    "root_of_own_means": WrongOperator("the root of a partial average is a partial average", "165962, 162692", rule([aten.sqrt.default], always(AVG, AVG))),
    # Views, indices, shapes, new tensors.
    "rows_of_a_batch_to_the_sequence": WrongOperator("a product of a batch gives the shards of the batch to the sequence", "179502, 186282", rule([aten._unsafe_view.default], _inner_dim)),
    "stacked_from_the_end": WrongOperator("stack counts a negative dim without the new dim", "111750, 174136", source(_tensor_ops.stack_strategy, "normalize_dim(dim, common_input_ndim + 1)", "normalize_dim(dim, common_input_ndim)")),
    "padded_with_zeros": WrongOperator("pad ignores its value", "175656", handled(aten.constant_pad_nd.default, _cut(2))),
    "columns_behind_the_first_ids": WrongOperator("an embedding whose columns are divided is placed as if its ids had one dim", "118513, 115683", edited(aten.embedding.default, _columns_second)),
    "second_squeezed_dim_not_counted": WrongOperator("squeeze of several dims counts the first alone", "173563, 174136", rule([aten.squeeze.dims], _first_of_the_squeezed)),
    "ones_of_each_rank": WrongOperator("new_ones of a partial sum is a partial sum", "163193, 190795", source(_tensor_ops.new_factory_strategy, "input_spec.is_sharded() or is_uninitialized_factory", "not input_spec.is_replicated()")),
    "zeros_in_its_own_dtype": WrongOperator("zeros_like ignores dtype", "112576, 163374", handled(aten.zeros_like.default, _without("dtype"))),
    "shorter_index_added": WrongOperator("scatter_add divides an index that is shorter than its target as the target", "186149, 172350", source(_tensor_ops.scatter_add_strategy, "if d != dim and input_shape[d] == index_shape[d]:", "if d != dim:")),
    # Pointwise, lists, products, redistribution, caches.
    "activation_of_shares": WrongOperator("silu of each rank's share of a sum", "163374, 165962", rule([aten.silu.default], always(SUM, SUM))),
    "scale_by_the_largest": WrongOperator("whole divided by a partial maximum is a partial maximum", "172601, 174874", rule([aten.div.Tensor], always(MAX, WHOLE, MAX))),
    "none_on_one_rank": WrongOperator("not of an answer of any is computed on each rank's own answer", "165923, 155420", rule([aten.bitwise_not.default], always(SUM, SUM))),
    "gradients_added_unscaled": WrongOperator("a list is added in place without alpha", "163193, 120238", handled(aten._foreach_add_.List, _without("alpha"))),
    "start_on_every_rank": WrongOperator("lerp takes the whole start for each rank's share", "163193", rule([aten.lerp.Scalar], always(SUM, WHOLE, SUM))),
    "first_gathered_dim_remembered": WrongOperator("the cache of rules for gather ignores the dim", "134050, 159189", remembered(aten.gather.default, RuntimeSchemaInfo(100)), stays=True),
    "largest_scattered_as_sums": WrongOperator("a partial maximum that becomes shards is the sum", "157340, 170035", replaced(Partial, "_reduce_shard_value", _largest_scattered_as_sums)),
    "product_with_the_largest": WrongOperator("a product with a partial maximum is a partial maximum", "174926, 172601", rule([aten.mm.default], lambda s, a: [[MAX, MAX, WHOLE]])),
}  # fmt: skip
"""Name -> wrong operator."""
