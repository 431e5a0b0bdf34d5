"""Computes the result that one collective must leave on a rank, from the operands of all ranks of its group.

An operand is a list of items, one for each tensor that is reduced or moved. An item is a list of parts. If the ranks
receive different parts, the list has one part for each rank. If not, it has one part. A part is flat. Moved values keep
their bits. Sums are exact if the values allow it. If not, sums have a bound (`equivtest.oracle.operands`) for additions
in the dtype in which the backend declares to add. There is no right value for maxima and minima with a NaN, nor for
sums that may overflow.

Source: torch/csrc/distributed/c10d/ProcessGroup.hpp and the docstrings of torch.distributed (2.13.0).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from equivtest.errors import EquivtestError
from equivtest.oracle.declared import declared_of
from equivtest.oracle.exact import InexactData
from equivtest.oracle.operands import BITWISE, bound_reduction, join_bits, reduce_exactly
from equivtest.tensors import DTYPES, dtype_name

Items = Sequence[Sequence[torch.Tensor]]


class Unjudged(EquivtestError):
    """Raised if the right result of a call is unknown. The message says why."""


class Inconsistent(EquivtestError):
    """Raised if the ranks of a group make different calls. The message says how the calls differ."""


@dataclass(frozen=True)
class Right:
    """The right value of one flat tensor that a collective returns.

    Attributes:
        value: The right value. It is float64 if `allowed` is a bound, and has the tensor's own dtype if not.
        allowed: Largest error of each element; infinite if the right value is unknown. If None, a result must equal
            `value`. If `is_moved` is True, the bits must be equal too.
        is_moved: True if the collective copies the value, and so must keep its bits.
    """

    value: torch.Tensor
    allowed: torch.Tensor | None = None
    is_moved: bool = False


def right_results(kind: str, op: str, operands: Sequence[Items], rank: int, root: int | None) -> list[Right] | None:
    """Returns the right tensor of each item on one rank of the group. Returns None if the rank's result is undefined.

    Args:
        op: Name of the reduction, such as 'sum' or 'max'; '' if the collective moves values.
        root: Rank of the collective's root. None if the collective has no root.

    Raises:
        Inconsistent: the operands of the ranks do not fit each other.
        Unjudged: the right result of this collective or reduction is unknown.
    """
    is_with_root = kind in ("reduce", "gather", "broadcast", "scatter")
    if is_with_root and (root is None or not 0 <= root < len(operands)):
        raise Inconsistent(f"the root of the {kind} is {root}, in a group of {len(operands)} ranks")
    if kind in ("reduce", "gather") and rank != root:
        return None
    if kind in ("broadcast", "scatter"):
        assert root is not None
        return [_moved([item[rank if kind == "scatter" else 0]]) for item in operands[root]]
    counts = {len(items) for items in operands}
    if len(counts) > 1:
        raise Inconsistent(f"the ranks pass {', '.join(map(str, sorted(counts)))} tensors to one {kind}")
    part = rank if kind in ("reduce_scatter", "all_to_all") else 0
    given = [[items[number][part] for items in operands] for number in range(counts.pop())]
    if kind in ("all_gather", "gather", "all_to_all"):
        return [_moved(parts) for parts in given]
    if kind in ("all_reduce", "reduce", "reduce_scatter"):
        return [_reduced(kind, op, parts) for parts in given]
    raise Unjudged(f"the right result is unknown for {kind}")


def premultiplied(items: Items, factor: float) -> list[list[torch.Tensor]]:
    """Multiplies a rank's operand by the factor of a premultiplied sum, which the backend applies before it adds.

    Raises:
        Unjudged: a product may be rounded.
    """
    products = [[part * factor for part in item] for item in items]
    for part, product in zip(itertools.chain(*items), itertools.chain(*products), strict=True):
        if bool(((part.double() * factor != product.double()) & part.isfinite()).any()):
            raise Unjudged(f"the right result is unknown for rounded products with {factor}")
    return products


def _moved(parts: Sequence[torch.Tensor]) -> Right:
    return Right(torch.cat(list(parts)), is_moved=True)


def _reduced(kind: str, op: str, parts: Sequence[torch.Tensor]) -> Right:
    sizes, dtypes = sorted({len(part) for part in parts}), sorted({dtype_name(part.dtype) for part in parts})
    if len(sizes) > 1:
        raise Inconsistent(f"the ranks pass {', '.join(map(str, sizes))} elements to one {kind}")
    if len(dtypes) > 1:
        raise Inconsistent(f"the ranks pass {', '.join(dtypes)} to one {kind}")
    stack = torch.stack(list(parts))
    if len(parts) == 1 and op != "unknown":
        return Right(stack[0])
    if op in ("max", "min"):
        return _extreme(op, stack)
    if not stack.is_floating_point():
        return Right(_of_whole_numbers(op, stack))
    if op not in ("sum", "avg", "product") or declared_of(dtypes[0]) is None or dtypes[0] not in DTYPES:
        raise Unjudged(f"the right result is unknown for the reduction {op} of {dtypes[0]}")
    return _of_real_numbers(op, stack)


def _extreme(op: str, stack: torch.Tensor) -> Right:
    value = stack.amax(0) if op == "max" else stack.amin(0)
    if not stack.is_floating_point():
        return Right(value)
    return Right(value.double(), torch.where(stack.isnan().any(0), math.inf, 0.0).double())


def _of_whole_numbers(op: str, stack: torch.Tensor) -> torch.Tensor:
    """Reduces whole numbers. If a result does not fit the dtype, it wraps around."""
    if op in BITWISE:
        return join_bits(op, stack)
    if op in ("sum", "product") and stack.dtype is not torch.bool:
        return (stack.sum(0) if op == "sum" else stack.prod(0)).to(stack.dtype)
    raise Unjudged(f"the right result is unknown for the reduction {op} of {dtype_name(stack.dtype)}")


def _of_real_numbers(op: str, stack: torch.Tensor) -> Right:
    is_finite = stack.isfinite().all(0)
    finite = torch.where(is_finite, stack, 0.0)
    try:
        reduced = reduce_exactly("operand", finite, op, [len(stack)])
    except InexactData:
        if op == "product":
            raise Unjudged("the right result is unknown for a rounded product") from None
        reduced = bound_reduction(finite, op, 1)
    wide = stack.double()
    total = wide.prod(0) if op == "product" else wide.sum(0)
    allowed = torch.zeros_like(reduced.value) if reduced.allowed is None else reduced.allowed
    return Right(torch.where(is_finite, reduced.value, total), torch.where(is_finite, allowed, 0.0))
