# ruff: noqa: E501  (a row of a table is a line)
"""Operators of DTensors that are wrong in one way each: from and to local tensors, random ones, layers, indices, caches.

They were written without a look at the cases, the judge or the table of operators, on the history of torch's defects.
"""

from __future__ import annotations

import types
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, _api, _nonlinear_redux
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSpec, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops._mask_buffer import MaskBuffer
from torch.distributed.tensor.experimental import _func_map, _register_sharding

from tests.planted.operators import WrongOperator, handled, remembered, replaced, rule, wrapped
from tests.planted.rules import AVG, MAX, SUM, WHOLE, always

aten = torch.ops.aten
Shapes = list[tuple[int, ...]]


def _first_mask(right: Any, self: Any, mask: torch.Tensor) -> None:
    """Keeps the mask of the first lookup for all later lookups of the same shape."""
    held = self.__dict__.setdefault("held", mask)
    right(self, held if held.shape == mask.shape else mask)


def _not_orthonormal(op: Any, args: Any, kwargs: Any) -> Any:
    x, dims, norm, *rest = args
    return op(x, dims, 0 if norm == 1 else norm, *rest, **kwargs)


def _without(name: str) -> Any:
    """Calls an operator without one of its keyword arguments."""
    return lambda op, args, kwargs: op(*args, **{key: value for key, value in kwargs.items() if key != name})


