"""Measures how many random changes of torch's own code a gate rejects: `python -m studies.mutants COVERAGE`.

A mutant is torch with one change at one place, such as `<` for `<=`, Replicate() for Shard(dim), or a call that is left
out.  A random generator draws the places in an area of torch.  The first run records in the file COVERAGE the lines of
torch that some cases of a gate reach.  A mutant is judged on the cases that reach its line, and then on all cases of
the same operators or properties.  A mutant that no case rejects may compute the same as torch, which only a reader can
tell.
"""

from __future__ import annotations

import argparse
import ast
import functools
import gc
import hashlib
import importlib
import json
import os
import random
import re
import sys
import threading
import time
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from equivtest.base.profiles import PROFILES
from equivtest.cases.case import Case
from equivtest.cases.names import Subject, resolve
from equivtest.cases.subject import Answers, Given
from equivtest.errors import Misuse
from equivtest.property import Property, resolved
from equivtest.pytest_plugin.suite import shipped
from equivtest.ranks.backend import Backend
from equivtest.ranks.pool import Pool
from equivtest.ranks.reply import Reply
from studies import whole_gate
from tests.gate import KNOWN, cases_of, in_turns, known_in, rejects

FOLDER = Path(torch.__file__).parent
OPERATORS = (
    "_api", "_collective_utils", "_dispatch", "_dtensor_spec", "_nonlinear_redux", "_redistribute", "_utils",
    "placement_types", "_ops/_common_rules", "_ops/_conv_ops", "_ops/_einsum_strategy", "_ops/_embedding_ops",
    "_ops/_mask_buffer", "_ops/_math_ops", "_ops/_matrix_ops", "_ops/_pointwise_ops", "_ops/_tensor_ops",
    "_ops/_view_ops", "_ops/single_dim_strategy", "_ops/utils",
)  # fmt: skip
TRAINING = (
    "distributed/fsdp/**/*", "distributed/tensor/parallel/*", "distributed/pipelining/*", "nn/parallel/distributed",
    "distributed/algorithms/**/*", "distributed/_composable/*", "distributed/optim/[!f]*", "distributed/checkpoint/*",
    "distributed/nn/functional", "distributed/_functional_collectives", "distributed/_state_dict_utils",
    "distributed/utils", "distributed/device_mesh", "nn/utils/clip_grad", "optim/*", "amp/grad_scaler",
    "utils/checkpoint",
)  # fmt: skip
WRITES_TO = "EQUIVTEST_LINES"
OWN_RANKS = Backend(imports=("studies.mutants",))
"""Ranks that import this module once, before they are forked."""


class Visit(NamedTuple):
    """A case of a gate, with its operator or the name of its property."""

    kind: str
    prop: Property
    case: Case


class Area(NamedTuple):
    """Files of torch, and the cases that judge them.

    Attributes:
        patterns: Names in the folder of torch, without '.py'.
        visits: Returns the cases of a gate. The pool runs the cases on which a property depends.
        is_recorded: Function (kind, number) -> whether the lines of a case are recorded. The number counts the cases
            of the same kind and world size, from 1.
    """

    patterns: tuple[str, ...]
    visits: Callable[[Pool], list[Visit]]
    is_recorded: Callable[[str, int], bool]

    @property
    def files(self) -> list[str]:
        found = [path for pattern in self.patterns for path in sorted(FOLDER.glob(f"{pattern}.py"))]
        return [str(path.relative_to(FOLDER).with_suffix("")) for path in found]


def of_operators(pool: Pool) -> list[Visit]:
    return [Visit(getattr(case, "operator", prop.subject), prop, case) for prop, case in whole_gate.visits()]


def of_all_others(pool: Pool) -> list[Visit]:
    """Returns the cases of all properties that are not about operators. The properties take turns."""
    listed = []
    for name, prop in shipped().items():
        if not name.startswith("dtensor_operator") and not prop.absent:
            prop = resolved(prop, pool)
            listed.append([Visit(name, prop, case) for case in cases_of(prop, PROFILES["gate"])])
    return in_turns(listed)


