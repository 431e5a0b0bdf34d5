"""Lists operators on integers and bools. Other listed operators copy, work in place, or make a tensor like another."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from typing import Any, cast

import torch
from torch.nn import functional

from equivtest.cases.case import Shape
from equivtest.families.operators.case_arguments import (
    expands,
    pads,
    picked_columns,
    picked_places,
    picked_places_apart,
    same_mask,
    scaled_beside,
    selected_beside,
    sliced_beside,
    slices,
    smaller_beside,
    squeezes,
    swaps,
    uneven_splits,
    unsqueezes,
)
from equivtest.families.operators.case_forms import (
    Argument,
    Form,
    Signature,
    Signatures,
    each,
    either,
    moved,
    numbers,
    pairs,
    reduced,
    triples,
    with_arguments,
)
from equivtest.families.operators.case_operator import (
    BOOLS,
    DISTINCT,
    FLOATS,
    POSITIVE,
    WHOLE,
    Operator,
    chooses,
    in_place,
    module_of_dtensor,
    rounded,
)


def _ascending(limits: torch.Tensor) -> torch.Tensor:
    """Returns the elements in order, sharded as they were. A sort of a sharded dim replicates it."""
    placed: Any = limits
    found: Any = limits.sort().values
    if module_of_dtensor(placed) is None or any(each.is_partial() for each in placed.placements):
        return cast("torch.Tensor", found)
    moved: torch.Tensor = found.redistribute(placements=placed.placements)
    return moved


def _windows(size: Argument, padding: Argument = 1) -> Form:
    """Returns a form for averages of windows: apart, and overlapping with padding that does not count."""
    return either(each(kernel_size=size), each(kernel_size=size, stride=1, padding=padding, count_include_pad=False))


_OF_BOOLS = ("bitwise_and", "bitwise_or", "bitwise_xor")
_OF_WHOLE_NUMBERS = ("gcd", "lcm", "bitwise_left_shift", "bitwise_right_shift")

ROWS = (
    *(chooses(name, getattr(torch, name), pairs(), kinds=(BOOLS, BOOLS)) for name in _OF_BOOLS),
    *(chooses(name, getattr(torch, name), pairs(), kinds=(WHOLE, WHOLE)) for name in _OF_WHOLE_NUMBERS),
    chooses("bitwise_not", torch.bitwise_not, kinds=(BOOLS,)),
    chooses(
        "bucketize",
        lambda x, limits, **how: torch.bucketize(x, _ascending(limits), **how),
        lambda shape: (
            Signature((shape, (3,))),
            *(Signature((shape, (3,)), ((name, True),)) for name in ("right", "out_int32")),
        ),
    ),
    # Copies of views, and copies into which a view is written.
    chooses("slice", torch.ops.aten.slice.Tensor, moved(slices)),
    chooses("constant_pad_nd", torch.constant_pad_nd, moved(pads), num_dims=(1, 2, 3)),
    chooses("expand_copy", lambda x, sizes: torch.expand_copy(x, sizes), moved(expands)),
    chooses(
        "diagonal_copy",
        torch.diagonal_copy,
        either(each(), each(offset=1), each(offset=-1, dim1=-1, dim2=0)),
        num_dims=(2, 3),
    ),
    chooses(
        "split_with_sizes",
        lambda x, sizes, dim: torch.split_with_sizes(x, list(sizes), dim),
        moved(uneven_splits),
    ),
    chooses(
        "split_with_sizes_copy",
        lambda x, sizes, dim: torch.split_with_sizes_copy(x, list(sizes), dim),
        moved(uneven_splits),
    ),
    chooses("select_scatter", torch.select_scatter, selected_beside),
    chooses("slice_scatter", torch.slice_scatter, sliced_beside),
    chooses("diag", torch.diag, either(each(), each(diagonal=1)), num_dims=(1, 2)),
    chooses("nanmedian", torch.nanmedian, reduced(several=False), domain=DISTINCT),
    chooses("nn.functional.avg_pool1d", functional.avg_pool1d, _windows(2), num_dims=(3,)),
    chooses("nn.functional.avg_pool2d", functional.avg_pool2d, _windows((2, 1), (1, 0)), num_dims=(3,)),
    # In place, on a copy of the first operand.
    Operator("add in place", in_place("add_"), either(smaller_beside, numbers("other", 1.0), scaled_beside)),
    Operator("sub in place", in_place("sub_"), either(smaller_beside, numbers("other", 1.0), scaled_beside)),
    rounded("mul in place", in_place("mul_"), either(smaller_beside, numbers("other", 2.0))),
    rounded("div in place", in_place("div_"), either(smaller_beside, numbers("other", 3.0)), domain=POSITIVE),
    chooses("fill in place", in_place("fill_"), each(value=2.0)),
    chooses("zero in place", in_place("zero_")),
    chooses("copy in place", in_place("copy_"), smaller_beside),
    chooses("masked_fill in place", in_place("masked_fill_"), same_mask, kinds=(FLOATS, BOOLS)),
    chooses("clamp in place", in_place("clamp_"), each(min=-1.0)),
    chooses("relu in place", in_place("relu_")),
    chooses("neg in place", in_place("neg_")),
    rounded("exp in place", in_place("exp_")),
    chooses("transpose in place", in_place("transpose_"), moved(swaps)),
    chooses("squeeze in place", in_place("squeeze_"), moved(squeezes)),
    chooses("unsqueeze in place", in_place("unsqueeze_"), moved(unsqueezes)),
    # Tensors made like another tensor.
    chooses("full_like", torch.full_like, numbers("fill_value", 2.0, -3.0)),
    chooses("new_zeros", lambda x: x.new_zeros(x.shape)),
    chooses("new_full", lambda x, value: x.new_full(x.shape, value), numbers("value", 2.0, -3.0)),
    chooses("new_ones", lambda x: x.new_ones(x.shape)),
    chooses("new_ones of other sizes", lambda x: x.new_ones((*x.shape[1:], *x.shape[:1], 2))),
    chooses("full_like in float64", lambda x: torch.full_like(x, 2.5, dtype=torch.float64)),
    chooses("zeros_like in float64", lambda x: torch.zeros_like(x, dtype=torch.float64)),
    chooses("ones_like in float64", lambda x: torch.ones_like(x, dtype=torch.float64)),
    chooses("new_ones in float64", lambda x: x.new_ones(x.shape, dtype=torch.float64)),
    chooses("new_zeros in float64", lambda x: x.new_zeros(x.shape, dtype=torch.float64)),
    # To another dtype.
    chooses("double", lambda x: x.double()),
    chooses("to bfloat16 and back", lambda x: x.to(torch.bfloat16).to(x.dtype)),
)


def _with_columns(x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Returns a copy of x in which some columns are 2, so that the order of `columns` does not matter."""
    written = x.clone()
    written[:, columns] = 2.0
    return written


