"""Chooses at most eight forms of every operator for its enumerated calls.

A form says which shapes the operands have, and with which arguments the operator is called.
"""

from __future__ import annotations

import itertools
import re
from functools import cache

from equivtest.cases.case import Shape
from equivtest.families.operators.case_forms import Signature, Signatures
from equivtest.families.operators.case_operator import ALONE
from equivtest.families.operators.case_table import OPERATORS, is_taken

SHAPES: tuple[Shape, ...] = ((3, 4), (2, 3, 2), (5,), (3, 1, 4))
"""Shapes that the hand-written forms get. Two ranks shard dims of size 3 and 5 unevenly. Views drop dims of size 1."""
NUMBERS = frozenset({"other", "alpha", "exponent", "value", "weight", "min", "max", "scalar"})
"""Arguments whose sign matters beside a partial operand."""

NAMED = "named"
"""Place of a sharded dim that the call names."""

MAX_FORMS = 8
"""Largest number of forms per operator."""


@cache
def forms_of(name: str) -> Signatures:
    """Returns at most MAX_FORMS signatures of an operator.

    Each next signature is the signature with the most features (`_features`) that no earlier signature has. An operator
    that computes each element alone has signatures of one shape.
    """
    operator = OPERATORS[name]
    shapes = [each for each in SHAPES if operator.has_samples or len(each) in operator.num_dims]
    if operator.has_samples or operator.form is ALONE:  # the shape does not matter, or each element is separate
        shapes = shapes[:1]
    left = list(dict.fromkeys(signature for shape in shapes for signature in operator.form(shape)))
    seen, kept = set[object](), list[Signature]()
    while left and len(kept) < MAX_FORMS:
        best = max(left, key=lambda signature: len(_features(signature) - seen))
        left.remove(best)
        if is_taken(name, best, "float32"):
            seen |= _features(best)
            kept.append(best)
    return tuple(kept)


def _features(signature: Signature) -> frozenset[object]:
    """Returns the arguments, the numbers of dims, and facts on the shapes.

    The facts are which operands have the first operand's shape, which have no dims, which have a dim of size 1, which
    are repeated along such a dim, if the call names one, and if an operand has shorter shards along dims that the call
    does not name. Further facts are the signs of numbers, where a
    sharded dim may lie beside the named dims, and the named arguments of a call from torch's list.
    """
    shapes, dim = signature.shapes, dict(signature.arguments).get("dim")
    alike, single = tuple(shape == shapes[0] for shape in shapes), tuple(1 in shape for shape in shapes)
    names_single = isinstance(dim, int) and shapes[0][dim : dim + 1 or None] == (1,)
    without_dims = ("without dims", *(not shape for shape in shapes))
    sizes = [max(along) for along in itertools.zip_longest(*(shape[::-1] for shape in shapes), fillvalue=1)]
    repeats = tuple(any(own < size for own, size in zip(shape[::-1], sizes, strict=False)) for shape in shapes)
    shorter = any(_is_shorter(each, shapes[0], dim) for each in shapes[1:])
    facts = (
        *(tuple(map(len, shapes)), alike, ("single", *single), names_single, without_dims, ("repeats", *repeats)),
        *(("shorter",) if shorter else ()),
    )
    places = [(place, *how) for place, _, *how in places_of(signature).values()]  # a form has calls of all its dims
    return frozenset((*signature.arguments, *facts, *_named_in(signature), *signs_of(signature), *places))


def _is_shorter(shape: Shape, first: Shape, dim: object) -> bool:
    """True if the shape has as many dims as `first`, and smaller shards along each dim but `dim`.

    Two ranks divide each dim, and no shard is empty.
    """
    if not isinstance(dim, int) or len(shape) != len(first) or len(first) < 2:
        return False
    others = [place for place in range(len(first)) if place != dim % len(first)]
    return all(shape[place] > 1 and -(-shape[place] // 2) < -(-first[place] // 2) for place in others)


def _named_in(signature: Signature) -> list[str]:
    """Returns each named argument of a call from torch's list, such as 'ignore_index=1'."""
    text = dict(signature.arguments).get("call", "")
    return re.findall(r"\w+=[^,\[(]+", text) if isinstance(text, str) else []


@cache
def signs_of(signature: Signature) -> tuple[tuple[str, int], ...]:
    """Returns (name, sign) of each argument of `NUMBERS`."""
    found = [(name, value) for name, value in signature.arguments if name in NUMBERS]
    return tuple((name, (value > 0) - (value < 0)) for name, value in found if isinstance(value, int | float))


@cache
def places_of(signature: Signature) -> dict[str, tuple[object, ...]]:
    """Maps the placement of each shard of the first operand to a label, if the call names some of its dims.

    The label says whether the sharded dim is named or lies before or behind the first named dim, whether it is named
    second or later, whether the call names several dims, and whether it keeps them. A padding names the dims that it
    changes.
    """
    arguments, shape = dict(signature.arguments), signature.shapes[0]
    dim = arguments.get("dim", arguments.get("dims"))
    if isinstance(pad := arguments.get("pad"), tuple):
        dim = tuple(-1 - number // 2 for number, size in enumerate(pad) if size)
    dims = dim if isinstance(dim, tuple) else (dim,) if isinstance(dim, int) else ()
    named = [each % len(shape) for each in dims if -len(shape) <= each < len(shape)]
    if not named:
        return {}
    how = (len(set(named)) > 1, bool(arguments.get("keepdim")))
    places = {number: "before" if number < min(named) else "behind" for number in range(len(shape))}
    places |= dict.fromkeys(named, NAMED)
    return {
        f"shard({number})": (place, number in named[1:], *how) for number, place in places.items() if shape[number] > 1
    }
