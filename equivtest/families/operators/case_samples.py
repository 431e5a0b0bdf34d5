"""Reads operators and forms of torch's own list from `forms.jsonl`.

`python -m studies.operator_forms` writes this file. The text of a form is the argument list of a call. In "x0, 2,
dim=x1", for example, the names x0 and x1 stand for operands, and everything else is a literal.

Source: torch.testing._internal.common_methods_invocations.op_db (2.13.0).
"""

from __future__ import annotations

import ast
import functools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from equivtest.families.operators.case_forms import Form, Signature
from equivtest.families.operators.case_operator import Operator

FILE = Path(__file__).with_name("forms.jsonl")

IN_PLACE, OUT = "in place", "out"
WAYS = ("", IN_PLACE, OUT)
"""Ways to call an operator: as a function; as a method that writes to its first operand, here a copy; with `out=`."""

_CONSTANTS = {"inf": math.inf, "nan": math.nan}


def name_of(operator: str, way: str) -> str:
    return f"{operator} {way}".strip()


def function_of(operator: str) -> Callable[..., Any] | None:
    """Returns torch's function, or the tensors' method, with this name, or None if torch has neither."""
    found: Any = torch
    for part in operator.removeprefix("torch.").split("."):
        found = getattr(found, part, None)
    method = getattr(torch.Tensor, operator, None)
    return found if callable(found) else method if callable(method) else None


def run_form(name: str, call: str, operands: Sequence[Any]) -> tuple[Any, ...]:
    """Calls an operator of the table. `call` is the text of a form: see the module's docstring."""
    way, operator = way_of(name), _operator_of(name)
    positional, named = _arguments(call, tuple(operands))
    if way == IN_PLACE:
        x, *others = positional
        copied = x.mul(1)
        getattr(copied, _method_of(operator))(*others, **named)
        return (copied,)
    function = function_of(operator)
    assert function is not None
    if way == OUT:
        with torch.no_grad():
            shaped = function(*positional, **named)
            out = torch.zeros_like(shaped) if isinstance(shaped, torch.Tensor) else tuple(map(torch.zeros_like, shaped))
            function(*positional, **named, out=out)
        return out if isinstance(out, tuple) else (out,)
    found = function(*positional, **named)
    return tuple(found) if isinstance(found, tuple | list) else (found,)


def way_of(name: str) -> str:
    """Returns the way of calling that ends a name: `way_of("add in place") -> "in place"`. '' is a function."""
    return next((way for way in WAYS[1:] if name.endswith(f" {way}")), "")


def _operator_of(name: str) -> str:
    return name.removesuffix(f" {way_of(name)}") if way_of(name) else name


def _method_of(operator: str) -> str:
    """Returns the name of the method that writes to its first operand: `_method_of("special.expit") -> "expit_"`."""
    return f"{operator.rpartition('.')[2]}_"


def _arguments(call: str, operands: tuple[Any, ...]) -> tuple[list[Any], dict[str, Any]]:
    """Evaluates the text of an argument list. Returns (positional arguments, keyword arguments)."""
    tree = _parsed(call)
    positional = [_value(each, operands) for each in tree.args]
    return positional, {str(each.arg): _value(each.value, operands) for each in tree.keywords}


@functools.lru_cache(maxsize=2**12)
def _parsed(call: str) -> ast.Call:
    tree = ast.parse(f"call({call})", mode="eval").body
    assert isinstance(tree, ast.Call)
    return tree


def _value(node: ast.expr, operands: tuple[Any, ...]) -> Any:
    if isinstance(node, ast.List):
        return [_value(each, operands) for each in node.elts]
    if isinstance(node, ast.Tuple):
        return tuple(_value(each, operands) for each in node.elts)
    if isinstance(node, ast.UnaryOp):
        return -_value(node.operand, operands)
    if isinstance(node, ast.Attribute):
        return getattr(torch, node.attr)
    if isinstance(node, ast.Name):
        return _CONSTANTS[node.id] if node.id in _CONSTANTS else operands[int(node.id.removeprefix("x"))]
    return ast.literal_eval(node)


def _row(name: str, forms: Sequence[list[Any]]) -> Operator:
    signatures = tuple(
        Signature(tuple(map(tuple, shapes)), (("call", call),), tuple(holds)) for call, shapes, holds in forms
    )
    form: Form = lambda shape: signatures  # noqa: E731
    return Operator(name, lambda *operands, call: run_form(name, call, operands), form, rounds=True, has_samples=True)


def _read() -> tuple[tuple[Operator, ...], dict[str, str], dict[str, str]]:
    forms, left_out, undecided = defaultdict[str, list[list[Any]]](list), {}, {}
    for line in map(json.loads, FILE.read_text("utf-8").splitlines() if FILE.exists() else ()):
        if len(line) == 2:
            left_out[line[0]] = line[1]
        elif len(line) == 3:
            undecided[name_of(line[0], line[1])] = line[2]
        else:
            forms[name_of(line[0], line[1])].append(line[2:])
    here = {name: each for name, each in forms.items() if _is_in_torch(name)}
    here_undecided = {name: why for name, why in undecided.items() if _is_in_torch(name)}
    return tuple(_row(name, each) for name, each in here.items()), left_out, here_undecided


def _is_in_torch(name: str) -> bool:
    """True if this release of torch has the operator. Torch 2.11 has no `linear_cross_entropy`, for example."""
    operator = _operator_of(name)
    return function_of(_method_of(operator) if way_of(name) == IN_PLACE else operator) is not None


ROWS, LEFT_OUT, UNDECIDED = _read()
"""ROWS: operators with forms from torch's list. LEFT_OUT: operator -> reason why the list of forms leaves it out.
UNDECIDED: operator of ROWS -> reason why the oracle cannot judge any of its results."""
