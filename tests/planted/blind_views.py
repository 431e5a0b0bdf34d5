# ruff: noqa: E501  (a row of a table is a line)
"""Operators of DTensors that are wrong in one way each: views, indices, sorting, padding, factories, redistribution.

They were written without a look at the cases, the judge or the table of operators, on the history of torch's defects.
"""

from __future__ import annotations

import dataclasses
import math
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard, _api, _redistribute, _utils, placement_types
from torch.distributed.tensor._collective_utils import pad_tensor
from torch.distributed.tensor._op_schema import OpSchema, RuntimeSchemaInfo
from torch.distributed.tensor._ops import _tensor_ops
from torch.distributed.tensor._ops._view_ops import _ViewShardingPropagator
from torch.distributed.tensor._redistribute import _FlattenedTransformInfo
from torch.distributed.tensor.placement_types import _StridedShard

from tests.planted.operators import WrongOperator, edited, handled, placed, remembered, replaced, rule, wrapped
from tests.planted.rules import AVG, SUM, WHOLE, always, kept

aten = torch.ops.aten
Shapes = list[tuple[int, ...]]


def _one_row_each(size: int) -> bool:
    """Says whether each rank has one row of a dim of that size, if all ranks divide it."""
    return size == torch.distributed.get_world_size()


def _by_whole_rows(right: Any, self: Any, p: Any, *rest: Any) -> Any:
    placement, local = right(self, p, *rest)
    if isinstance(placement, _StridedShard):
        first = self.rule[placement.dim].input_dims[0].input_dim
        factor = math.prod(self.global_input_shape[first : p.dim])
        placement = _StridedShard(placement.dim, split_factor=factor)
    return placement, local


def _same_dim_behind_new_ones(shapes: Shapes, args: Any) -> list[list[Placement]]:
    new = len(args[1]) - len(shapes[0])
    return [[Shard(dim)] * 2 for dim in range(min(new, len(shapes[0]))) if _one_row_each(shapes[0][dim])]


def _steps_not_seen(right: Any, schema: OpSchema) -> Any:
    return right(OpSchema(schema.op, schema.args_schema[:4], schema.kwargs_schema, schema.schema_info))


def _indices_from_the_front(shapes: Shapes, args: Any) -> list[list[Placement]]:
    indices = shapes[1:]
    if len(indices) != 2 or len(indices[0]) != 2 or len(indices[1]) != 1 or None in args[1]:
        return []
    return [[Shard(0), WHOLE, Shard(0), Shard(0)]]


def _colons_dropped(op: Any, args: Any, kwargs: Any) -> Any:
    return op(args[0], [index for index in args[1] if index is not None], *args[2:], **kwargs)


def _shorter_index(shapes: Shapes, args: Any) -> list[list[Placement]]:
    target, index = shapes
    dims = [dim for dim in range(len(target)) if dim != args[1] % len(target)]
    return [[Shard(dim)] * 3 for dim in dims if target[dim] != index[dim]]


