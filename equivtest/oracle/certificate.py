"""Proves, operation by operation, that a parallel module rounds nothing on the data that the module received.

The unsharded module runs forward and backward once more on magnitudes: on |x|, |parameters| and |cotangent|, in
float64, where every difference becomes a sum. By induction, an operation's result on magnitudes bounds its result on
the data, and on any part of the data. So it also bounds partial sums, in any order and of any ranks. A program may also
apply a linear operation to parts of the data and then add the results. The operation's result on magnitudes bounds
these results too. If all magnitudes are integers times one unit, and at most 2**p units, then a dtype with p
significand bits can represent every such result, so no program rounds such a result. `equivtest.oracle.exact` explains
why. Data that reach an operation outside the lists of this module are refused, because nothing is known about that
operation.

Source: torch.utils._python_dispatch.TorchDispatchMode (2.13.0), which sees forward and backward below autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from equivtest.oracle.exact import MAX_BITS, InexactData, bits_of, find_integers, significand_bits
from equivtest.oracle.lists import PREFIX as LISTS
from equivtest.oracle.lists import each_apart
from equivtest.oracle.modes import Mode
from equivtest.oracle.places import Places

MOVES = frozenset(
    {
        "_reshape_alias", "_to_copy", "_unsafe_view", "abs", "alias", "amax", "arange", "as_strided", "cat",
        "clone", "constant_pad_nd", "contiguous", "copy_", "detach", "embedding", "empty", "empty_like",
        "empty_strided", "expand", "eye", "flip", "full", "full_like", "gather", "index",
        "index_select", "lift_fresh", "max", "maximum", "narrow", "new_empty", "new_empty_strided", "new_zeros", "ones",
        "ones_like", "permute", "pixel_shuffle", "pixel_unshuffle", "relu", "repeat", "roll", "select",
        "masked_fill", "slice", "split", "split_with_sizes", "squeeze", "squeeze_", "stack", "t", "threshold_backward",
        "transpose", "tril", "triu", "unbind", "unsafe_split", "unsqueeze", "upsample_nearest1d", "upsample_nearest2d",
        "upsample_nearest3d", "view", "where", "zero_", "zeros", "zeros_like",
    }
)  # fmt: skip
"""Operations that only move or choose values; on magnitudes, the result is at least as large."""

SUMS = frozenset(
    {
        "add", "add_", "cumsum", "embedding_dense_backward", "index_add", "index_put", "index_put_", "scatter_add",
        "select_backward", "slice_backward", "sum", "upsample_nearest1d_backward", "upsample_nearest2d_backward",
        "upsample_nearest3d_backward",
    }
)  # fmt: skip
"""Operations that add elements."""

ADDED_TO = {"addmm": 0, "baddbmm": 0, "addmv": 0, "convolution": 2}
"""Operations that add products of elements of two tensors to a third -> position of the third among the tensors."""

PRODUCTS = frozenset({"mm", "bmm", "mv", "dot", "mul", "convolution_backward", *ADDED_TO})
"""Operations that add products of elements of two tensors."""

ON_MAGNITUDES: dict[str, Callable[..., Any]] = {
    "sub": torch.add,
    "rsub": torch.add,
    "neg": torch.clone,
}

CHOOSES = frozenset({"amax", "constant_pad_nd", "masked_fill", "max", "maximum", "relu", "where"})
"""Members of MOVES that may choose a negative constant of the module, although all other operands are magnitudes."""

FILLS = frozenset({"constant_pad_nd", "full", "full_like", "masked_fill", "where"})
"""Members of MOVES that put the module's own numbers into a result; the dtype may not represent these numbers."""

CONVERTS = frozenset({"_to_copy", "to"})


