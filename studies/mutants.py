"""Measures how many random changes of torch's own DTensor code a gate rejects: `python -m studies.mutants COVERAGE`.

A mutant is torch with one change at one place, such as `<` for `<=`, or Replicate() for Shard(dim).  A random generator
draws the places.  The first run records in the file COVERAGE the lines of torch that each call of a gate reaches; it
records a third of the calls of each operator.  A mutant is judged on the calls that reach its line, and then on all
calls of the same operators.  A mutant that no call rejects may compute the same as torch, which only a reader can tell.
"""

from __future__ import annotations

import argparse
import ast
import functools
import gc
import hashlib
import json
import os
import random
import sys
import threading
import time
import types
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from equivtest.cases.case import Case
from equivtest.cases.names import Subject, resolve
from equivtest.cases.subject import Answers, Given
from equivtest.errors import Misuse
from equivtest.property import Property
from equivtest.ranks.pool import Pool
from studies.whole_gate import visits
from tests.gate import KNOWN, known_in, rejects

FOLDER = Path(torch.distributed.tensor.__file__).parent
FILES = (
    "_api", "_collective_utils", "_dispatch", "_dtensor_spec", "_nonlinear_redux", "_redistribute", "_utils",
    "placement_types", "_ops/_common_rules", "_ops/_conv_ops", "_ops/_einsum_strategy", "_ops/_embedding_ops",
    "_ops/_mask_buffer", "_ops/_math_ops", "_ops/_matrix_ops", "_ops/_pointwise_ops", "_ops/_tensor_ops",
    "_ops/_view_ops", "_ops/single_dim_strategy", "_ops/utils",
)  # fmt: skip
PATHS = {str(FOLDER / f"{name}.py"): name for name in FILES}
EVERY = 3
"""One of so many calls of an operator is recorded."""
WRITES_TO = "EQUIVTEST_LINES"

