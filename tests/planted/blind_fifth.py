# ruff: noqa: E501  (a row of a table is a line)
"""Operators of DTensors that are wrong in one way each: redistribution, modules, losses, indices, caches, keywords.

They were written without a look at the cases, the judge or the table of operators, on the history of torch's defects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor, Partial, Shard, _api, _nonlinear_redux, _redistribute
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._ops import _math_ops, _matrix_ops, _tensor_ops
from torch.distributed.tensor.experimental import _func_map
from torch.distributed.tensor.parallel import SequenceParallel, api, loss

from tests.planted.operators import HANDLERS, WrongOperator, _scalar, handled, replaced, rule
from tests.planted.rules import WHOLE
from tests.planted.training import edited_source

aten = torch.ops.aten
Shapes = list[tuple[int, ...]]
FACTORS = Partial("product")


def source(function: Any, right: str, wrong: str) -> Callable[[], AbstractContextManager[None]]:
    return lambda: edited_source(function, right, wrong)


def _first_dim_of_the_sequence(right: Any, self: Any, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
    right(self, use_local_output=use_local_output)


def _norms_scattered_as_sums(right: Any, self: Partial, *rest: Any) -> Any:
    return Partial._reduce_shard_value(self, *rest)


@contextmanager
def _loss_parallel_goes_on() -> Iterator[None]:
    """Leaves the operators of loss_parallel in force behind its context."""
    with ExitStack() as stack:
        stack.enter_context(patch.dict(HANDLERS))
        stack.enter_context(patch.object(loss, "_disable_custom_loss_ops", lambda: None))
        yield


def _keywords_lost(right: Any, *args: Any) -> Any:
    info = next(each for each in args if hasattr(each, "local_kwargs"))
    found = right(*[each for each in args if not isinstance(each, OpDispatcher)])
    info.local_kwargs.clear()
    return found


def _index_divided(shapes: Shapes, args: Any) -> list[Any]:
    """Divides the index along another dim than the one that it gathers along, beside a whole operand."""
    return [[Shard(dim), WHOLE, Shard(dim)] for dim in range(len(shapes[1])) if dim != args[1] % len(shapes[0])]


def _always(**given: Any) -> Any:
    """Calls an operator with other keyword arguments than it got."""
    return lambda op, args, kwargs: op(*args, **{**kwargs, **given})


BLIND_FIFTH: dict[str, WrongOperator] = {
    # From local tensors, redistribution.
    "strided_from_the_end_is_plain": WrongOperator("from_local takes strided shards of a dim that is counted from the end for plain ones", "179059, 166483", source(DTensor.from_local, "_StridedShard(\n                            normalized_dim, split_factor=placement.split_factor\n                        )", "Shard(normalized_dim)")),
    "inputs_stay_where_they_are": WrongOperator("local_map with redistribute_inputs does not use what it redistributed", "155181, 123676", source(_func_map._local_map_wrapped, "arg = arg.redistribute(placements=spec)", "arg.redistribute(placements=spec)")),
    "norms_scattered_as_sums": WrongOperator("norms of shards that become shards are added", "120238, 149768", replaced(_math_ops._NormPartial, "_reduce_shard_value", _norms_scattered_as_sums)),
    "strided_rows_stay_where_they_are": WrongOperator("strided shards that become plain shards of the same dim are not moved", "179059, 168134", source(_redistribute.redistribute_local_tensor, "elif isinstance(current, _StridedShard):\n                    # _StridedShard -> Shard", "elif getattr(current, 'dim', None) == target_placement.dim:\n                    pass\n                elif isinstance(current, _StridedShard):\n                    # _StridedShard -> Shard")),
    # Indices, slices, views, sorting.
    "index_divided_beside_whole_rows": WrongOperator("gather from a whole tensor divides its index along a dim that it does not gather along", "172350", rule([aten.gather.default], _index_divided)),
    "end_from_the_end_is_the_end": WrongOperator("a slice with an end that is counted from the end returns the whole dim", "139735, 179136", source(_tensor_ops.gen_slice_strategy, "statically_known_true(end > input_shape[dim])", "not 0 <= end <= input_shape[dim]")),
    "indices_apart_taken_for_adjacent": WrongOperator("indices of two dims that are apart put their dim where adjacent ones do", "172350, 179136", source(_tensor_ops.index_single_dim_strategy, "insert_dim = indexed_dims[0] if all_consecutive else 0", "insert_dim = indexed_dims[0]")),
    "dims_of_a_squeeze_in_place_kept": WrongOperator("squeeze_ leaves the placements as they were", "174136, 159532", source(OpDispatcher._dispatch_fast_path_python_tail, "args[0]._spec = output_spec", "output_spec = args[0]._spec.shallow_copy_with_tensor_meta(output_spec.tensor_meta); args[0]._spec = output_spec")),
    "negative_pads_overlooked": WrongOperator("a pad that cuts rows off works on each rank's part", "175656", source(_matrix_ops.constant_pad_nd_single_dim_strategy, "guard_or_false(pad[i * 2] == 0) and guard_or_false(pad[i * 2 + 1] == 0)", "guard_or_false(pad[i * 2] <= 0) and guard_or_false(pad[i * 2 + 1] <= 0)")),
    "last_dim_sorted_as_the_first": WrongOperator("sort without a dim is placed as if it sorted the first dim", "168940", source(_math_ops.sort_default_strategy, "sort_dim = -1", "sort_dim = 0")),
    "places_right_of_equals_ignored": WrongOperator("bucketize ignores right", "163193", handled(aten.bucketize.Tensor, _always(right=False))),
    # Reductions, pointwise, random numbers.
    "strides_lost_in_a_reduction": WrongOperator("strided shards of a dim that is not reduced become plain shards", "166483, 168134", source(_math_ops.map_placements_after_reduction, "_StridedShard(\n                            new_shard_dim, split_factor=placement.split_factor\n                        )", "Shard(new_shard_dim)")),
    "evenness_of_the_first_dim": WrongOperator("a mean over several dims looks at the first alone whether shards are uneven", "162692, 163241", source(_math_ops.common_reduction_strategy, "for dim in reduce_dims:", "for dim in reduce_dims[:1]:")),
    "inner_axis_of_a_partial_overlooked": WrongOperator("a sum looks on the first axis of a mesh alone for a partial maximum", "170035, 165962", source(_math_ops.common_reduction_strategy, "for p in op_spec.output_spec.placements:", "for p in op_spec.output_spec.placements[:1]:")),
    "least_rank_by_its_largest": WrongOperator("argmin without a dim compares ranks by their largest elements", "168983, 170066", source(_nonlinear_redux.argminmax_handler, "local_redux = val_op(local_tensor).unsqueeze(0)", "local_redux = torch.max(local_tensor).unsqueeze(0)")),
    "every_factor_multiplied": WrongOperator("a partial product times a number is the product of each rank's multiple", "153603", rule([aten.mul.Tensor], lambda s, a: _scalar(s, a, FACTORS))),
    "keywords_lost_on_the_way": WrongOperator("an operator whose operands are redistributed forgets its keyword arguments", "163193", replaced(OpDispatcher, "redistribute_local_args", _keywords_lost)),
    "copies_drawn_apart": WrongOperator("each rank draws other random numbers for its copy of a whole tensor", "103235, 147025", source(OpDispatcher._dispatch_get_local_results_slow_path, "if op_call in self._random_ops:\n", "if op_call in self._random_ops:\n            torch.rand(mesh.get_rank())\n")),
    # Losses, optimizers, modules.
    "first_weight_for_all_rows": WrongOperator("loss_parallel without a reduction scales all gradients as the first row's", "185167, Automodel 3853", source(loss._nll_loss_and_log_softmax_backward, "grad_output = grad_output.unsqueeze(channel_dim)", "grad_output = grad_output.flatten()[0]")),
    "loss_parallel_goes_on": WrongOperator("log_softmax behind loss_parallel has the gradient of its cross_entropy", "190746", _loss_parallel_goes_on),
    "maximized_as_minimized": WrongOperator("fused Adam ignores maximize", "153268, 112108", handled(aten._fused_adam_.default, _always(maximize=False))),
    "sequence_along_the_usual_dim": WrongOperator("SequenceParallel ignores sequence_dim", "129355, 121295", replaced(SequenceParallel, "__init__", _first_dim_of_the_sequence)),
    "first_match_of_a_pattern": WrongOperator("parallelize_module applies a plan with a wildcard to the first match alone", "122968, 157182", source(api.parallelize_module, "for _, submodule in matched_children:", "for _, submodule in matched_children[:1]:")),
    "buffers_of_each_rank": WrongOperator("distribute_module leaves each rank its own buffers", "147980, 88838", source(_api.distribute_module, "distribute_tensor(buffer, mesh, full_replicate)", "distribute_tensor(buffer, mesh, full_replicate, src_data_rank=None)")),
}  # fmt: skip
"""Name -> wrong operator."""