class Certificate(Mode):
    """Proves that a module is exact in `dtype`, while the module runs in this context on magnitudes in float64.

    Attributes:
        bits_used: Largest number of bits that the magnitudes of any sum took.

    Raises:
        InexactData: a sum may need more bits than the dtype has, or an operation may round.
    """

    def __init__(self, dtype: torch.dtype, places: Places | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype
        self.places = places or Places()
        self.bits_used = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.places.note()
        try:
            return self._proved(func, args, kwargs or {})
        except InexactData:
            self.places.refuse()
            raise

    def _proved(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the operation's result on magnitudes, and proves that none of the operation's sums is rounded.

        Whole numbers, such as ids, keep the values that they have in the data.

        Raises:
            InexactData: the operation may round, or draws at random.
        """
        name = func.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise InexactData(f"{name} draws at random, so two runs differ")
        if not any(map(is_floating, tree_leaves((args, kwargs)))) and not _rounds(func, args, kwargs):
            return func(*args, **kwargs)
        if name.startswith(LISTS):
            with self:
                return each_apart(func, args, kwargs)
        if name in CONVERTS:
            return self._converted(func, args, kwargs)
        if name not in MOVES | SUMS | PRODUCTS | ON_MAGNITUDES.keys():
            raise InexactData(f"{name} may round: only sums, products and moves of exact values are exact")
        if name == "embedding_dense_backward" and args[4]:
            raise InexactData(f"{name} by frequency divides each row by its count, which may round")
        if name in MOVES - CHOOSES:
            return func(*args, **kwargs)
        args = magnitudes_of(name, args)
        kwargs = {key: abs(value) if key in ("alpha", "beta") else value for key, value in kwargs.items()}
        result = ON_MAGNITUDES.get(name, func)(*args, **kwargs)
        if name not in MOVES or name in FILLS:
            numbers = [each for each in (*args, *kwargs.values()) if isinstance(each, float)]
            unit = unit_of(name, [each for each in args if is_floating(each)], numbers)
            for each in result if isinstance(result, tuple) else (result,):
                if each is not None:
                    self._count(name, each, unit)
        return result

    def _converted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if not is_floating(result):
            raise InexactData("a conversion to integers may round, and is never exact")
        if is_floating(args[0]) and result.dtype.itemsize < args[0].dtype.itemsize:
            self._count("a conversion", result, _own_unit(args[0]))
        return result

    def _count(self, name: str, result: torch.Tensor, unit: int) -> None:
        """Requires that two dtypes can represent every magnitude in units of 2**unit: the module's and the result's."""
        largest = float(result.max()) if result.numel() else 0.0
        if not math.isfinite(largest):
            raise InexactData(f"{name} adds infinite or NaN values")
        units = math.ceil(Fraction(largest) * 2**-unit)  # an int64 may be too small for a product of small units
        self.bits_used = max(self.bits_used, bits_of(units))
        dtype = min(self.dtype, result.dtype, key=significand_bits)
        bits = significand_bits(dtype)
        if units > 2**bits or (
            units == 2**bits and result.dtype != torch.float64
        ):  # a larger sum may have been rounded to it
            raise InexactData(
                f"{name} may reach {units} units, but {str(dtype).removeprefix('torch.')} is exact only up to {2**bits}"
            )


def _rounds(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return func.overloadpacket.__name__ in ("div", "true_divide", "mean", "pow", "exp", "sqrt", "reciprocal", "log")


def magnitudes_of(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns an operation's arguments with absolute values in place of the values that it multiplies or adds.

    An argument to which the operation writes is changed in place. The result of an earlier operation has no negative
    elements, but a constant of the module may have negative elements.
    """
    if name.endswith("_"):
        args[0].abs_()
    factors = [_magnitude(each) if _is_factor(name, place, each) else each for place, each in enumerate(args)]
    return (args[0], *factors[1:]) if name.endswith("_") else tuple(factors)


def _is_factor(name: str, place: int, value: object) -> bool:
    return isinstance(value, torch.Tensor) or (name in ("add", "add_", "mul", "sub", "rsub") and place < 2)


def _magnitude(value: Any) -> Any:
    if is_floating(value):
        return value.abs()
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return abs(value) if is_number else value


def unit_of(name: str, operands: Iterable[torch.Tensor], numbers: Iterable[float]) -> int:
    """Returns an exponent e <= 0 for the terms that an operation adds: every term is an integer times 2**e."""
    units = [_own_unit(operand) for operand in operands]
    factor = sum(_own_unit(torch.tensor(number, dtype=torch.float64)) for number in numbers)
    if name in PRODUCTS:
        plus = units.pop(ADDED_TO[name]) if len(units) == 3 and name in ADDED_TO else 0
        return factor + min(plus, sum(units))
    return factor + min(units, default=0)


def _own_unit(operand: torch.Tensor) -> int:
    """Returns an exponent e <= 0 for the elements of a tensor: every element is an integer times 2**e.

    If all elements are integers, the result is 0, even if they are all multiples of a larger power of two. A number
    that the module adds later may not be such a multiple.
    """
    values = operand.detach()
    if torch.equal(values, values.trunc()) and (not values.numel() or float(values.abs().max()) < 2.0**MAX_BITS):
        return 0  # the usual case, and much faster than to find the unit
    if not bool(values.isfinite().all()):
        raise InexactData("an operand is infinite or NaN, so no sum with it is exact")
    return min(0, find_integers("an operand", values).exponent)


def is_floating(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