def _shifted_dims(shapes: Shapes, args: Any) -> list[list[Placement]]:
    dims = range(len(args[1]) // 2)
    shifted = [dim for dim in dims if args[1][2 * dim] == -args[1][2 * dim + 1]]
    return [[Shard(len(shapes[0]) - 1 - dim)] * 2 for dim in shifted]


def _rolled_flat(shapes: Shapes, args: Any) -> list[list[Placement]]:
    return kept()(shapes, args) if len(args) < 3 or not args[2] else []


def _dim_not_normalized(right: Any, schema: Any) -> Any:
    with patch.object(_tensor_ops, "normalize_dim", lambda dim, ndim: dim):
        return right(schema)


def _full_shards(right: Any, shape: Any, mesh: DeviceMesh, placements: Any, *rest: Any, **options: Any) -> Any:
    local, offset = right(shape, mesh, placements, *rest, **options)
    sizes = list(local)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard) and placements.count(placement) == 1:
            sizes[placement.dim] = -(-shape[placement.dim] // mesh.size(axis))
    return tuple(sizes), offset


def _dtype_of_the_first_choice(op: Any, args: Any, kwargs: Any) -> Any:
    found = op(*args, **kwargs)
    return found if args[1].dtype.is_floating_point or not args[1].dim() else found.to(args[1].dtype)


def _mask_from_the_front(shapes: Shapes, args: Any) -> list[list[Placement]]:
    target, mask = shapes
    return [[Shard(dim)] * 3 for dim, size in enumerate(mask) if len(mask) < len(target) and _one_row_each(size)]


def _evenly_chunked(right: Any, tensor: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
    return list(tensor.tensor_split(num_chunks, dim))


def _padding_kept(right: Any, self: Any, local: torch.Tensor, mesh: DeviceMesh, axis: int, shard: Any) -> Any:
    found = right(self, local, mesh, axis, shard)
    if not isinstance(shard, Shard):
        return found
    length = -(-local.size(shard.dim) // mesh.size(axis))
    return pad_tensor(found, shard.dim, length - found.size(shard.dim))


def _pieces_of_one_length(right: Any, self: Any, local: torch.Tensor, mesh: DeviceMesh, axis: int, shape: Any) -> Any:
    """Puts the ranks' pieces in order as if all pieces had the length of the first."""
    found = right(self, local, mesh, axis, shape)
    shards, _ = self._split_tensor(found, mesh.size(axis), with_padding=False)
    length = -(-shards[0].size(self.dim) // self.split_factor)
    pieces = [shard.split(length, self.dim) for shard in shards]
    return torch.cat([piece[j] for j in range(self.split_factor) for piece in pieces if j < len(piece)], self.dim)


def _offset_of_the_last_axis(right: Any, size: int, num: int, rank: Any, placement: Any, previous: Any, *rest: Any) -> Any:  # fmt: skip
    return right(size, num, rank, placement, None, *rest)


def _scattered_by_the_first(right: Any, output: Any, parts: Any, mesh: DeviceMesh, mesh_dim: int = 0, *rest: Any, group_src: int = 0) -> Any:  # fmt: skip
    return right(output, parts, mesh, mesh_dim, *rest)


def _grad_placements_ignored(right: Any, *args: Any, grad_placements: Any = None, **options: Any) -> DTensor:
    found: DTensor = right(*args, **options)
    return found


def _share_of_a_gradient(right: Any, ctx: Any, gradient: Any) -> Any:
    if gradient is not None and ctx.grad_placements is None:
        ctx.grad_placements = tuple(
            each if each.is_partial() else wanted
            for each, wanted in zip(gradient.placements, ctx.forward_input_placements, strict=True)
        )
    return right(ctx, gradient)


def _gradient_in_forward_dtype(right: Any, *args: Any, forward_dtype: Any = None, backward_dtype: Any = None, **options: Any) -> DTensor:  # fmt: skip
    found: DTensor = right(*args, forward_dtype=forward_dtype, backward_dtype=backward_dtype or forward_dtype, **options)  # fmt: skip
    return found


def _first_plan() -> AbstractContextManager[Any]:
    """Redistributes even shards by the plan of uneven ones whose padded shards are as long."""
    right, plans = _redistribute._gen_transform_infos, dict[Any, Any]()

    def call(current: Any, target: Any, *rest: Any) -> Any:
        size = current.mesh.size()
        key = (current.mesh, current.placements, target.placements, tuple(-(-each // size) for each in current.shape))
        if any(each % size for each in current.shape):
            return plans.setdefault(key, right(current, target, *rest))
        return plans.get(key) or right(current, target, *rest)

    return patch.object(_redistribute, "_gen_transform_infos", call)


def _by_memory(right: Any, self: Any, local: torch.Tensor, *rest: Any) -> Any:
    if local.dim() == 2 and not local.is_contiguous() and local.t().is_contiguous():
        local = local.t().reshape(local.shape)
    return right(self, local, *rest)


def _divided_by_all(right: Any, *args: Any) -> Any:
    return [
        dataclasses.replace(each, avg_scale=each.mesh.size())
        if isinstance(each, _FlattenedTransformInfo) and each.avg_scale is not None
        else each
        for each in right(*args)
    ]


BLIND_VIEWS: dict[str, WrongOperator] = {
    # Views.
    "flattened_by_whole_rows": WrongOperator("a flattened dim counts whole rows, though another axis of the mesh divides them", "166483, 178735", replaced(_ViewShardingPropagator, "_rewrite_plain_shard", _by_whole_rows)),
    "one_row_expanded": WrongOperator("expand to more dims leaves a shard of one row in place, as the row fits each dim", "163320, 122485", rule([aten.expand.default], _same_dim_behind_new_ones)),
    "selected_row_is_a_copy": WrongOperator("select gives a copy, so that writing into it is lost", "139735, 147570", handled(aten.select.int, lambda op, args, kwargs: op(*args, **kwargs).clone())),
    # Slices, joined tensors.
    "steps_of_own_rows": WrongOperator("a slice with a step of a whole dim counts from each rank's first row", "149447, 157178", wrapped(aten.slice.Tensor, _steps_not_seen)),
    "slice_written_on_every_rank": WrongOperator("slice_scatter writes the whole source into each rank's share", "163193, 172350", rule([aten.slice_scatter.default], always(SUM, SUM, WHOLE))),
    "joined_dim_from_the_end": WrongOperator("cat does not see a dim that is counted from the end", "111750, 92677", wrapped(aten.cat.default, _dim_not_normalized)),
    "strided_dim_not_seen": WrongOperator("operators that work along a dim do not see that strided shards divide it", "167887, 178730", replaced(_tensor_ops, "is_tensor_dim_sharded", lambda right, spec, dim: any(isinstance(each, Shard) and each.dim == dim for each in spec.placements))),
    # Indices.
    "indices_from_the_front": WrongOperator("an index with fewer dims than another is divided as the other, dims counted from the front", "179136, 158538", rule([aten.index.Tensor], _indices_from_the_front)),
    "colon_before_an_index_dropped": WrongOperator("index_put_ drops colons before an index", "172894, 172350", handled(aten.index_put_.default, _colons_dropped)),
    "gathered_by_the_first_dim": WrongOperator("gather along a divided dim masks by the size of the first dim", "118513", replaced(_tensor_ops, "_MaskPartial", lambda right, **options: right(**{**options, "offset_dim": 0}))),
    "shorter_index_divided": WrongOperator("scatter of a number divides an index that is shorter than its target as the target", "186149", rule([aten.scatter.value], _shorter_index)),
    "embedding_gradient_averaged": WrongOperator("an embedding's gradients of ranks' ids are averaged", "118600, 133499", edited(aten.embedding_dense_backward.default, placed(slice(0, 1), AVG))),
    "copied_on_every_rank": WrongOperator("copy_ writes the whole source into each rank's share", "163193, 163374", rule([aten.copy_.default], always(SUM, SUM, WHOLE))),
    # Sorting, padding, rolling.
    "descending_ignored": WrongOperator("a stable sort ignores descending", "159189, 179062", handled(aten.sort.stable, lambda op, args, kwargs: op(*args, **{**kwargs, "descending": False}))),
    "shifted_by_own_parts": WrongOperator("a pad that moves a dim without a change of its size works on each rank's part", "175656", rule([aten.constant_pad_nd.default], _shifted_dims)),
    "rolled_flat_by_own_parts": WrongOperator("roll without dims rolls each rank's part", "175463", rule([aten.roll.default], _rolled_flat)),
    # Masks, choices, dtypes.
    "mask_from_the_front": WrongOperator("masked_fill counts dims of a mask with fewer dims from the front", "158538, 163374", rule([aten.masked_fill.Scalar], _mask_from_the_front)),
    "dtype_of_the_first_choice": WrongOperator("where has the dtype of its first choice", "28709, 70923", handled(aten.where.self, _dtype_of_the_first_choice)),
    "first_dtype_remembered": WrongOperator("the cache of rules for a change of dtype ignores the dtype", "112576, 165962", remembered(aten._to_copy.default, RuntimeSchemaInfo(100)), stays=True),
    # Factories.
    "full_shards_for_all": WrongOperator("a factory gives each rank as many rows as the first", "95863, 110762", replaced(_api, "compute_local_shape_and_global_offset", _full_shards)),
    "random_shares": WrongOperator("rand_like of a partial sum is a partial sum", "112576, 190795", rule([aten.rand_like.default], always(SUM, SUM))),
    "source_rank_ignored": WrongOperator("distribute_tensor scatters the first rank's tensor, whatever src_data_rank", "143883", replaced(placement_types, "mesh_scatter", _scattered_by_the_first)),
    # Uneven, empty and strided shards.
    "evenly_chunked": WrongOperator("uneven shards are as even as can be, but gathered as if full ones came first", "103306, 144109", replaced(Shard, "_custom_chunk", _evenly_chunked)),
    "padding_kept": WrongOperator("a partial sum that becomes uneven shards keeps its padding", "115525, 103306", replaced(Partial, "_reduce_shard_value", _padding_kept)),
    "pieces_of_one_length": WrongOperator("uneven strided shards are joined as if all their pieces were as long", "150490, 163843", replaced(_StridedShard, "_to_replicate_tensor", _pieces_of_one_length)),
    "offset_of_the_last_axis": WrongOperator("the offset of a dim that two axes divide counts from the part of the first axis", "161368, 132391", replaced(_utils, "_get_shard_size_and_offsets", _offset_of_the_last_axis)),
    # Redistribution.
    "plan_of_another_shape": WrongOperator("the cache of plans to redistribute mixes up shapes whose padded shards are alike", "115525, 131210", _first_plan, stays=True),
    "gathered_by_memory": WrongOperator("shards that are transposed in memory are gathered as they lie in memory", "74809, 174134", replaced(Shard, "_maybe_pad_tensor", _by_memory)),
    "divided_by_all_ranks": WrongOperator("a sum over one axis and an average over another are reduced at once and divided by all ranks", "172610, 174630", replaced(_redistribute, "_optimize_transform_infos", _divided_by_all)),
    # Gradients.
    "grad_placements_ignored": WrongOperator("from_local ignores grad_placements", "175867", replaced(DTensor, "from_local", _grad_placements_ignored)),
    "share_of_a_gradient": WrongOperator("from_local gives each rank its share of the gradient of a whole tensor", "173153, 118600", replaced(_api._FromTorchTensor, "backward", _share_of_a_gradient)),
    "gradient_in_forward_dtype": WrongOperator("the backward of redistribute adds gradients in forward_dtype", "182032, 179495", replaced(DTensor, "redistribute", _gradient_in_forward_dtype)),
}  # fmt: skip
