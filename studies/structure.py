"""The structure of the package: `python -m studies.structure [CHECKOUT]`.

A room is a folder at the top level, and a module that lies loose there is a room of its own.  The floor of a room is
the length of the longest chain of imports below it.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

Imports = Mapping[str, frozenset[str]]
"""Module -> the modules of the package that it imports at run time; names without 'equivtest.'."""


def imports_of_package(package: Path) -> Imports:
    """Reads every module of the package."""
    paths = {_name_of(path.relative_to(package)): path for path in sorted(package.rglob("*.py"))}
    return {name: frozenset(_imported_in(path) & paths.keys()) for name, path in paths.items()}


def _name_of(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts if len(parts) == 1 or parts[-1] != "__init__" else parts[:-1])


def _imported_in(path: Path) -> set[str]:
    names: set[str] = set()
    for node in _run_time_nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name.removeprefix("equivtest.") for name in names if name.startswith("equivtest.")}


def _run_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _run_time_nodes(child)


def room_of(module: str) -> str:
    """The first name of a module."""
    return module.partition(".")[0]


def family_of(module: str) -> str:
    """The family that a module belongs to; '' for all others."""
    names = module.split(".")
    return names[1] if names[0] == "families" and len(names) > 1 else ""


def between(imports: Imports, group_of: Mapping[str, str]) -> Counter[tuple[str, str]]:
    """The number of imports from one group of modules to another."""
    pairs = ((group_of[module], group_of[name]) for module, names in imports.items() for name in names)
    return Counter((group, other) for group, other in pairs if group and other and group != other)


def reached(start: str, arrows: Mapping[str, Iterable[str]]) -> set[str]:
    """Everything that an arrow leads to from `start`, directly or not."""
    found: set[str] = set()
    waiting = list(arrows.get(start, ()))
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            waiting += arrows.get(current, ())
    return found


def circles(arrows: Mapping[str, Iterable[str]]) -> list[str]:
    """Those from which arrows lead back to themselves."""
    return [name for name in arrows if name in reached(name, arrows)]


def num_floors(arrows: Mapping[str, Iterable[str]]) -> int:
    """The number of rooms in the longest chain; a room in a circle counts once."""

    def height(name: str, above: frozenset[str]) -> int:
        below = set(arrows.get(name, ())) - above
        return 1 + max((height(each, above | {name}) for each in below), default=0)

    return max(height(name, frozenset()) for name in arrows)


def lines_of(package: Path) -> list[str]:
    """The lines that the command prints."""
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
        f"{sum(map(len, arrows.values()))} pairs of rooms of which one imports the other, {num_floors(arrows)} floors",
        f"{between(imports, rooms).total()} imports between rooms",
        f"{within} imports within a family, {across} between families",
        f"{len(circles(imports))} modules and {len(circles(arrows))} rooms in a circle",
    ]


def main() -> None:
    """Prints the lines for this checkout, or for another one."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    sys.stdout.write("\n".join(lines_of(root / "equivtest")) + "\n")


if __name__ == "__main__":
    main()
