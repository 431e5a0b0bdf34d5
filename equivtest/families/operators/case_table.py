"""Collects the table of operators that are judged, each with the forms in which it is called.

Source: names and arguments as torch documents them; torch.testing._internal.common_methods_invocations.op_db (2.13.0)
lists them.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from equivtest.cases.case import Shape
from equivtest.families.operators import (
    case_algebra,
    case_backward,
    case_chance,
    case_combined,
    case_images,
    case_lists,
    case_others,
    case_pointwise,
    case_products,
    case_reductions,
    case_samples,
    case_special,
    case_views,
)
from equivtest.families.operators.case_forms import Arguments, Signature, Signatures
from equivtest.families.operators.case_operator import BELOW, BOOLS, FLOATS, INDEX, MATRICES, WHOLE, Operator

HAND_WRITTEN: dict[str, Operator] = {
    operator.name: operator
    for rows in (
        case_pointwise,
        case_reductions,
        case_views,
        case_products,
        case_others,
        case_special,
        case_algebra,
        case_images,
        case_chance,
    )
    for operator in rows.ROWS
}
"""Operators by name whose forms are written by hand, and fit any shape."""

ELEMENTWISE = frozenset(operator.name for operator in case_pointwise.ROWS)
"""Names of elementwise operators.

torch has one rule for all of them. Source: torch/distributed/tensor/_ops/_pointwise_ops.py (2.13.0).
"""

CHANCE = frozenset(operator.name for operator in case_chance.ROWS)
"""Names of random operators, whose arguments leave one possible result."""

BACKWARD = {operator.name: operator for operator in case_backward.ROWS}
"""Operators that a backward calls, by name; random cases have none."""

LISTS = {operator.name: operator for operator in case_lists.ROWS}
"""Operators on lists of tensors, by name; random cases have none."""

NOT_DRAWN = (
    *case_reductions.NOT_DRAWN,
    *case_others.NOT_DRAWN,
    *case_pointwise.NOT_DRAWN,
    *case_combined.ROWS,
)
"""Operators that a gate enumerates, and that random cases have none of."""

OPERATORS = {
    **HAND_WRITTEN,
    **BACKWARD,
    **LISTS,
    **{operator.name: operator for operator in (*case_samples.ROWS, *NOT_DRAWN)},
}
"""All operators by name: those written by hand, those with forms from torch's own list, and `NOT_DRAWN`."""


def run(name: str, operands: tuple[Any, ...], arguments: Arguments) -> tuple[Any, ...]:
    """Calls an operator, and hides warnings about NaN, because NaN is judged like any other value."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = OPERATORS[name].call(*operands, **dict(arguments))
    return tuple(found) if isinstance(found, tuple | list) else (found,)


@functools.lru_cache(maxsize=2**14)
def signatures_of(name: str, shape: Shape) -> Signatures:
    """Returns the signatures that the installed torch accepts, simplest first. Each was tried unsharded in float64."""
    operator = OPERATORS[name]
    if len(shape) not in operator.num_dims:
        return ()
    return tuple(signature for signature in operator.form(shape) if is_taken(name, signature, "float64"))


def is_taken(name: str, signature: Signature, dtype: str) -> bool:
    try:
        dtypes = (dtype,) * len(signature.shapes)
        results_of(name, signature.shapes, signature.arguments, dtypes, signature.holds)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return False
    return True


@dataclass(frozen=True)
class Result:
    """Describes one result of a call.

    Attributes:
        operands: Numbers of the operands for which the result has a gradient.
        requires_grad: The result's requires_grad in a call whose floating-point operands all require a gradient.
    """

    shape: Shape
    dtype: str
    operands: tuple[int, ...]
    requires_grad: bool


@functools.lru_cache(maxsize=2**14)
def results_of(
    name: str, shapes: tuple[Shape, ...], arguments: Arguments, dtypes: tuple[str, ...], holds: tuple[str, ...] = ()
) -> tuple[Result, ...]:
    """Describes the results of the unsharded operator. If `holds` is empty, the operator's entry names the contents.

    Raises:
        RuntimeError, IndexError, ValueError, TypeError: the operator does not accept the operands or arguments.
    """
    operator = OPERATORS[name]
    operands = tuple(
        plain_operand(kind_of(operator, holds, number), domain_of(operator, holds, number), shape, dtype)
        for number, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    )
    for numbers in (range(len(operands)), (0,)):  # torch refuses some calls if it has no derivative by every operand
        leaves = tuple(
            each.requires_grad_(number in numbers and each.is_floating_point()) for number, each in enumerate(operands)
        )
        try:
            return described(run(name, leaves, arguments), leaves)
        except RuntimeError:
            continue
    return described(run(name, tuple(each.requires_grad_(False) for each in operands), arguments), operands)  # noqa: FBT003


def described(results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> tuple[Result, ...]:
    return tuple(
        Result(
            tuple(each.shape),
            str(each.dtype).removeprefix("torch."),
            _operands_of(each, operands),
            each.requires_grad,
        )
        for each in results
    )


def kind_of(operator: Operator, holds: tuple[str, ...], number: int) -> str:
    """Returns the kind of operand `number`, from `holds` or, if `holds` is empty, from the operator's entry."""
    if not holds:
        return operator.kind_of(number)
    word = holds[number].partition(" ")[0]
    return {BOOLS: BOOLS, WHOLE: WHOLE, BELOW: WHOLE}.get(word, FLOATS)


def domain_of(operator: Operator, holds: tuple[str, ...], number: int) -> str:
    """Returns the content of operand `number`, from `holds` or, if `holds` is empty, from the operator's entry."""
    return holds[number] if holds else operator.domain_of(number)


def plain_operand(kind: str, domain: str, shape: Shape, dtype: str) -> torch.Tensor:
    """Returns an operand for a trial call: True, 0, unit matrices for a domain of matrices, or 0.5."""
    if kind == BOOLS:
        return torch.ones(shape, dtype=torch.bool, device="cpu")
    if kind in (INDEX, WHOLE):
        return torch.zeros(shape, dtype=torch.int64, device="cpu")
    if domain in MATRICES:
        return torch.eye(shape[-1], dtype=getattr(torch, dtype), device="cpu").expand(shape).clone()
    return torch.full(shape, 0.5, dtype=getattr(torch, dtype), device="cpu")


def _operands_of(result: torch.Tensor, operands: Sequence[torch.Tensor]) -> tuple[int, ...]:
    if not result.requires_grad:
        return ()
    leaves = [(number, operand) for number, operand in enumerate(operands) if operand.requires_grad]
    grads = torch.autograd.grad(
        result, [leaf for _, leaf in leaves], torch.ones_like(result), allow_unused=True, retain_graph=True
    )
    return tuple(number for (number, _), grad in zip(leaves, grads, strict=True) if grad is not None)
