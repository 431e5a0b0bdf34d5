"""Describes an operator for the table: how it is called, its operands, and how its results can be judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from equivtest.families.operators.case_forms import Form, each

ANY, POSITIVE, UNIT, POWERS, DISTINCT = ("any", "positive", "unit", "powers", "distinct")
"""Contents of operands: any sign; positive; magnitude below 1; powers of two; all different."""
ABOVE, FRACTION, BITS, SIGNS = ("above", "fraction", "bits", "signs")
"""More contents: above 1; between 0 and 1; zeros and ones; ones with either sign."""
BIDIAGONAL, SQUARES, DIAGONAL = MATRICES = ("bidiagonal", "squares", "diagonal")
"""Square matrices: upper bidiagonal with a unit diagonal; transpose of such a matrix times the matrix; diagonal with
different powers of two."""

FLOATS, INDEX, BOOLS, WHOLE = KINDS = ("floats", "index", "bools", "whole")
"""Numbers of the case's dtype; int64 that count along a dim of the first operand; bools; int64 from 0 to 7."""

BELOW = "below"
"""The first word of 'below 5': int64 from 0 to 4."""

CONTENTS = (
    ANY, POSITIVE, UNIT, POWERS, DISTINCT, ABOVE, FRACTION, BITS, SIGNS, *MATRICES, BOOLS, WHOLE,
)  # fmt: skip
"""Contents of an operand that a form may name, besides 'below NUMBER'."""


def is_content(text: str) -> bool:
    """True if a form may name this content."""
    word, _, number = text.partition(" ")
    return text in CONTENTS or (word == BELOW and number.isdecimal() and int(number) > 0)


Call = Callable[..., Any]
ALONE = each()


@dataclass(frozen=True)
class Operator:
    """One operator, and how it is called.

    Attributes:
        name: The name in torch's list of operators, followed by a word for a special form.
        call: Takes the operands in order, and the arguments by name.
        form: Returns the signatures for one shape.
        kinds: Kind of each operand; all further operands are floats.
        domain: Domain of the values of operands that are floats.
        domains: Domains of the first operands if they differ; all further ones have ANY.
        is_exact: True if results are values of the domain, or numbers of as few bits, so that results must be equal.
            Sums and products need no mark: the certificate proves them exact.
        adds_cotangents: True if the gradient of an exact operator adds up cotangents, or parts of them, and computes
            nothing else.
        cotangent_parts: Largest number of equal parts, a power of two, that a cotangent is divided into.
        rounds: True if results are rounded, so that 16 bits are too few for a conclusion.
        num_dims: Numbers of dims of the shapes that the operator takes.
        has_samples: True if the operator's forms are samples from torch's list, which name the contents of operands.
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
    """Calls the method on the first operand times one, and returns that; a clone of a partial one would be whole."""

    def call(x: torch.Tensor, *others: torch.Tensor, **arguments: Any) -> torch.Tensor:
        copied = x.mul(1)
        getattr(copied, method)(*others, **arguments)
        return copied

    return call