def _made(x: torch.Tensor, factory: str) -> torch.Tensor:
    """Returns a tensor like x that a factory of torch makes; for a DTensor it is a factory of DTensors.

    An empty tensor is filled with zeros.

    The factories are documented for Shard and Replicate alone.
    Source: `full`, `ones` and `zeros` in torch/distributed/tensor/_api.py (2.13.0).
    """
    fill: tuple[float, ...] = {"full": (2.0,)}.get(factory, ())
    if (of_dtensors := module_of_dtensor(x)) is None:
        plain: torch.Tensor = getattr(torch, factory)(x.shape, *fill, dtype=x.dtype, device=x.device)
        return plain.zero_() if factory == "empty" else plain
    whole = of_dtensors.Replicate()
    placed: Any = x
    placements = [whole if each.is_partial() else each for each in placed.placements]
    made: torch.Tensor = getattr(of_dtensors, factory)(
        x.shape, *fill, dtype=x.dtype, device_mesh=placed.device_mesh, placements=placements
    )
    return made.zero_() if factory == "empty" else made


def _beside_plain(x: torch.Tensor, name: str) -> torch.Tensor:
    """Returns the result of an operator on x and a plain tensor, which counts as replicated."""
    plain = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype, device=x.device) * 12  # three ranks divide it exactly
    of_dtensors: Any = module_of_dtensor(x)
    mixes = import_module(f"{of_dtensors.__name__}.experimental").implicit_replication if of_dtensors else nullcontext
    with mixes():
        found: torch.Tensor = getattr(torch, name)(x, plain)
    return found


def _distributed(x: torch.Tensor, how: str) -> torch.Tensor:
    """Returns twelve times x, as `distribute_tensor` divides it. Two, three and four ranks add up equal shares exactly.

    `how` is the reduction of a partial result. If it is 'own', each rank takes its rows of the
    whole tensor that it has, and no rank sends any.
    """
    if (of_dtensors := module_of_dtensor(x)) is None:
        return x.detach() * 12
    placed: Any = x
    whole, mesh = placed.detach().full_tensor() * 12, placed.device_mesh
    placement, source = (of_dtensors.Shard(0), None) if how == "own" else (of_dtensors.Partial(how), 0)
    divided: torch.Tensor = of_dtensors.distribute_tensor(whole, mesh, [placement] * mesh.ndim, src_data_rank=source)
    return divided


def _shifted_layer_norm(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:], None, bias, eps=0.5)


def _beside_last_dim(shape: Shape) -> Signatures:
    return (Signature((shape, shape[-1:])),)


NOT_DRAWN = (
    chooses(
        "__getitem__ of two",
        lambda x, rows, columns: x[rows, columns],
        picked_places,
        num_dims=(2, 3),
    ),
    chooses(
        "__getitem__ of two apart",
        lambda x, rows, last: x[None][:, rows, :, last],  # behind a dim, or the result is as of adjacent indices
        picked_places_apart,
        num_dims=(3,),
    ),
    chooses("__setitem__ of columns", _with_columns, picked_columns, num_dims=(2, 3)),
    chooses("where of whole numbers", torch.where, triples(), kinds=(BOOLS, WHOLE)),
    chooses(
        "div of whole numbers to whole numbers",
        lambda x, other, rounding_mode: torch.div(x.neg(), other.abs() + 1, rounding_mode=rounding_mode),
        either(*(pairs(rounding_mode=mode) for mode in ("floor", "trunc"))),
        kinds=(WHOLE, WHOLE),
    ),
    chooses("factory of DTensors", _made, either(*(each(factory=name) for name in ("full", "ones", "zeros", "empty")))),
    Operator("implicit_replication", _beside_plain, either(*(each(name=name) for name in ("add", "mul", "sub")))),
    chooses("distribute_tensor", _distributed, either(*(each(how=how) for how in ("sum", "avg", "max", "min", "own")))),
    chooses(
        "div in place to whole numbers",
        in_place("div_"),
        lambda shape: tuple(
            with_arguments(smaller_beside, rounding_mode=mode)(shape)[0] for mode in ("floor", "trunc")
        ),
        adds_cotangents=False,
    ),
    rounded("layer_norm without a weight", _shifted_layer_norm, _beside_last_dim, num_dims=(2, 3)),
)
