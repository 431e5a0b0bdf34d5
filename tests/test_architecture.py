"""Imports point down, and what is heavy or global has one home.  ARCHITECTURE.md tells why."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "equivtest"
OWN_FOLDERS = ("equivtest", "properties", "tests", "benchmarks")

FLOORS = (
    ("collective", "errors", "files", "limits", "refusal"),
    ("importing", "layout", "local_constants", "profiles", "property"),
    ("lacking",),
    ("tensors",),
    ("cases",),
    ("oracle", "subjects", "verdicts.verdict"),
    ("defects", "ranks"),
    ("verdicts",),
    ("check", "known", "report"),
    ("chunks", "module", "records", "replay", "settings", "suite"),
    ("audit", "filling"),
    ("machine", "search", "options"),
    ("pools",),
    ("fixture", "items", "session"),
    ("collection",),
    ("plugin",),
    ("cli",),
    ("__init__",),
)
"""Modules and packages of equivtest, the lowest first: each imports itself and lower floors only."""

HOMES = {
    "multiprocessing": ("ranks",),
    "torch.multiprocessing": ("ranks",),
    "hypothesis": ("cases.strategies", "chunks", "local_constants", "search"),
    "pytest": ("plugin", "options", "cli", "collection", "fixture", "items", "pools", "session"),
    "jinja2": ("report",),
    "typer": ("cli",),
}
"""Who may import what is heavy, or holds state of the whole process."""


def name_of(path: Path) -> str:
    """'cases.base' for equivtest/cases/base.py, 'cases' for its __init__."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts if len(parts) == 1 or parts[-1] != "__init__" else parts[:-1])


PATHS = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def run_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below `node`, less the bodies of `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from run_time_nodes(child)


@cache
def imports_of(module: str) -> frozenset[str]:
    """Everything that a module of equivtest imports at run time, by its full name."""
    names: set[str] = set()
    for node in run_time_nodes(ast.parse(PATHS[module].read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


@cache
def own_imports_of(module: str) -> frozenset[str]:
    """The modules of equivtest among them, as keys of PATHS."""
    inside = {name.removeprefix("equivtest.") for name in imports_of(module) if name.startswith("equivtest.")}
    return frozenset(inside & PATHS.keys())


def reached_from(module: str) -> set[str]:
    """The module and all that it imports, directly or not."""
    reached: set[str] = set()
    waiting = {module}
    while waiting:
        current = waiting.pop()
        reached.add(current)
        waiting |= own_imports_of(current) - reached
    return reached


def entry_of(module: str) -> tuple[int, str]:
    """Floor and entry of the table that a module belongs to; the longest entry counts."""
    entries = [(len(entry), floor, entry) for floor, names in enumerate(FLOORS) for entry in names]
    matching = [(size, floor, entry) for size, floor, entry in entries if is_within(module, entry)]
    assert matching, f"{module} has no floor: add it to FLOORS"
    _, floor, entry = max(matching)
    return floor, entry


@pytest.mark.parametrize("module", PATHS)
def test_imports_point_down(module: str) -> None:
    floor, entry = entry_of(module)

    for imported in own_imports_of(module):
        imported_floor, imported_entry = entry_of(imported)
        assert imported_floor < floor or imported_entry == entry, f"{module} imports {imported}"


def test_every_entry_of_the_table_is_there() -> None:
    entries = {entry for names in FLOORS for entry in names} | {home for homes in HOMES.values() for home in homes}

    assert entries <= PATHS.keys()


def test_no_module_imports_itself_by_way_of_others() -> None:
    for module in PATHS:
        for imported in own_imports_of(module):
            assert module not in reached_from(imported), f"{module} -> {imported} -> ... -> {module}"


@pytest.mark.parametrize("module", PATHS)
def test_what_is_heavy_is_imported_at_home_only(module: str) -> None:
    for name, homes in HOMES.items():
        if not any(is_within(module, home) for home in homes):
            assert not any(is_within(imported, name) for imported in imports_of(module)), f"{module} imports {name}"


@pytest.mark.parametrize(("package", "other"), [("oracle", "subjects"), ("subjects", "oracle")])
def test_oracle_and_subjects_do_not_know_each_other(package: str, other: str) -> None:
    for module in PATHS:
        if is_within(module, package):
            assert not any(is_within(reached, other) for reached in reached_from(module)), module


def test_the_oracle_knows_nothing_of_ranks() -> None:
    for module in PATHS:
        if is_within(module, "oracle"):
            imported = {name for reached in reached_from(module) for name in imports_of(reached)}
            assert not any(is_within(name, "torch.distributed") for name in imported), module


def test_only_type_checking_imports_are_left_out() -> None:
    """property.py names a strategy and a claim in annotations, and imports neither."""
    assert "hypothesis" in PATHS["property"].read_text()
    assert not any(is_within(name, "hypothesis") for name in imports_of("property"))


def test_the_plugin_is_light_until_it_is_used() -> None:
    """It is loaded by every pytest of an environment that has equivtest."""
    code = "import sys, equivtest.plugin; print([name for name in ('torch', 'hypothesis') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )

    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize("folder", OWN_FOLDERS)
def test_code_is_ascii(folder: str) -> None:
    for path in sorted((ROOT / folder).rglob("*.py")):
        assert path.read_bytes().isascii(), path
