"""Changes one argument of a call, so that a cache of rules that ignores this argument would show.

DTensor keeps the placements that it chose for a call, and uses them for every later call that differs only in what an
operator does not name in its `RuntimeSchemaInfo` (torch/distributed/tensor/_op_schema.py, 2.13.0).
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from dataclasses import replace

from equivtest.families.operators.case import OperatorCase
from equivtest.families.operators.case_forms import Argument, Arguments, Signature
from equivtest.families.operators.case_table import OPERATORS, is_taken, results_of

OPTIONS = (
    ("none", "mean", "sum"), ("none", "tanh"), ("zeros", "border", "reflection"), ("bilinear", "nearest", "bicubic"),
    ("linear", "nearest", "area"), ("same", "valid"), ("trunc", "floor"), ("constant", "replicate", "circular"),
)  # fmt: skip
"""Texts that some argument takes, such as the reductions of a loss. Another text of the same row is tried."""

REMEMBERED = {"histc": "bins", "topk": "k"}
"""Operator -> argument that torch's cache of rules ignores: findings 125 and 131.

A call with another value is right alone and wrong after the first call, so no known failure can describe it.
"""

CALL = "call"
"""Argument of a call from torch's list: the text of its arguments."""


def with_one_change(case: OperatorCase) -> Iterator[OperatorCase]:
    """Yields the call with another value of one argument, once for each argument that torch accepts with another value.

    Results can have other shapes, so the cotangents are replicated.
    """
    for choices in _choices(case):
        for arguments in choices:
            if _gives_elements(case, arguments):
                yield replace(case, arguments=arguments, cotangents=())
                break


def _gives_elements(case: OperatorCase, arguments: Arguments) -> bool:
    """True if torch accepts the arguments, and each result has an element, so that a wrong result would show."""
    if not is_taken(case.operator, Signature(case.operands, arguments, case.holds), case.dtype):
        return False
    results = results_of(case.operator, case.operands, arguments, (case.dtype,) * len(case.operands), case.holds)
    return all(math.prod(result.shape) for result in results)


def _choices(case: OperatorCase) -> Iterator[Iterator[Arguments]]:
    """Yields for each argument the lists of arguments that differ from the call's in this argument."""
    given = dict(case.arguments)
    for name, value in given.items():
        if REMEMBERED.get(case.operator) == name:
            continue
        values = _other_texts(value) if name == CALL else [iter(_others(value))]
        for others in values:
            yield (tuple((given | {name: other}).items()) for other in others)
    for name, value in _further(case).items():
        yield iter([(*case.arguments, (name, value))])


def _further(case: OperatorCase) -> dict[str, Argument]:
    """Returns each argument that the call lacks and another form of the operator has, with its first value."""
    operator, found = OPERATORS[case.operator], dict[str, Argument]()
    for signature in () if operator.has_samples else operator.form(case.operands[0]):
        for name, value in signature.arguments:
            found.setdefault(name, value)
    return {name: value for name, value in found.items() if name not in dict(case.arguments)}


def _others(value: Argument) -> tuple[Argument, ...]:
    """Returns other values of an argument, the likeliest to be accepted first."""
    return tuple(other for other in _candidates(value) if other != value)


def _candidates(value: Argument) -> tuple[Argument, ...]:
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return (value + 1, value - 1, 2 * value)
    if isinstance(value, float):
        return (value / 2, value + 1)
    if isinstance(value, str):
        return tuple(other for row in OPTIONS if value in row for other in row)
    if not isinstance(value, tuple):
        return ()
    turned = value[::-1]
    changed = [
        (*value[:place], other, *value[place + 1 :])
        for place in reversed(range(len(value)))
        for other in (value[place] + 1, value[place] - 1)
    ]
    return (turned, *changed) if turned != value else tuple(changed)


def _other_texts(call: Argument) -> Iterator[Iterator[str]]:
    """Yields for each literal of a call's text the texts that differ in this literal."""
    assert isinstance(call, str)
    num = sum(isinstance(node, ast.Constant) for node in ast.walk(_parsed(call)))
    for number in range(num):
        yield _with_literal(call, number)


def _with_literal(call: str, number: int) -> Iterator[str]:
    literal = _literal(_parsed(call), number)
    for value in _others(literal.value):  # type: ignore[arg-type]
        tree = _parsed(call)
        _literal(tree, number).value = value  # type: ignore[assignment]
        yield ast.unparse(tree).removeprefix("call(").removesuffix(")")


def _literal(tree: ast.expr, number: int) -> ast.Constant:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Constant)][number]


def _parsed(call: str) -> ast.expr:
    return ast.parse(f"call({call})", mode="eval").body
