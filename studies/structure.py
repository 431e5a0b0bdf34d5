"""Prints the structure of the package: `python -m studies.structure [CHECKOUT]`.

A room is a folder at the top level, or a loose module there.  The floor of a room is the length of the longest chain of
imports below it.  The path of a value is the modules that it enters as an argument, call by call.  A return is a call
into a module that the path has left.
"""

from __future__ import annotations

import ast
import functools
import itertools
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.engine.test_architecture import family_of, imports_in

PATHS = {
    "a captured run": ("captured.judge.run", "judge_run", "run"),
    "a case of a program, in the oracle": ("programs.oracle", "expect_module_held", "case"),
    "a case of a program, on a rank": ("programs.run.module", "run_module", "case"),
}
"""Description of a value -> (module, function, parameter) where its path begins."""

GROUND = ("base", "cases", "errors", "layout", "tensors")
"""Rooms that every module may import.  A path does not enter them."""

Imports = Mapping[str, frozenset[str]]
"""Module -> the modules of the package that it imports at run time.  Names lack 'equivtest.'."""


def imports_of_package(package: Path) -> Imports:
    paths = {_name_of(path.relative_to(package)): path for path in sorted(package.rglob("*.py"))}
    imports = {name: {full.removeprefix("equivtest.") for full in imports_in(path)} for name, path in paths.items()}
    return {name: frozenset(found & paths.keys()) for name, found in imports.items()}


def _name_of(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts if len(parts) == 1 or parts[-1] != "__init__" else parts[:-1])


def room_of(module: str) -> str:
    return module.partition(".")[0]


def between(imports: Imports, group_of: Mapping[str, str]) -> Counter[tuple[str, str]]:
    pairs = ((group_of[module], group_of[name]) for module, names in imports.items() for name in names)
    return Counter((group, other) for group, other in pairs if group and other and group != other)


def reached(start: str, arrows: Mapping[str, Iterable[str]]) -> set[str]:
    found: set[str] = set()
    waiting = list(arrows.get(start, ()))
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            waiting += arrows.get(current, ())
    return found


def circles(arrows: Mapping[str, Iterable[str]]) -> list[str]:
    return [name for name in arrows if name in reached(name, arrows)]


def num_floors(arrows: Mapping[str, Iterable[str]]) -> int:
    """Returns the number of rooms in the longest chain of imports.  A room in a circle counts once."""

    def height(name: str, above: frozenset[str]) -> int:
        below = set(arrows.get(name, ())) - above
        return 1 + max((height(each, above | {name}) for each in below), default=0)

    return max(height(name, frozenset()) for name in arrows)


@functools.cache
def _functions_and_origins(
    package: Path,
) -> tuple[dict[tuple[str, str], ast.FunctionDef], dict[str, dict[str, tuple[str, str]]]]:
    trees = {_name_of(path.relative_to(package)): ast.parse(path.read_text()) for path in package.rglob("*.py")}
    functions = {
        (module, node.name): node
        for module, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }
    return functions, {module: dict(_origins_in(tree)) for module, tree in trees.items()}


class Walk:
    """Follows a value through the package, into each function that the value, or a result computed from it, enters.

    Each function is entered once, in the order of the source.

    Attributes:
        modules: Module of each entered function. Two successive modules differ.
    """

    def __init__(self, package: Path) -> None:
        self._functions, self._origins = _functions_and_origins(package)
        self._seen: set[tuple[str, str]] = set()
        self.modules: list[str] = []

    def follow(self, module: str, function: str, *parameters: str) -> None:
        """Enters a function whose `parameters`, or all parameters, carry the value, and follows its calls."""
        if self.modules[-1:] != [module]:
            self.modules.append(module)
        if (module, function) in self._seen:
            return
        self._seen.add((module, function))
        node = self._functions[module, function]
        carriers = _computed_from(set(parameters or _parameters_of(node)), node)
        for call in _calls_in(node):
            arguments = [*call.args, *(each.value for each in call.keywords)]
            if any(_mentions(each, carriers) for each in (*arguments, call.func)):
                for callee in (call.func, *arguments):
                    self._enter(module, callee, call, carriers)

    def _enter(self, module: str, callee: ast.expr, call: ast.Call, carriers: set[str]) -> None:
        place = self._place_of(module, callee)
        if place is None:
            return
        by_place = zip(_parameters_of(self._functions[place]), call.args, strict=False)
        passed = [*by_place, *((f"{each.arg}", each.value) for each in call.keywords)] if callee is call.func else []
        self.follow(*place, *(name for name, each in passed if _mentions(each, carriers)))

    def _place_of(self, module: str, callee: ast.expr) -> tuple[str, str] | None:
        """Returns (module, name) of a called function that the path enters, or None for a method and for GROUND."""
        if not isinstance(callee, ast.Name):
            return None
        place = self._origins[module].get(callee.id, (module, callee.id))
        return place if place in self._functions and room_of(place[0]) not in GROUND else None