AREAS = {
    "operators": Area(
        tuple(f"distributed/tensor/{name}" for name in OPERATORS),
        of_operators,
        lambda kind, number: kind in whole_gate.PROPERTIES or number % 3 == 1,
    ),
    "training": Area(TRAINING, of_all_others, lambda kind, number: number <= 6),
}

SWAPS: dict[type[ast.AST], type[Any]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip
PLACEMENTS = {"Replicate": "Shard(0)", "Shard": "Replicate()", "Partial": "Replicate()"}


class Mutant(NamedTuple):
    """One change.

    Attributes:
        file: Path in the folder of torch, without '.py'.
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
    if isinstance(node, ast.AugAssign) and type(node.op) in SWAPS:
        return ast.AugAssign(node.target, SWAPS[type(node.op)](), node.value)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return ast.Pass()
    return None


def is_message(node: ast.AST) -> bool:
    """True for code that only raises, warns, logs or makes text."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return bool(re.match(r"(_?log|_?warn|super\(\)\.__init__|torch\._C\._log|dist_logger)", ast.unparse(node)))
    return isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.AnnAssign)


def mutants_of(file: str) -> list[Mutant]:
    """Lists the changes of expressions within functions.

    Annotations, defaults, messages, and conditions that only decide whether an error is raised are left out.
    """
    numbers = {id(node): number for number, node in enumerate(ast.walk(tree_of(file)))}
    found: list[Mutant] = []

    def visit(node: ast.AST, path: tuple[str, ...], function: tuple[str, int] | None) -> None:
        if is_message(node):
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
    """Changes the function, and the functions in it, in this process, wherever torch has registered them."""
    for function, code in replacements(mutant):
        function.__code__ = code
    _clear_sharding_prop_cache()


def replacements(mutant: Mutant) -> list[tuple[types.FunctionType, types.CodeType]]:
    importlib.import_module(f"torch.{mutant.file.replace('/', '.')}")
    path = str(FOLDER / f"{mutant.file}.py")
    codes = {_key(code): code for code in _codes_in(code_of(mutant))}
    gc.unfreeze()
    found = [
        (each, codes[_key(each.__code__)])
        for each in gc.get_objects()
        if type(each) is types.FunctionType  # isinstance asks an object for its class, which some objects compute
        and each.__code__.co_filename == path
        and _key(each.__code__) in codes
    ]
    if not found:
        raise Misuse(f"no function {mutant.function} of {path} in this process")
    return found


@functools.cache
def paths_of(area: str) -> dict[str, str]:
    return {str(FOLDER / f"{file}.py"): file for file in AREAS[area].files}