def _padding_counts(right: Any, local: torch.Tensor, mesh: Any = None, placements: Any = None, *, shape: Any = None, stride: Any = None, **options: Any) -> DTensor:  # fmt: skip
    """Pads the parts of a tensor of a given shape to the longest part, and takes the padding for rows."""
    shards = [each for each in placements or () if isinstance(each, Shard)]
    dim = shards[0].dim if shards else 0
    if shape and len(shards) == mesh.ndim == 1 and shape[dim] % mesh.size():
        short = -(-shape[dim] // mesh.size()) - local.size(dim)
        padding = [0, 0] * (local.ndim - 1 - dim) + [0, short]
        shape, stride, local = None, None, nn.functional.pad(local, padding)
    found: DTensor = right(local, mesh, placements, shape=shape, stride=stride, **options)
    return found


def _by_the_last_axis(right: Any, local: torch.Tensor, mesh: DeviceMesh, placements: Any) -> Any:
    """Multiplies a dim that several axes divide by the length of the last of them alone."""
    last = [
        WHOLE if isinstance(each, Shard) and each in placements[axis + 1 :] else each
        for axis, each in enumerate(placements)
    ]
    return right(local, mesh, last)


def _gradients_placed_as_inputs(right: Any, func: Any, outs: Any, ins: Any, grads: Any, *rest: Any, **options: Any) -> Any:  # fmt: skip
    return right(func, outs, ins, None, *rest, **options)


def _results_placed_as_the_first(right: Any, func: Any, outs: Any, *rest: Any, **options: Any) -> Any:
    several = isinstance(outs, tuple) and outs and all(isinstance(each, list | tuple) for each in outs)
    return right(func, (outs[0],) * len(outs) if several else outs, *rest, **options)


def _parameters_learn() -> AbstractContextManager[Any]:
    """Makes parameters of tensors without a look at whether they are frozen."""
    known = types.SimpleNamespace(Module=nn.Module, Parameter=lambda data, requires_grad=True: nn.Parameter(data))
    return patch.object(_api, "nn", known)


def _last_row_of_own(right: Any, schema: Any) -> OpStrategy:
    """Takes each rank's last row for the last row of all."""
    x, dim, index = schema.args_schema[:3]
    spec = x.strategies[0].output_spec
    found: OpStrategy = right(schema)
    if index >= 0 or spec.placements != (Shard(dim % spec.ndim),):
        return found
    return OpStrategy([OpSpec(DTensorSpec(spec.mesh, (WHOLE,)), (spec,), found.strategies[0].redistribute_cost)])


def _dim_from_the_end_overlooked(right: Any, name: str, local: torch.Tensor, placements: Any, dim: int | None) -> Any:
    return [] if dim is not None and dim < 0 else right(name, local, placements, dim)


def _plain_is_a_share(right: Any, self: Any, op: Any, tensor: torch.Tensor, mesh: DeviceMesh) -> DTensorSpec:
    spec: DTensorSpec = right(self, op, tensor, mesh)
    if tensor.numel() > 1:
        spec = DTensorSpec(mesh, (SUM,) * mesh.ndim, tensor_meta=spec.tensor_meta)
    return spec


def _other_dims_overlooked(shapes: Shapes, args: Any) -> list[list[Placement]]:
    """Takes each rank's answer for the whole, unless its shards are of the first dim that is named."""
    dims = [dim % len(shapes[0]) for dim in args[1] or ()]
    return [[WHOLE, Shard(dim)] for dim in dims[1:]]


def _weights_ignored(op: Any, args: Any, kwargs: Any) -> Any:
    return op(*args[:2], None, *args[3:], **kwargs)


BLIND_FOURTH: dict[str, WrongOperator] = {
    # From and to local tensors, modules.
    "padding_counts_as_rows": WrongOperator("from_local takes the padding of uneven parts for rows, in spite of the shape that it is given", "110762, 110781", replaced(DTensor, "from_local", _padding_counts)),
    "length_by_the_last_axis": WrongOperator("from_local multiplies a dim that two axes divide by the length of the last axis alone", "172927", replaced(_api, "compute_global_tensor_info", _by_the_last_axis)),
    "gradients_placed_as_inputs": WrongOperator("local_map ignores in_grad_placements", "155181, torchtitan 2532", replaced(_func_map, "_local_map_wrapped", _gradients_placed_as_inputs)),
    "results_placed_as_the_first": WrongOperator("local_map places all results as the first", "123676, 186030", replaced(_func_map, "_local_map_wrapped", _results_placed_as_the_first)),
    "frozen_parameters_learn": WrongOperator("distribute_module makes frozen parameters learn", "171709, 171523", _parameters_learn),
    "plain_tensor_is_a_share": WrongOperator("implicit_replication takes plain tensors for shares of a sum", "115297, 134551", replaced(OpDispatcher, "_try_replicate_spec_for_scalar_tensor", _plain_is_a_share)),
    "local_part_is_a_copy": WrongOperator("to_local gives a copy, so that writing into it is lost", "139735, 147570", replaced(DTensor, "to_local", lambda right, self, **options: right(self, **options).clone())),
    # Caches.
    "mask_of_the_first_lookup": WrongOperator("later lookups in an embedding have the mask of the first", "131264, 130725", replaced(MaskBuffer, "materialize_mask", _first_mask), stays=True),
    "first_flipped_dims_remembered": WrongOperator("the cache of rules for flip ignores the dims", "134050, 175463", remembered(aten.flip.default, RuntimeSchemaInfo(100)), stays=True),
    "own_rule_remembered": WrongOperator("the cache of a rule that a user registers ignores ints", "131108, 171248", replaced(_register_sharding, "RuntimeSchemaInfo", lambda right, *args, **options: right(100, needs_pytree=True)), stays=True),
    # Views, indices, sorting.
    "last_row_of_own": WrongOperator("a select of the last row gives each rank's last row", "149447, 157178", wrapped(aten.select.int, _last_row_of_own)),
    "target_included_in_spite": WrongOperator("index_reduce ignores include_self", "170934, 172894", handled(aten.index_reduce.default, _without("include_self"))),
    "places_of_the_first_axis": WrongOperator("argmax along a dim that two axes divide compares ranks of the first axis alone", "168983, 166598", replaced(_nonlinear_redux, "_collect_shard_mesh_dims", lambda right, *args: right(*args)[:1])),
    "place_from_the_end_in_own_columns": WrongOperator("argmax along a dim that is counted from the end works on each rank's part", "168983, 111750", replaced(_nonlinear_redux, "_collect_shard_mesh_dims", _dim_from_the_end_overlooked)),
    "diagonal_of_own_rows_written": WrongOperator("diagonal_scatter writes the diagonal of each rank's rows", "172350, 186149", rule([aten.diagonal_scatter.default], always(Shard(0), Shard(0), Shard(0)))),
    # Comparisons, logic, numbers.
    "largest_less_than_a_number": WrongOperator("a partial maximum compared as less than a number is a partial maximum", "172601, 155420", rule([aten.lt.Scalar], always(MAX, MAX))),
    "both_on_one_rank": WrongOperator("logical_and of two answers of any is computed on each rank's own answers", "165923, 155420", rule([aten.logical_and.default], always(SUM, SUM, SUM))),
    "other_dims_of_any_overlooked": WrongOperator("any over several dims reduces over the first alone between ranks", "170934, 166598", rule([aten.any.dims], _other_dims_overlooked)),
    "factor_of_a_quotient_ignored": WrongOperator("addcdiv in place ignores value", "163193", handled(aten.addcdiv_.default, _without("value"))),
    "factor_ignored_beside_out": WrongOperator("add ignores alpha if it has out=", "163193, 175960", handled(aten.add.out, _without("alpha"))),
    "dtype_of_a_running_sum_ignored": WrongOperator("cumsum ignores dtype", "163374, 112576", handled(aten.cumsum.default, _without("dtype"))),
    "logarithms_of_shares": WrongOperator("xlogy is linear in its second operand instead of the first", "165962, 163374", rule([aten.xlogy.Tensor], always(SUM, WHOLE, SUM))),
    # Random.
    "drawn_by_shares": WrongOperator("bernoulli draws by each rank's share of the probabilities", "177415, 180503", rule([aten.bernoulli.default], always(SUM, SUM))),
    "lower_bound_ignored": WrongOperator("randint_like ignores its lower bound", "112576, 190795", handled(aten.randint_like.low_dtype, lambda op, args, kwargs: op(args[0], 0, *args[2:], **kwargs))),
    # Layers, transforms, linear algebra, losses.
    "pools_of_own_lines_averaged": WrongOperator("adaptive_avg_pool2d pools each rank's lines and averages the results", "162692, 179202", rule([aten._adaptive_avg_pool2d.default], lambda s, a: [[AVG, Shard(len(s[0]) - 2)]])),
    "shares_of_pooled_gradients": WrongOperator("max_pool2d's gradient takes each rank's share of a gradient for the whole", "118600, 179202", rule([aten.max_pool2d_with_indices_backward.default], always(WHOLE, SUM, WHOLE, WHOLE))),
    "not_orthonormal": WrongOperator("fft takes norm='ortho' for no norm", "175463, 188369", handled(aten._fft_c2c.default, _not_orthonormal)),
    "classes_of_pixels_weigh_the_same": WrongOperator("cross_entropy of images ignores the weights of classes", "185167, 119877", handled(aten.nll_loss2d_forward.default, _weights_ignored)),
}  # fmt: skip
"""Name -> wrong operator."""
