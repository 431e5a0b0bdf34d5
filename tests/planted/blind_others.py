# ruff: noqa: E501  (a row of a table is a line)
"""Operators of DTensors that are wrong in one way each: rules, caches, arguments, redistribution, gradients, losses.

They were written without a look at the cases, the judge or the table of operators, on the history of torch's defects.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    _api,
    _decompositions,
    _redistribute,
)
from torch.distributed.tensor._decompositions import PlacementTrackingMode
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, RuntimeSchemaInfo
from torch.distributed.tensor._ops import _math_ops
from torch.distributed.tensor._ops._math_ops import NormReduction, _NormPartial
from torch.distributed.tensor._redistribute import NestedRedistribute
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.parallel import loss

from tests.planted.operators import PROPAGATOR, WrongOperator, handled, replaced, rule
from tests.planted.rules import MAX, SUM, WHOLE, always

aten = torch.ops.aten


def _own_categories(shapes: Any, args: Any) -> list[list[Placement]]:
    return [[WHOLE, Shard(len(shapes[0]) - 1)]]


def _both_divided(shapes: Any, args: Any) -> list[list[Placement]]:
    """A column times a row: each rank multiplies its part of the column by its part of the row."""
    if len(shapes) != 2 or any(len(shape) != 2 for shape in shapes):
        return []
    (rows, first), (second, columns) = shapes
    return [[Shard(0), Shard(0), Shard(1)]] if first == second == 1 < min(rows, columns) else []


def _out_beside(op: Any, args: Any, kwargs: Any) -> Any:
    """Does not write into `out` if the operands lie differently."""
    first, second = args
    if isinstance(second, DTensor) and second.placements != first.placements:
        return aten.mul.Tensor(first, second)
    return op(*args, **kwargs)


def _joined_as_of_two(right: Any, reduction: Any) -> Placement:
    if isinstance(reduction, NormReduction) and reduction.norm_type not in (0, 1):
        return _NormPartial(2)
    found: Placement = right(reduction)
    return found


def _not_squeezed_from_the_end(right: Any, self: Any, schema: OpSchema) -> OpSchema | None:
    dim: Any = schema.args_schema[1] if len(schema.args_schema) > 1 else 0
    if schema.op is aten.squeeze.dim and dim < 0:
        return OpSchema(aten.squeeze.dims, (schema.args_schema[0], ()), {})
    found: OpSchema | None = right(self, schema)
    return found


def _shape_of_the_first(right: Any, self: Any, op: Any, specs: Any, metas: Any) -> Any:
    return right(self, op, specs, [metas[0]] * len(metas) if op is aten.split.Tensor else metas)


def _first_step_again(op: Any, args: Any, kwargs: Any) -> Any:
    """Corrects the averages of Adam as in the first step."""
    *lists, steps = args
    return op(*lists, [torch.ones_like(step) for step in steps], **kwargs)


class _WithoutArguments:
    """The propagator as a decomposition sees it: it does not know which arguments belong to the cache's key."""

    def __init__(self) -> None:
        self.op_to_schema_info: dict[Any, Any] = {}
        self.op_to_schema_info_for_single_dim_strategy: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(PROPAGATOR, name)


def _inner_arguments_forgotten(right: Any, self: Any, sharding_prop: Any, mesh: DeviceMesh) -> None:
    right(self, _WithoutArguments(), mesh)


@contextmanager
def _outer_arguments_forgotten() -> Iterator[None]:
    """The cache ignores the arguments of operators that torch decomposes."""
    infos = PROPAGATOR.op_to_schema_info
    known = (PROPAGATOR.op_strategy_funcs, PROPAGATOR.op_single_dim_strategy_funcs, PROPAGATOR.op_to_rules)
    with patch.dict(infos), patch.object(_decompositions, "_infer_schema_info_from_op", lambda op: RuntimeSchemaInfo()):
        for op in [op for op in infos if not any(op in each for each in known)]:
            del infos[op]
        yield


def _meshes_taken_for_equal() -> AbstractContextManager[Any]:
    """The caches compare the shapes of meshes alone."""
    right: Any = DTensorSpec._hash_key

    def key(spec: DTensorSpec) -> Any:
        return (tuple(spec.mesh.shape), *right(spec)[1:])

    def equal(spec: DTensorSpec, other: object, **rest: Any) -> bool:
        return isinstance(other, DTensorSpec) and bool(key(spec) == key(other))

    return patch.multiple(DTensorSpec, _hash_key=key, _check_equals=equal)


def _second_dim_for_the_last(right: Any, self: Any, *args: Any, placements: Any = None, **options: Any) -> DTensor:
    """Counts a negative dim as if the tensor were a matrix."""
    if len(args) > 1:
        args, placements = args[:1], args[1]
    if placements is not None and self.ndim > 2:
        placements = [
            Shard(each.dim + 2) if isinstance(each, Shard) and each.dim in (-1, -2) else each for each in placements
        ]
    found: DTensor = right(self, *args, placements=placements, **options)
    return found


def _along_the_first_axis(right: Any, tensor: Any, mesh: DeviceMesh, mesh_dim: int = 0, **options: Any) -> Any:
    return right(tensor, mesh, mesh_dim=0, **options)


def _conjugation_lost(right: Any, self: Any, local: torch.Tensor, *rest: Any) -> Any:
    return right(self, local.conj() if local.is_conj() else local, *rest)


def _chunk_without_copy(right: Any, self: Any, local: torch.Tensor, mesh: DeviceMesh, axis: int, index: Any) -> Any:
    return self._select_split_tensor(local, mesh.size(axis), index, with_padding=False, clone=False)


