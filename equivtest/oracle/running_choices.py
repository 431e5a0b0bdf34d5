"""Defines rules of operations that choose by comparing, such as argmax.

Each rule also says whether every correct program makes the same choice.

For two operands v and v' with errors e and e', the order is certain if |v - v'| > e + e'. If both operands are exact,
the order is certain too, provided that the documentation of the operation says which of two equal operands it chooses.

Source: torch.argmax, torch.max and torch.sort (2.13.0): the first of equal operands, and a stable sort keeps their
order; torch.topk documents no such order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from equivtest.oracle.ranged import Parts, Ranged
from equivtest.oracle.running_operands import is_floating
from equivtest.oracle.running_windows import max_pool

Chosen = tuple[Any, bool]
"""The chosen tensors, and True if every correct program chooses the same elements."""


def _along(operand: Ranged, dim: int | None) -> tuple[Parts, int]:
    parts = Parts.of(operand)
    if dim is None or not parts.value.dim():
        return Parts(*(part.flatten() for part in parts)), 0
    return parts, dim


def _is_best(parts: Parts, indices: torch.Tensor, dim: int, sign: int) -> bool:
    """True if no other element along the dim may be as large as the chosen element, or as small for a `sign` of -1."""
    value, error = sign * parts.value.double(), parts.error
    best, e_best = (each.gather(dim, indices) for each in (value, error))
    others = torch.ones_like(value, dtype=torch.bool).scatter_(dim, indices, value=False)
    may_be = others & (value + error >= best - e_best) & ((error > 0) | (e_best > 0))
    return not bool(may_be.any())


def _best(operand: Ranged, dim: int, keepdim: bool, sign: int) -> Chosen:  # noqa: FBT001  (torch's own order)
    parts, dim = _along(operand, dim)
    indices = (sign * parts.value).argmax(dim, keepdim=True)
    chosen = tuple(part.gather(dim, indices) for part in parts)
    is_certain = _is_best(parts, indices, dim, sign)
    flat = Parts.of(operand).value.dim() == 0
    if not keepdim or flat:
        chosen, indices = tuple(part.squeeze(dim) for part in chosen), indices.squeeze(dim)
    value, error, _ = chosen
    return (Parts(value, error, value.double().abs() + error).wrapped(), indices), is_certain


def largest(operand: Ranged, dim: int, keepdim: bool = False) -> Chosen:  # noqa: FBT001, FBT002
    return _best(operand, dim, keepdim, 1)


def smallest(operand: Ranged, dim: int, keepdim: bool = False) -> Chosen:  # noqa: FBT001, FBT002
    return _best(operand, dim, keepdim, -1)


def _argbest(function: Callable[..., torch.Tensor], sign: int) -> Callable[..., Chosen]:
    def choose(operand: Ranged, dim: int | None = None, keepdim: bool = False) -> Chosen:  # noqa: FBT001, FBT002
        parts, place = _along(operand, dim)
        indices = (sign * parts.value).argmax(place, keepdim=True)
        return function(Parts.of(operand).value, dim, keepdim), _is_best(parts, indices, place, sign)

    return choose


def sort(operand: Ranged, *how: Any, **named: Any) -> Chosen:
    """Returns ((values, indices) of torch.sort, True if every correct program gets the same order).

    Takes the arguments of both overloads of torch.sort, with and without `stable`.
    """
    placed = dict(zip(("dim", "descending"), how, strict=False))
    options: dict[str, Any] = {"dim": -1, "descending": False, "stable": False, **placed, **named}
    dim, descending, is_stable = int(options["dim"]), bool(options["descending"]), options["stable"]
    parts, place = _along(operand, dim)
    indices = torch.sort(parts.value, dim=place, descending=descending, stable=True).indices
    ordered = Parts(*(part.gather(place, indices) for part in parts))
    is_certain = _are_apart(ordered, ordered.value.shape[place], place, ties=bool(is_stable))
    shape = Parts.of(operand).value.shape
    return (Parts(*(part.reshape(shape) for part in ordered)).wrapped(), indices.reshape(shape)), is_certain


def topk(operand: Ranged, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Chosen:  # noqa: FBT001, FBT002
    parts, dim = _along(operand, dim)
    indices = torch.topk(parts.value, k, dim, largest=largest).indices
    others = torch.sort(parts.value, dim=dim, descending=largest, stable=True).indices
    ordered = Parts(*(part.gather(dim, others) for part in parts))
    chosen = tuple(part.gather(dim, indices) for part in parts)
    is_certain = _are_apart(ordered, k + 1, dim, ties=False)
    return (Parts(*chosen).wrapped(), indices), is_certain


def _are_apart(ordered: Parts, num: int, dim: int, *, ties: bool) -> bool:
    """True if every program has the first `num` elements in this order. With `ties`, exact elements may be equal."""
    value, error = (part.narrow(dim, 0, min(num, part.shape[dim])) for part in (ordered.value.double(), ordered.error))
    count = value.shape[dim] - 1
    if count < 1:
        return True
    one, two = (value.narrow(dim, start, count) for start in (0, 1))
    off = error.narrow(dim, 0, count) + error.narrow(dim, 1, count)
    gap = torch.where(one == two, 0.0, (one - two).abs())
    unclear = (gap <= off) & ((off > 0) | (not ties))
    return not bool(unclear.any())


def nonzero(operand: Ranged) -> Chosen:
    parts = Parts.of(operand)
    return parts.value.nonzero(), not bool(((parts.size <= parts.error) & (parts.error > 0)).any())


def counts(operand: Ranged, *how: Any, **named: Any) -> Chosen:
    """Returns (number of elements in each bin, like `torch.histc`, True if no element has an error)."""
    parts = Parts.of(operand)
    return torch.histc(parts.value, *how, **named), not bool((parts.error > 0).any())


def mantissas(operand: Ranged) -> Chosen:
    """Returns the fractions and powers of two of `torch.frexp`, and True if every correct program gets these powers."""
    parts = Parts.of(operand)
    value, powers = torch.frexp(parts.value)
    others = [torch.frexp(parts.value.double() + sign * parts.error)[1] for sign in (-1, 1)]
    scale = torch.exp2(-powers.double())
    fractions = Parts(value, parts.error * scale, parts.reach * scale).wrapped()
    return (fractions, powers), all(torch.equal(powers, each) for each in others)


def converted(operand: Ranged, value: torch.Tensor) -> Chosen:
    """Returns (`value`, an operand after a conversion, and True if every correct program gets the same `value`)."""
    parts = Parts.of(operand)
    low, high = (parts.value.double() + sign * parts.error for sign in (-1, 1))
    if value.dtype == torch.bool:
        return value, nonzero(operand)[1]
    return value, not bool(((low.trunc() != high.trunc()) & (parts.error > 0)).any())


CHOICES: dict[str, Callable[..., Chosen]] = {
    "topk": topk, "sort": sort, "nonzero": nonzero, "argmax": _argbest(torch.argmax, 1),
    "argmin": _argbest(torch.argmin, -1), "histc": counts, "max_pool2d_with_indices": max_pool,
    "max_pool3d_with_indices": max_pool, "frexp": mantissas,
}  # fmt: skip
"""Operator -> rule, which takes the operator's own arguments."""

BY_DIM = {"max": largest, "min": smallest}
"""Operator -> rule of the overload with a dim, such as torch.max(x, 1)."""


def choice_of(name: str, overload: str, operands: Sequence[Any]) -> Callable[..., Chosen] | None:
    """Returns the rule of an operation that chooses among floating-point elements, or None."""
    if not operands or not is_floating(operands[0]):
        return None
    return BY_DIM.get(name) if overload == "dim" else CHOICES.get(name)
