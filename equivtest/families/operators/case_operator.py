"""Defines `Operator`, an entry of the table of operators. It says how an operator is called and how it is judged."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from equivtest.families.operators.case_forms import Form, each

ANY, POSITIVE, UNIT, POWERS, DISTINCT = ("any", "positive", "unit", "powers", "distinct")
"""Contents of an operand: numbers of any sign; positive; magnitudes below 1; powers of two; all different."""
ABOVE, FRACTION, BITS, SIGNS, HALVES = ("above", "fraction", "bits", "signs", "halves")
"""More contents: numbers above 1; between 0 and 1; zeros and ones; 1 or -1; odd multiples of one half."""
FEW, MOST = ("few", "most")
"""Zeros and ones: about one in six is a one, or a zero."""
BIDIAGONAL, SQUARES, DIAGONAL = MATRICES = ("bidiagonal", "squares", "diagonal")
"""Contents that are square matrices.

They are upper bidiagonal with ones on the diagonal; `B.T @ B` for such a matrix B; diagonal with different powers of
two.
"""

FLOATS, INDEX, BOOLS, WHOLE = KINDS = ("floats", "index", "bools", "whole")
"""Kinds of operands: numbers of the case's dtype; int64 indices into a dim; bools; int64 from 0 to 7."""

BELOW = "below"
"""First word of a content such as 'below 5', which means int64 from 0 to 4."""

CONTENTS = (
    ANY, POSITIVE, UNIT, POWERS, DISTINCT, ABOVE, FRACTION, BITS, FEW, MOST, SIGNS, HALVES, *MATRICES, BOOLS,
    WHOLE,
)  # fmt: skip
"""Every content of an operand that a signature may name, except 'below NUMBER'."""


def is_content(text: str) -> bool:
    word, _, number = text.partition(" ")
    return text in CONTENTS or (word == BELOW and number.isdecimal() and int(number) > 0)


Call = Callable[..., Any]
ALONE = each()


@dataclass(frozen=True)
class Operator:
    """Describes one operator, its calls, and the contents of its operands.

    Attributes:
        name: The name in torch's list of operators, followed by a word for a special form.
        call: The function that is called. The function takes the operands in order, and the arguments by name.
        form: Function that returns the signatures for one shape. Each signature has the operands' shapes and the
            arguments of one call.
        kinds: Kinds of the first operands, such as index or bools. All further operands are floats.
        domain: Domain of the values of operands that are floats, such as 'positive'.
        domains: Domains of the first operands, if the operands have different domains. All further operands have the
            domain ANY.
        is_exact: True if results must equal the oracle's, because they are values of the domain or have no more bits
            than such values. Operators that are sums and products need no mark, because the oracle proves for each draw
            that the results are exact.
        adds_cotangents: True if the gradient of an exact operator is a sum of cotangents or of parts of cotangents, and
            nothing else is computed.
        cotangent_parts: Largest number of equal parts, a power of two, into which a cotangent is divided.
        rounds: True if the operator is called only in float32 and float64: 16 bits are too few for a conclusion.
        num_dims: Every number of dims that the shape of a form may have.
        has_samples: True if the operator's forms are samples from torch's list. Such samples name the contents of
            operands.
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
        return self.kinds[number] if number < len(self.kinds) else FLOATS

    def domain_of(self, number: int) -> str:
        return self.domain if not self.domains else self.domains[number] if number < len(self.domains) else ANY


def chooses(name: str, call: Call, form: Form = ALONE, **how: Any) -> Operator:
    return Operator(name, call, form, is_exact=True, **how)


def rounded(name: str, call: Call, form: Form = ALONE, **how: Any) -> Operator:
    return Operator(name, call, form, rounds=True, **how)


def in_place(method: str) -> Call:
    """Calls the method on a copy, which is `x.mul(1)`, because `x.clone()` makes a partial DTensor whole."""

    def call(x: torch.Tensor, *others: torch.Tensor, **arguments: Any) -> torch.Tensor:
        copied = x.mul(1)
        getattr(copied, method)(*others, **arguments)
        return copied

    return call


def module_of_dtensor(x: torch.Tensor) -> Any:
    """Returns the module that defines x's class DTensor, or None if x is no DTensor.

    The oracle also calls operators, and must not import torch.distributed.
    """
    return sys.modules[type(x).__module__] if type(x).__name__ == "DTensor" else None
