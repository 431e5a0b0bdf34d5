"""Lists operators on lists of tensors, which optimizers and the clipping of gradients call.

The operands of a call are the elements of all lists, in order. Each list has two elements of different shapes.

Source: torch._foreach_add and its siblings (2.13.0). The operator on lists equals the operator on each element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from equivtest.cases.case import Shape
from equivtest.families.operators.case_forms import Argument, Form, Signature, Signatures, either
from equivtest.families.operators.case_operator import DISTINCT, POSITIVE, Call, Operator, chooses, rounded

LENGTH = 2
"""Number of elements of each list."""


def lists_of(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    return [list(tensors[begin : begin + LENGTH]) for begin in range(0, len(tensors), LENGTH)]


def on_lists(name: str) -> Call:
    function = getattr(torch, f"_foreach_{name}")

    def call(*tensors: torch.Tensor, **arguments: Any) -> Any:
        return function(*lists_of(tensors), **_as_floats(arguments))

    return call


def in_place_on_lists(name: str) -> Call:
    """Calls the operator on copies of the first list, which are `x.mul(1)`, as `in_place` does."""
    function = getattr(torch, f"_foreach_{name}_")

    def call(*tensors: torch.Tensor, **arguments: Any) -> Any:
        first, *others = lists_of(tensors)
        copied = [x.mul(1) for x in first]
        function(copied, *others, **_as_floats(arguments))
        return copied

    return call


def _as_floats(arguments: dict[str, Any]) -> dict[str, Any]:
    """Replaces the text 'inf' by infinity, which the arguments of a case cannot hold."""
    return {name: float(value) if value == "inf" else value for name, value in arguments.items()}


def lists(num: int, **arguments: Argument) -> Form:
    """Returns a form with `num` lists, whose elements have the shape, and the shape without its first dim."""

    def form(shape: Shape) -> Signatures:
        return (Signature((shape, shape[1:]) * num, tuple(arguments.items())),)

    return form


def _function(make: Callable[..., Operator], name: str, *forms: Form, **how: Any) -> Operator:
    return make(f"_foreach_{name}", on_lists(name), either(*forms), num_dims=(2,), **how)


def _in_place(make: Callable[..., Operator], name: str, *forms: Form, **how: Any) -> Operator:
    return make(f"_foreach_{name} in place", in_place_on_lists(name), either(*forms), num_dims=(2,), **how)


_NUMBERS: tuple[Form, ...] = (lists(1, scalar=2.0), lists(1, scalar=-3.0), lists(1, scalars=(2, -3)))

ROWS = (
    _function(chooses, "abs", lists(1)),
    _function(chooses, "neg", lists(1)),
    _function(chooses, "sign", lists(1)),
    _function(chooses, "maximum", lists(2)),
    _function(chooses, "max", lists(1), domain=DISTINCT),
    _function(Operator, "add", lists(2), lists(2, alpha=-2), *_NUMBERS),
    _function(Operator, "sub", lists(2), lists(2, alpha=-2), *_NUMBERS),
    _function(Operator, "mul", lists(2), *_NUMBERS),
    _function(rounded, "div", lists(2), *_NUMBERS, domain=POSITIVE),
    _function(rounded, "pow", lists(1, exponent=2), lists(1, exponent=0.5), domain=POSITIVE),
    _function(rounded, "sqrt", lists(1), domain=POSITIVE),
    _function(rounded, "reciprocal", lists(1), domain=POSITIVE),
    _function(rounded, "norm", lists(1, ord=2), lists(1, ord=1), lists(1, ord="inf")),
    _in_place(Operator, "add", lists(2), lists(2, alpha=-2), *_NUMBERS),
    _in_place(Operator, "sub", lists(2), lists(2, alpha=-2), *_NUMBERS),
    _in_place(Operator, "mul", lists(2), *_NUMBERS),
    _in_place(chooses, "neg", lists(1)),
    _in_place(rounded, "sqrt", lists(1), domain=POSITIVE),
    _in_place(rounded, "div", lists(2), *_NUMBERS, domain=POSITIVE),
    _in_place(rounded, "addcmul", lists(3), lists(3, value=-2), lists(3, scalars=(2, -3))),
    _in_place(rounded, "addcdiv", lists(3), lists(3, value=-2), domain=POSITIVE),
    _in_place(rounded, "lerp", lists(2, weight=0.5), lists(3)),
)