SWAPS: dict[type[ast.AST], type[Any]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip
PLACEMENTS = {"Replicate": "Shard(0)", "Shard": "Replicate()", "Partial": "Replicate()"}


class Mutant(NamedTuple):
    """One change.

    Attributes:
        file: Name in FILES.
        number: Number of the changed node in the order of `ast.walk`.
        line: Line of the change.
        function: Qualified name of the outermost function or method around the line, and its first line.
        before, after: The line's expression before and after.
    """

    file: str
    number: int
    line: int
    function: tuple[str, int]
    before: str
    after: str

    @property
    def name(self) -> str:
        return f"{self.file.replace('/', '_of_')}_at_{self.number}"


@functools.cache
def tree_of(file: str) -> ast.Module:
    return ast.parse((FOLDER / f"{file}.py").read_text("utf-8"))


def changed(node: ast.AST) -> ast.AST | None:
    """Returns the node that takes the place of `node`, or None if there is none."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        return ast.Compare(node.left, [SWAPS[type(node.ops[0])]()], node.comparators)
    if isinstance(node, ast.BoolOp):
        return ast.BoolOp(SWAPS[type(node.op)](), node.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        return ast.BinOp(node.left, SWAPS[type(node.op)](), node.right)
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return ast.Constant(not node.value)
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return ast.Constant(node.value + 1)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in PLACEMENTS:
        return ast.parse(PLACEMENTS[node.func.id], mode="eval").body
    return None


def mutants_of(file: str) -> list[Mutant]:
    """Lists the changes of expressions within functions.

    Annotations, defaults, messages, and conditions that only decide whether an error is raised are left out.
    """
    numbers = {id(node): number for number, node in enumerate(ast.walk(tree_of(file)))}
    found: list[Mutant] = []

    def visit(node: ast.AST, path: tuple[str, ...], function: tuple[str, int] | None) -> None:
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.AnnAssign):
            return
        if function is not None and (after := changed(node)) is not None:
            place = Mutant(file, numbers[id(node)], node.lineno, function, ast.unparse(node), ast.unparse(after))  # type: ignore[attr-defined]
            found.append(place)
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            function = function or (".".join((*path, node.name)), first)
            children: Sequence[ast.AST] = node.body
        elif isinstance(node, ast.If) and all(isinstance(each, ast.Raise) for each in node.body):
            children = node.orelse
        else:
            children = list(ast.iter_child_nodes(node))
        inner = (*path, node.name) if isinstance(node, ast.ClassDef | ast.FunctionDef) else path
        for child in children:
            visit(child, inner, function)

    visit(tree_of(file), (), None)
    return found


class _Change(ast.NodeTransformer):
    def __init__(self, chosen: ast.AST, by: ast.AST) -> None:
        self.chosen, self.by = chosen, by

    def visit(self, node: ast.AST) -> Any:
        return ast.copy_location(self.by, node) if node is self.chosen else super().generic_visit(node)


def code_of(mutant: Mutant) -> types.CodeType:
    """Compiles the file with the change, and returns the code of the changed function."""
    path = FOLDER / f"{mutant.file}.py"
    tree = ast.parse(path.read_text("utf-8"))
    node = list(ast.walk(tree))[mutant.number]
    by = changed(node)
    assert by is not None
    mutated = ast.fix_missing_locations(_Change(node, by).visit(tree))
    [code] = [each for each in _codes_in(compile(mutated, str(path), "exec")) if _key(each) == mutant.function]
    return code


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _codes_in(each)


def _key(code: types.CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def plant(mutant: Mutant) -> None:
    """Changes the function in this process, wherever torch has registered it."""
    code, path = code_of(mutant), str(FOLDER / f"{mutant.file}.py")
    gc.unfreeze()
    functions = [
        each
        for each in gc.get_objects()
        if type(each) is types.FunctionType  # isinstance asks an object for its class, which some objects compute
        and each.__code__.co_filename == path
        and _key(each.__code__) == mutant.function
    ]
    if not functions:
        raise Misuse(f"no function {mutant.function} of {path} in this process")
    for each in functions:
        each.__code__ = code
    _clear_sharding_prop_cache()


@contextmanager
def traced(lines: set[tuple[str, int]]) -> Iterator[None]:
    """Adds the lines of PATHS that run in this context, in any thread that starts in it."""

    def local(frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            lines.add((PATHS[frame.f_code.co_filename], frame.f_lineno))
        return local

    def trace(frame: Any, event: str, arg: Any) -> Any:
        return local if frame.f_code.co_filename in PATHS else None

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]


def name_of(case: Case) -> str:
    return hashlib.sha256(repr(case).encode()).hexdigest()[:16]


_planted: set[str] = set()


def __getattr__(attribute: str) -> Subject:
    name, _, shipped = attribute.partition("__subject__")
    if not shipped:
        raise AttributeError(attribute)
    run = resolve(shipped)

    def recorded(case: Any, mesh: DeviceMesh, given: Given) -> Answers:
        lines: set[tuple[str, int]] = set()
        if torch.distributed.get_rank():
            return run(case, mesh, given)
        _clear_sharding_prop_cache()
        with traced(lines):
            answers = run(case, mesh, given)
        with Path(os.environ[WRITES_TO]).open("a") as file:
            file.write(json.dumps([name_of(case), sorted(lines)]) + "\n")
        return answers

    def mutated(case: Any, mesh: DeviceMesh, given: Given) -> Answers:
        if name not in _planted:
            _planted.add(name)
            file, _, number = name.partition("_at_")
            plant(next(each for each in mutants_of(file.replace("_of_", "/")) if each.number == int(number)))
        return run(case, mesh, given)

    return recorded if name == "recorded" else mutated


def record(path: Path, listed: Sequence[tuple[Property, Case]]) -> None:
    """Records the lines that rank 0 reaches, for one of EVERY calls of an operator and for all other cases.

    The file gets its name at the end, so an interrupted recording does not count.
    """
    seen: dict[str, int] = defaultdict(int)
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.unlink(missing_ok=True)
    with Pool(environment={WRITES_TO: str(unfinished)}) as pool:
        for prop, case in listed:
            operator = getattr(case, "operator", "")
            seen[operator] += 1
            if not operator or seen[operator] % EVERY == 1:
                pool.run(f"studies.mutants:recorded__subject__{prop.subject}", case)
    unfinished.rename(path)


class Reached(NamedTuple):
    """Names of the recorded cases that reach a line, and the operators of these cases."""

    cases: set[str]
    operators: set[str]


def reached_by(path: Path, listed: Sequence[tuple[Property, Case]]) -> dict[tuple[str, int], Reached]:
    operators = {name_of(case): getattr(case, "operator", "") for _, case in listed}
    found: dict[tuple[str, int], Reached] = defaultdict(lambda: Reached(set(), set()))
    for text in path.read_text("utf-8").splitlines():
        name, lines = json.loads(text)
        for file, line in lines:
            found[file, line].cases.add(name)
            found[file, line].operators.add(operators.get(name, ""))
    return found


def in_order(listed: Sequence[tuple[Property, Case]], reached: Reached) -> list[tuple[Property, Case]]:
    """Returns the cases that can show a change: those that reach it, then others of the same operators, in turns."""
    turns: dict[str, int] = defaultdict(int)
    keyed = []
    for prop, case in listed:
        operator = getattr(case, "operator", "")
        reaches = name_of(case) in reached.cases
        if reaches or (operator and operator in reached.operators):
            turns[operator + str(reaches)] += 1
            keyed.append((not reaches, turns[operator + str(reaches)], prop, case))
    return [(prop, case) for _, _, prop, case in sorted(keyed, key=lambda each: each[:2])]


def judged(mutant: Mutant, listed: Sequence[tuple[Property, Case]], server: Pool, seconds: float) -> tuple[str, int]:
    """Returns ('rejected by ...', or 'green', or 'open' if the time was over; number of visits).

    A case in which torch itself is rejected does not count.
    """
    until_s = time.monotonic() + seconds
    with Pool(beside=server) as pool, Pool(beside=server) as right:
        for number, (prop, case) in enumerate(listed, 1):
            planted = replace(prop, subject=f"studies.mutants:{mutant.name}__subject__{prop.subject}")
            try:
                if rejects(planted, known_in(prop.subject, planted.subject), case, pool) and not rejects(
                    prop, KNOWN, case, right
                ):
                    return f"rejected by {getattr(case, 'operator', prop.subject)}", number
            except Misuse as error:
                return f"rejected: {str(error).splitlines()[0][:90]}", number
            if time.monotonic() > until_s:
                return "open", number
    return "green", len(listed)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.mutants")
    parser.add_argument("coverage", type=Path)
    parser.add_argument("--number", type=int, default=40, help="mutants in all")
    parser.add_argument("--part", default="0/1", help="which of the mutants to judge, such as 0/2 and 1/2")
    parser.add_argument("--seconds", type=float, default=300.0, help="time limit of a mutant")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    part, parts = map(int, given.part.split("/"))
    listed = list(visits())
    if not given.coverage.exists():
        record(given.coverage, listed)
        return
    reached = reached_by(given.coverage, listed)
    places = [mutant for file in FILES for mutant in mutants_of(file)]
    usable = [mutant for mutant in places if (mutant.file, mutant.line) in reached]
    if part == 0:
        print(f"{len(places)} places, {len(usable)} on lines that the recorded calls reach", flush=True)
    drawn = random.Random(given.seed).sample(usable, given.number)
    with Pool() as server:
        for mutant in drawn[part::parts]:
            begun_s = time.monotonic()
            calls = in_order(listed, reached[mutant.file, mutant.line])
            verdict, number = judged(mutant, calls, server, given.seconds)
            seconds = time.monotonic() - begun_s
            where = f"{mutant.file}.py:{mutant.line} {mutant.function[0]}"
            print(
                f"| {where} | `{mutant.before[:60]}` | `{mutant.after[:60]}` | {verdict} | {number} of {len(calls)} | "
                f"{seconds:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