@contextmanager
def traced(area: str, lines: set[tuple[str, int]]) -> Iterator[None]:
    """Adds the lines of the area that run in this context, in any thread that threading starts in it."""
    paths = paths_of(area)

    def local(frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            lines.add((paths[frame.f_code.co_filename], frame.f_lineno))
        return local

    def trace(frame: Any, event: str, arg: Any) -> Any:
        return local if frame.f_code.co_filename in paths else None

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
        if torch.distributed.get_rank() not in (0, torch.distributed.get_world_size() - 1):
            return run(case, mesh, given)
        _clear_sharding_prop_cache()
        with traced(name.removeprefix("recorded_"), lines):
            answers = run(case, mesh, given)
        with Path(os.environ[WRITES_TO]).open("ab", buffering=0) as file:  # a line in one write
            file.write((json.dumps([name_of(case), sorted(lines)]) + "\n").encode())
        return answers

    def mutated(case: Any, mesh: DeviceMesh, given: Given) -> Answers:
        if name not in _planted:
            _planted.add(name)
            file, _, number = name.partition("_at_")
            plant(next(each for each in mutants_of(file.replace("_of_", "/")) if each.number == int(number)))
        return run(case, mesh, given)

    return recorded if name.startswith("recorded_") else mutated


class ShortPool(Pool):
    """Ends a case after 20 s, because many mutants hang."""

    def run(self, subject: str, case: Case, **how: Any) -> list[Reply]:
        return super().run(subject, case, **{"limit_s": 20.0, **how})


def record(path: Path, area: str, listed: Sequence[Visit]) -> None:
    """Records the lines that the first and the last rank reach.

    The file gets its name at the end, so an interrupted recording does not count.
    """
    seen: dict[tuple[str, int], int] = defaultdict(int)
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.unlink(missing_ok=True)
    with Pool(OWN_RANKS, environment={WRITES_TO: str(unfinished)}) as pool:
        for kind, prop, case in listed:
            seen[kind, case.world_size] += 1
            if AREAS[area].is_recorded(kind, seen[kind, case.world_size]):
                pool.run(f"studies.mutants:recorded_{area}__subject__{prop.subject}", case)
    unfinished.rename(path)


class Reached(NamedTuple):
    """Names of the recorded cases that reach a line, and the kinds of these cases."""

    cases: set[str]
    kinds: set[str]


def reached_by(path: Path, listed: Sequence[Visit]) -> dict[tuple[str, int], Reached]:
    kinds = {name_of(each.case): each.kind for each in listed}
    found: dict[tuple[str, int], Reached] = defaultdict(lambda: Reached(set(), set()))
    for text in path.read_text("utf-8").splitlines():
        name, lines = json.loads(text)
        for file, line in lines:
            found[file, line].cases.add(name)
            found[file, line].kinds.add(kinds.get(name, ""))
    return found


def in_order(listed: Sequence[Visit], reached: Reached) -> list[Visit]:
    """Returns the cases that can show a change: those that reach it, then others of the same kinds, in turns."""
    turns: dict[tuple[str, bool], int] = defaultdict(int)
    keyed = []
    for each in listed:
        reaches = name_of(each.case) in reached.cases
        if reaches or each.kind in reached.kinds:
            turns[each.kind, reaches] += 1
            keyed.append((not reaches, turns[each.kind, reaches], each))
    return [each for _, _, each in sorted(keyed, key=lambda each: each[:2])]


def judged(mutant: Mutant, listed: Sequence[Visit], server: Pool, seconds: float) -> tuple[str, int]:
    """Returns ('rejected by ...', or 'green', or 'open' if the time was over; number of visits).

    A case in which torch itself is rejected does not count.
    """
    until_s = time.monotonic() + seconds
    with ShortPool(OWN_RANKS, beside=server) as pool, Pool(beside=server) as right:
        for number, (kind, prop, case) in enumerate(listed, 1):
            planted = replace(prop, subject=f"studies.mutants:{mutant.name}__subject__{prop.subject}")
            try:
                if rejects(planted, known_in(prop.subject, planted.subject), case, pool) and not rejects(
                    prop, KNOWN, case, right
                ):
                    return f"rejected by {kind}", number
            except Misuse as error:
                return f"rejected: {str(error).splitlines()[0][:90]}", number
            if time.monotonic() > until_s:
                return "open", number
    return "green", len(listed)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.mutants")
    parser.add_argument("coverage", type=Path)
    parser.add_argument("--area", choices=AREAS, default="operators", help="what of torch is changed")
    parser.add_argument("--number", type=int, default=40, help="mutants in all")
    parser.add_argument("--part", default="0/1", help="which of the mutants to judge, such as 0/2 and 1/2")
    parser.add_argument("--seconds", type=float, default=300.0, help="time limit of a mutant")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    part, parts = map(int, given.part.split("/"))
    with Pool(OWN_RANKS) as server:
        listed = AREAS[given.area].visits(server)
        if not given.coverage.exists():
            record(given.coverage, given.area, listed)
            return
        reached = reached_by(given.coverage, listed)
        places = [mutant for file in AREAS[given.area].files for mutant in mutants_of(file)]
        usable = [mutant for mutant in places if (mutant.file, mutant.line) in reached]
        if part == 0:
            print(f"{len(places)} places, {len(usable)} on lines that the recorded cases reach", flush=True)
        drawn = random.Random(given.seed).sample(usable, given.number)
        for mutant in drawn[part::parts]:
            begun_s = time.monotonic()
            visits = in_order(listed, reached[mutant.file, mutant.line])
            verdict, number = judged(mutant, visits, server, given.seconds)
            seconds = time.monotonic() - begun_s
            where = f"{mutant.file}.py:{mutant.line} {mutant.function[0]}"
            print(
                f"| {where} | `{mutant.before[:60]}` | `{mutant.after[:60]}` | {verdict} | {number} of {len(visits)} | "
                f"{seconds:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
