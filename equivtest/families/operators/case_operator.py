"""What the table says of an operator: how it is called, on what, and what can be asked of its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from equivtest.families.operators.case_forms import Form, each

ANY, POSITIVE, UNIT, POWERS, DISTINCT = ("any", "positive", "unit", "powers", "distinct")
"""What an operand holds: numbers of either sign; positive ones; of magnitude below 1; powers of two; none twice."""
ABOVE, FRACTION, BITS, SIGNS = ("above", "fraction", "bits", "signs")
"""Numbers above 1; between 0 and 1; zeros and ones; ones of either sign."""
BIDIAGONAL, SQUARES, DIAGONAL = MATRICES = ("bidiagonal", "squares", "diagonal")
"""Square matrices: upper bidiagonal ones, with ones on the diagonal; such a one times its transpose, the latter in
front; diagonal ones of powers of two, none twice by magnitude."""

FLOATS, INDEX, BOOLS, WHOLE = KINDS = ("floats", "index", "bools", "whole")
"""Numbers of the case's dtype; int64 that count along a dim of the first operand; bools; int64 from 0 to 7."""

BELOW = "below"
"""The first word of 'below 5': int64 from 0 to 4."""

CONTENTS = (
    ANY, POSITIVE, UNIT, POWERS, DISTINCT, ABOVE, FRACTION, BITS, SIGNS, *MATRICES, BOOLS, WHOLE,
)  # fmt: skip
"""Contents of an operand that a form may name, besides 'below NUMBER'."""


def is_content(text: str) -> bool:
    """Whether a form may say so."""
    word, _, number = text.partition(" ")
    return text in CONTENTS or (word == BELOW and number.isdecimal() and int(number) > 0)


Call = Callable[..., Any]
ALONE = each()


@dataclass(frozen=True)
class Operator:
    """One operator, and how it is called.

    Attributes:
        name: As torch's list of operators has it; with a word behind it for a form of its own.
        call: Of the operands in order, and the arguments by name.
        form: The signatures for one shape.
        kinds: Of each operand; of operands beyond them, floats.
        domain: Of the values of operands that are floats.
        domains: The same of the first operands, where they differ; of further ones, any.
        is_exact: Whether the values of that domain come out as they are, or as numbers of as few bits, so that equality
            can be asked of them; of sums and products it need not be said: that is proved.
        adds_cotangents: Whether the gradient of an exact one adds up cotangents, or parts of them, and computes
            nothing else.
        cotangent_parts: Into how many equal parts, a power of two, a cotangent is divided at most.
        rounds: Whether what comes out is rounded, so that 16 bits are too few to conclude anything.
        num_dims: Of the shapes that it takes.
        has_samples: Whether its forms are samples of torch's own list, which say themselves what operands hold.
    """

    name: str
    call: Call
    form: Form = ALONE
    kinds: tuple[str, ...] = ()
    domain: str = ANY
    domains: tuple[str, ...] = ()
    is_exact: bool = False
    adds_cotangents: bool = True
    cotangent_parts: int = 2
    rounds: bool = False
    num_dims: tuple[int, ...] = (0, 1, 2, 3)
    has_samples: bool = False

    def kind_of(self, number: int) -> str:
        """Returns the kind that the operand of that number has."""
        return self.kinds[number] if number < len(self.kinds) else FLOATS

    def domain_of(self, number: int) -> str:
        """Returns the domain that the values of the operand of that number are from."""
        return self.domain if not self.domains else self.domains[number] if number < len(self.domains) else ANY


def chooses(name: str, call: Call, form: Form = ALONE, **how: Any) -> Operator:
    return Operator(name, call, form, is_exact=True, **how)


def rounded(name: str, call: Call, form: Form = ALONE, **how: Any) -> Operator:
    return Operator(name, call, form, rounds=True, **how)


def in_place(method: str) -> Call:
    """The method of the first operand times one, which is then the answer; a clone of a partial one would be whole."""

    def call(x: torch.Tensor, *others: torch.Tensor, **arguments: Any) -> torch.Tensor:
        copied = x.mul(1)
        getattr(copied, method)(*others, **arguments)
        return copied

    return call
