"""What one collective must leave on a rank, from the operands of all ranks of its group.

An operand is a list of items, one for each tensor that is reduced or moved; an item is a list of parts, one for each
rank that gets another, else one; a part is flat.  What is moved keeps its bits.  What is added is exact where the
values allow that, else bounded (`equivtest.oracle.operands`), in the dtype in which the backend says that it adds.
Of maxima and minima among which is a NaN, and of sums that may overflow, nothing is said.

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
    """Nothing is known of what a call must give; the message says why."""


class Inconsistent(EquivtestError):
    """The ranks of a group do not call the same; the message says how."""


@dataclass(frozen=True)
class Right:
    """What is right of one flat tensor.

    Attributes:
        value: Of the tensor's own dtype where `allowed` is None, and then equal bit by bit where `is_moved`, else as a
            number; float64 where there is a bound.
        allowed: Largest error of each element; infinite where nothing is said.
    """

    value: torch.Tensor
    allowed: torch.Tensor | None = None
    is_moved: bool = False


def right_results(kind: str, op: str, operands: Sequence[Items], rank: int, root: int | None) -> list[Right] | None:
    """What `rank` of the group must get of each item; None where nothing is said of what it gets.

    Args:
        kind: 'all_reduce', 'all_gather', ...
        op: The reduction: 'sum', 'max', ...; '' where values are moved.
        operands: Of each rank of the group.
        root: Of a collective that has one.

    Raises:
        Inconsistent: the operands of the ranks do not fit each other.
        Unjudged: of such a reduction nothing is known.
    """
    is_with_root = kind in ("reduce", "gather", "broadcast", "scatter")
    if is_with_root and (root is None or not 0 <= root < len(operands)):
        raise Inconsistent(f"the root of the {kind} is {root}, of a group of {len(operands)} ranks")
    if kind in ("reduce", "gather") and rank != root:
        return None
    if kind in ("broadcast", "scatter"):
        assert root is not None
        return [_moved([item[rank if kind == "scatter" else 0]]) for item in operands[root]]
    counts = {len(items) for items in operands}
    if len(counts) > 1:
        raise Inconsistent(f"the ranks give {', '.join(map(str, sorted(counts)))} tensors to one {kind}")
    part = rank if kind in ("reduce_scatter", "all_to_all") else 0
    given = [[items[number][part] for items in operands] for number in range(counts.pop())]
    if kind in ("all_gather", "gather", "all_to_all"):
        return [_moved(parts) for parts in given]
    if kind in ("all_reduce", "reduce", "reduce_scatter"):
        return [_reduced(kind, op, parts) for parts in given]
    raise Unjudged(f"of {kind} nothing is known")


def premultiplied(items: Items, factor: float) -> list[list[torch.Tensor]]:
    """The operand of a rank whose elements are multiplied before they are added up.

    Raises:
        Unjudged: a product may be rounded.
    """
    products = [[part * factor for part in item] for item in items]
    for part, product in zip(itertools.chain(*items), itertools.chain(*products), strict=True):
        if bool(((part.double() * factor != product.double()) & part.isfinite()).any()):
            raise Unjudged(f"of products with {factor} that are rounded nothing is known")
    return products


def _moved(parts: Sequence[torch.Tensor]) -> Right:
    return Right(torch.cat(list(parts)), is_moved=True)


def _reduced(kind: str, op: str, parts: Sequence[torch.Tensor]) -> Right:
    sizes, dtypes = sorted({len(part) for part in parts}), sorted({dtype_name(part.dtype) for part in parts})
    if len(sizes) > 1:
        raise Inconsistent(f"the ranks give {', '.join(map(str, sizes))} elements to one {kind}")
    if len(dtypes) > 1:
        raise Inconsistent(f"the ranks give {', '.join(dtypes)} to one {kind}")
    stack = torch.stack(list(parts))
    if len(parts) == 1 and op != "unknown":
        return Right(stack[0])
    if op in ("max", "min"):
        return _extreme(op, stack)
    if not stack.is_floating_point():
        return Right(_of_whole_numbers(op, stack))
    if op not in ("sum", "avg", "product") or declared_of(dtypes[0]) is None or dtypes[0] not in DTYPES:
        raise Unjudged(f"of the reduction {op} of {dtypes[0]} nothing is known")
    return _of_real_numbers(op, stack)


def _extreme(op: str, stack: torch.Tensor) -> Right:
    value = stack.amax(0) if op == "max" else stack.amin(0)
    if not stack.is_floating_point():
        return Right(value)
    return Right(value.double(), torch.where(stack.isnan().any(0), math.inf, 0.0).double())


def _of_whole_numbers(op: str, stack: torch.Tensor) -> torch.Tensor:
    """Wrapped around as the dtype is."""
    if op in BITWISE:
        return join_bits(op, stack)
    if op in ("sum", "product") and stack.dtype is not torch.bool:
        return (stack.sum(0) if op == "sum" else stack.prod(0)).to(stack.dtype)
    raise Unjudged(f"of the reduction {op} of {dtype_name(stack.dtype)} nothing is known")


def _of_real_numbers(op: str, stack: torch.Tensor) -> Right:
    is_finite = stack.isfinite().all(0)
    finite = torch.where(is_finite, stack, 0.0)
    try:
        found = reduce_exactly("operand", finite, op, [len(stack)])
    except InexactData:
        if op == "product":
            raise Unjudged("of a product that is rounded nothing is known") from None
        found = bound_reduction(finite, op, 1)
    wide = stack.double()
    total = wide.prod(0) if op == "product" else wide.sum(0)
    allowed = torch.zeros_like(found.value) if found.allowed is None else found.allowed
    return Right(torch.where(is_finite, found.value, total), torch.where(is_finite, allowed, 0.0))