def _origins_in(tree: ast.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and f"{node.module}".startswith("equivtest."):
            for alias in node.names:
                yield alias.asname or alias.name, (f"{node.module}".removeprefix("equivtest."), alias.name)


def _parameters_of(node: ast.FunctionDef) -> list[str]:
    return [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]


def _calls_in(node: ast.AST) -> Iterator[ast.Call]:
    """Yields calls in the order in which they run: arguments before the call."""
    for child in ast.iter_child_nodes(node):
        yield from _calls_in(child)
    if isinstance(node, ast.Call):
        yield node


def _mentions(node: ast.AST, names: set[str]) -> bool:
    return any(isinstance(each, ast.Name) and each.id in names for each in ast.walk(node))


def _computed_from(names: set[str], function: ast.FunctionDef) -> set[str]:
    steps = [(target, value) for node in ast.walk(function) for target, value in _bindings_of(node)]
    while found := {
        each.id for target, value in steps if _mentions(value, names) for each in ast.walk(target)
        if isinstance(each, ast.Name)
    } - names:  # fmt: skip
        names = names | found
    return names


def _bindings_of(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    if isinstance(node, ast.Assign):
        yield from ((target, node.value) for target in node.targets)
    elif isinstance(node, ast.For | ast.comprehension):
        yield node.target, node.iter
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value:
        yield node.target, node.value


def num_returns(path: Sequence[str]) -> int:
    return len(path) - len(set(path))


def path_lines(package: Path) -> Iterator[str]:
    for value, start in PATHS.items():
        walk = Walk(package)
        walk.follow(*start)
        rooms = itertools.groupby(name for name in walk.modules if room_of(name) == room_of(start[0]))
        own = [name for name, _ in rooms]
        yield (
            f"path of {value}: {len(set(walk.modules))} modules, {num_returns(walk.modules)} returns; in its room: "
            f"{len(set(own))}, {num_returns(own)}"
        )


def lines_of(package: Path) -> list[str]:
    imports = imports_of_package(package)
    rooms = {module: room_of(module) for module in imports}
    loose = sorted(path.stem for path in package.glob("*.py"))
    folders = sorted({room for room in rooms.values() if room not in loose})
    arrows: dict[str, set[str]] = {room: set() for room in rooms.values()}
    for room, other in between(imports, rooms):
        arrows[room].add(other)
    families = {module: family_of(module) for module in imports}
    within = sum(1 for module, names in imports.items() for name in names if families[module] == families[name] != "")
    across = between(imports, families).total()
    return [
        f"{len(loose)} loose modules: {', '.join(loose)}",
        f"{len(folders)} rooms: {', '.join(folders)}",
        f"{sum(map(len, arrows.values()))} pairs of rooms with an import between them, {num_floors(arrows)} floors",
        f"{between(imports, rooms).total()} imports between rooms",
        f"{within} imports within a family, {across} between families",
        f"{len(circles(imports))} modules and {len(circles(arrows))} rooms in a circle",
        *path_lines(package),
    ]


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    sys.stdout.write("\n".join(lines_of(root / "equivtest")) + "\n")


if __name__ == "__main__":
    main()
