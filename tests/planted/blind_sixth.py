# ruff: noqa: E501  (a row of a table is a line)
"""Operators of DTensors that are wrong in one way each: plans of modules, losses, arguments, caches, two axes of a mesh.

They were written without a look at the cases, the judge or the table of operators, on the history of torch's defects.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, _api, _dispatch, _nonlinear_redux, placement_types
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor._ops import _matrix_ops, _tensor_ops
from torch.distributed.tensor.parallel import PrepareModuleInput, PrepareModuleOutput, SequenceParallel, api, loss

from tests.planted.blind_fifth import source
from tests.planted.operators import WrongOperator, handled, remembered, replaced, rule
from tests.planted.rules import AVG, MAX, MIN, SUM, WHOLE, always

aten = torch.ops.aten
Shapes = list[tuple[int, ...]]


def _without(*names: str) -> Any:
    """Calls an operator without some of its keyword arguments."""
    return lambda op, args, kwargs: op(*args, **{key: value for key, value in kwargs.items() if key not in names})


def _given(place: int, *, value: Any) -> Any:
    """Calls an operator with another argument at that place."""
    return lambda op, args, kwargs: op(*args[:place], value, *args[place + 1 :], **kwargs)


def _cut(count: int) -> Any:
    """Calls an operator with its first arguments alone."""
    return lambda op, args, kwargs: op(*args[:count], **kwargs)


def _sent_by_the_first(right: Any, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int = 0, *rest: Any, group_src: int = 0) -> Any:  # fmt: skip
    return right(tensor, mesh, mesh_dim, *rest)


def _inverse_permutation(shapes: Shapes, args: Any) -> list[Any]:
    """Moves a shard to the place to which the inverse of the permutation moves its dim."""
    dims = [dim % len(shapes[0]) for dim in args[1]]
    return [[Shard(dims[dim]), Shard(dim)] for dim in range(len(dims))]


def _first_axis_gathered(right: Any, placements: Any, dim: int) -> Any:
    """Makes a dim whole on the first axis alone, although several axes divide it."""
    found = list(placements)
    for axis, placement in enumerate(placements):
        if placement.is_shard(dim):
            found[axis] = Replicate()
            break
    return tuple(found)


BLIND_SIXTH: dict[str, WrongOperator] = {
    # Plans of modules.
    "keyword_inputs_stay": WrongOperator("PrepareModuleInput does not redistribute keyword inputs", "124114, 128365", source(PrepareModuleInput._prepare_input_kwarg_fn, "self.desired_input_kwarg_layouts.get(kwarg_key)", "self.input_kwarg_layouts.get(kwarg_key)")),
    "second_output_placed_as_the_first": WrongOperator("PrepareModuleOutput places all outputs as the first", "111166, torchtitan 3374", source(PrepareModuleOutput._prepare_out_fn, "placements=(desired_out_layout,)", "placements=(self.desired_output_layouts[0],)")),
    "sequence_not_divided": WrongOperator("SequenceParallel leaves a whole DTensor whole", "121295, 129355", source(SequenceParallel._prepare_input_fn, "if input_tensor.placements != sequence_sharding:", "if input_tensor.placements[0].is_partial():")),
    "source_of_a_plan_ignored": WrongOperator("parallelize_module with a dict as its plan ignores src_data_rank", "144005, 143883", source(api.parallelize_module, "src_data_rank=src_data_rank,\n", "\n")),
    # To and from local tensors.
    "copies_of_the_first": WrongOperator("distribute_tensor broadcasts the first rank's tensor, whatever src_data_rank", "143883, 88838", replaced(placement_types, "mesh_broadcast", _sent_by_the_first)),
    "local_grad_placements_ignored": WrongOperator("to_local ignores grad_placements", "110629, torchtitan 2532", source(_api._ToTorchTensor.forward, "ctx.grad_placements = grad_placements", "ctx.grad_placements = None")),
    # Views, slices, indices.
    "permuted_the_other_way": WrongOperator("permute moves shards by the inverse permutation", "179502, 111750", rule([aten.permute.default], _inverse_permutation)),
    "second_axis_of_a_slice_overlooked": WrongOperator("a slice of a dim that two axes divide gathers it on one", "139735, 166598", replaced(_tensor_ops, "unshard_tensor_dim", _first_axis_gathered)),
    "row_of_a_gradient_not_counted": WrongOperator("the backward of select leaves shards in place, though it adds a dim", "149071, 150357", source(_tensor_ops.select_backward_strategy, "shift_shard_dims_after_insert(input_spec.placements, dim)", "input_spec.placements")),
    "place_among_own_bounds": WrongOperator("bucketize takes the largest of the places among the ranks' bounds", "173937", rule([aten.bucketize.Tensor], always(MAX, WHOLE, Shard(0)))),
    "rare_words_weigh_the_same": WrongOperator("the backward of an embedding ignores scale_grad_by_freq", "133499, 118079", handled(aten.embedding_dense_backward.default, _given(4, value=False))),
    # Pointwise.
    "whole_less_the_largest": WrongOperator("whole plus a partial maximum is a partial maximum, whatever alpha", "172601, 163193", rule([aten.add.Tensor], always(MAX, WHOLE, MAX))),
    "reciprocal_of_the_smallest": WrongOperator("the reciprocal of a partial minimum is a partial maximum, whatever the signs", "172601, 174874", rule([aten.reciprocal.default], always(MAX, MIN))),
    "truth_of_the_largest": WrongOperator("a partial maximum that becomes bools stays a partial maximum", "183363, 182730", source(_tensor_ops._partial_needs_reduce_for_dtype_cast, "if target_dtype == torch.bool:\n        return True", "if target_dtype == torch.bool:\n        return reduce_op not in ('max', 'min')")),
    "dropped_by_shares": WrongOperator("dropout draws for each rank's share", "146190, 168058", rule([aten.native_dropout.default], always(SUM, SUM))),
    "bounds_of_numbers_ignored": WrongOperator("uniform_ ignores its bounds", "168058", handled(aten.uniform_.default, _cut(1))),
    # Reductions, sorting.
    "medians_averaged": WrongOperator("median without a dim is the average of the ranks' medians", "179200, 162692", rule([aten.median.default], lambda s, a: [[AVG, Shard(dim)] for dim in range(len(s[0]))])),
    "place_of_own_largest": WrongOperator("argmax of a partial maximum looks at each rank's numbers", "173936, 175776", source(_nonlinear_redux._prep_arguments, "Replicate() if isinstance(p, Partial) else p", "Replicate() if isinstance(p, Partial) and p.reduce_op != 'max' else p")),
    "first_dim_of_topk_remembered": WrongOperator("the cache of rules for topk ignores the dim", "159189, 134146", remembered(aten.topk.default, RuntimeSchemaInfo(100)), stays=True),
    # Layers, products, transforms.
    "columns_of_groups_taken_for_rows": WrongOperator("grouped_mm of two matrices places divided columns as rows", "151072, 158245", source(_matrix_ops.grouped_mm_strategy, "replicate_colwise_2x2: PlacementList = [\n            Shard(2)", "replicate_colwise_2x2: PlacementList = [\n            Shard(1)")),
    "padding_counts_in_averages": WrongOperator("avg_pool2d ignores count_include_pad", "176821, 179202", handled(aten.avg_pool2d.default, _cut(5))),
    "corners_not_aligned": WrongOperator("interpolate ignores align_corners", "176991", handled(aten.upsample_bilinear2d.default, _given(2, value=False))),
    "first_transformed_dim_overlooked": WrongOperator("fft over two dims works on each rank's part of the first", "175463, 188369", rule([aten._fft_c2c.default, aten._fft_r2c.default], lambda s, a: [[Shard(dim % len(s[0]))] * 2 for dim in a[1][:-1]])),
    "diagonal_in_spite_of_ones": WrongOperator("solve_triangular ignores unitriangular", "176955", handled(aten.linalg_solve_triangular.default, _without("unitriangular"))),
    # Losses, optimizers.
    "rows_counted_for_weights": WrongOperator("loss_parallel's gradient of a weighted mean is divided by the number of rows", "119877, 180936", source(loss._nll_loss_and_log_softmax_backward, "grad_output = grad_output / total_weight", "grad_output = grad_output / target.numel()")),
    "classes_along_the_first_axis": WrongOperator("loss_parallel adds up classes along the first axis of a mesh, whichever divides them", "180936, 190746", source(loss._log_softmax_handler, "spec.mesh, mesh_dim)", "spec.mesh, 0)")),
    "infinity_of_own_rows": WrongOperator("GradScaler skips a step on the ranks alone whose gradients are infinite", "132816, 134185", source(_dispatch.found_inf_reduce_handler, "found_inf = found_inf_dtensor.full_tensor()", "found_inf = target_tensor")),
    "bend_of_a_loss_ignored": WrongOperator("huber_loss ignores delta", "174422", handled(aten.huber_loss.default, _cut(3))),
}  # fmt: skip
"""Name -> wrong operator."""