def _empty_shard_padded(right: Any, dim: int, local: torch.Tensor, padding: list[int], rank: int, *rest: Any) -> Any:
    return local if padding[rank] == local.size(dim) else right(dim, local, padding, rank, *rest)


def _parts_of_the_first(right: Any, current: Any, target: Any, *rest: Any) -> Any:
    """Takes each part of an outer axis for as long as the first, when the inner axis of the same dim is joined."""
    found = []
    for info in right(current, target, *rest):
        shard, axis = info.src_dst_placements[0], info.mesh_dim
        outer = [each for each in range(axis) if isinstance(shard, Shard) and current.placements[each] == shard]
        shape = list(info.logical_shape)
        if outer:
            shape[shard.dim] = current.shape[shard.dim]
        for each in outer:
            shape[shard.dim] = -(-shape[shard.dim] // current.mesh.size(each))
        found.append(dataclasses.replace(info, logical_shape=shape))
    return found


BLIND_OTHERS: dict[str, WrongOperator] = {
    # Operators: random, pointwise, out=, reductions.
    "drawn_from_own_categories": WrongOperator("multinomial draws from each rank's categories", "177415, 180503", rule([aten.multinomial.default], _own_categories)),
    "small_base_to_the_largest": WrongOperator("a base below one to the power of a partial maximum is a partial maximum", "173001, 172601", rule([aten.pow.Scalar], always(MAX, MAX))),
    "column_times_own_part_of_a_row": WrongOperator("one axis divides both operands of a column times a row", "PiPPy 496, PiPPy 447", rule([aten.mul.Tensor], _both_divided)),
    "out_not_written": WrongOperator("mul does not write into out= if its operands lie differently", "174875, 175960", handled(aten.mul.out, _out_beside)),
    "norms_of_order_three_joined_as_of_two": WrongOperator("norms of shards are joined as norms of order two, whatever their order", "149768, torchtitan 649", replaced(_math_ops, "get_placement_from_reduction_op", _joined_as_of_two)),
    "pixels_of_own_places": WrongOperator("grid_sample is linear in the places", "176991", rule([aten.grid_sampler_2d.default], always(SUM, WHOLE, SUM))),
    # Views, lists.
    "not_squeezed_from_the_end": WrongOperator("squeeze of a dim that is counted from the end leaves it in the ranks' tensors", "173563, 174136", replaced(ShardingPropagator, "_adjust_squeeze_to_global_singletons", _not_squeezed_from_the_end)),
    "shape_of_the_first_piece": WrongOperator("a shorter last piece of split has the shape of the first piece", "93306", replaced(ShardingPropagator, "_create_output_spec_with_new_tensor_meta", _shape_of_the_first)),
    "first_step_again": WrongOperator("fused AdamW corrects its averages as in the first step", "126750, 106916", handled(aten._fused_adamw_.default, _first_step_again)),
    # Caches, norms that wait for their reduction.
    "inner_dims_remembered": WrongOperator("within a decomposition the cache of rules ignores arguments that are no tensors", "174616", replaced(PlacementTrackingMode, "__init__", _inner_arguments_forgotten), stays=True),
    "first_reduction_of_a_loss_remembered": WrongOperator("the cache of rules ignores the arguments of operators that are decomposed", "174422", _outer_arguments_forgotten, stays=True),
    "mesh_of_the_first_remembered": WrongOperator("specs on several meshes of one shape are equal for the cache of rules", "118587, 123572", _meshes_taken_for_equal, stays=True),
    "whole_norm_on_every_rank": WrongOperator("a whole norm beside norms of shards counts on every rank", "170367, 147910", replaced(_NormPartial, "_partition_value", lambda right, self, tensor, *rest: tensor)),
    # Redistribution, from_local, distribute_tensor.
    "second_dim_for_the_last": WrongOperator("redistribute counts a negative dim as a matrix has it", "113924, 111750", replaced(DTensor, "redistribute", _second_dim_for_the_last)),
    "checked_along_the_first_axis": WrongOperator("from_local with run_check broadcasts along the first axis of a mesh, whichever holds copies", "PiPPy 325, 144109", replaced(_api, "mesh_broadcast", _along_the_first_axis)),
    "conjugation_lost": WrongOperator("a conjugate that is not yet computed is gathered as the number itself", "45760", replaced(Shard, "_maybe_pad_tensor", _conjugation_lost)),
    "chunk_shares_memory": WrongOperator("a whole tensor that becomes shards shares its memory with them", "164729, 163374", replaced(Shard, "_replicate_to_shard", _chunk_without_copy)),
    "empty_shard_is_padded": WrongOperator("distribute_tensor gives a rank without rows the padding", "103306, 148894", replaced(Shard, "_maybe_unpad_tensor_with_sizes", _empty_shard_padded)),
    "parts_as_long_as_the_first": WrongOperator("uneven parts of an outer axis are joined as if each were as long as the first", "115525, 115310", replaced(_redistribute, "_gen_transform_infos", _parts_of_the_first)),
    # Gradients.
    "gradient_of_the_exact_gelu": WrongOperator("gelu's gradient ignores approximate", "61439", handled(aten.gelu_backward.default, lambda op, args, kwargs: op(*args))),
    "second_gradients_stop": WrongOperator("gradients of gradients stop at redistribute", "160509, 160313", replaced(NestedRedistribute, "backward", lambda right, ctx, gradient: (None,) * 6)),
    # Losses.
    "loss_of_own_rows_for_all": WrongOperator("on a mesh of two axes loss_parallel takes the sum over each rank's rows for the whole", "180936", replaced(loss, "Partial", lambda right: Replicate())),
}  # fmt: skip
"""Name -> wrong operator."""
