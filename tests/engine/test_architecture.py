"""Imports point down, and what is heavy or global has one home.  ARCHITECTURE.md tells why."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "equivtest"
OWN_FOLDERS = ("equivtest", "properties", "tests", "studies", "examples")

FLOORS = (
    ("errors",),
    ("base", "layout"),
    ("property", "tensors"),
    ("cases",),
    ("oracle", "ranks"),
    ("families", "fingerprint", "rank", "verdicts"),
    ("programs", "report", "verdicts.judging"),
    ("captured", "diagnose", "programs.property"),
    ("capturing", "search"),
    ("bundle", "programs.checking"),
    ("programs.program",),
    ("module", "pytest_plugin"),
    ("templates",),
    ("__init__", "cli", "options", "plugin"),
    ("__main__",),
)
"""Modules and packages of equivtest, the lowest first: each imports itself and lower floors only."""

MOST_LOOSE = 12
"""Modules at the top level that lie in no room: each is one that users name, or that every room imports."""

HOMES = {
    "multiprocessing": ("ranks",),
    "torch.multiprocessing": ("ranks",),
    "hypothesis": ("cases.drawing", "families.*.strategy", "search"),
    "pytest": ("plugin", "pytest_plugin"),
    "jinja2": ("report",),
    "typer": ("cli",),
}
"""Who may import what is heavy, or holds state of the whole process; the strategies of each family among them."""

PARTS = {
    "case": ("case",),
    "known": ("case", "known"),
    "strategy": ("case", "strategy"),
    "values": ("case", "values"),
    "oracle": ("case", "values", "oracle"),
    "subject": ("case", "subject"),
}
"""Parts of a family -> parts that each may import, from its own family and from families that it knows."""

PARTS_OF_KIT = {
    "cases.case": "case",
    "cases.activation": "case",
    "cases.picks": "strategy",
    "cases.values": "values",
    "oracle": "oracle",
    "cases.subject": "subject",
}
"""Modules of each part that all families share."""

PARTS_OF_PROGRAMS = {"oracle": "oracle", "run": "subject", "strategy": "strategy", "values": "values"}
"""The folders and modules of programs/ that are a part; any part may import all others that lie there."""

KNOWN_FAMILIES = {
    "training": ("linear", "zero3"),
}
"""Which other families a family imports; all others import none."""


def name_of(path: Path) -> str:
    """'cases.case' for equivtest/cases/case.py, 'cases' for its __init__."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts if len(parts) == 1 or parts[-1] != "__init__" else parts[:-1])


DEFECTS = sorted((ROOT / "tests" / "defects").rglob("*.py"))
PATHS = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def part_of(module: str) -> str:
    """Which part of a family, or of what they share, a module belongs to; '' for all others."""
    if module.startswith("programs."):
        return PARTS_OF_PROGRAMS.get(module.split(".")[1], "")
    if module.startswith("families."):
        names = (name.partition("_")[0] for name in module.split(".")[2:])  # case_refused is part of case
        part = next((name for name in names if name in PARTS or name == "collectives"), "")
        return "oracle" if part == "collectives" else part
    return next((part for shared, part in PARTS_OF_KIT.items() if is_within(module, shared)), "")


def family_of(module: str) -> str:
    """'training' for families.training.two_axes.case; '' outside of the families."""
    names = module.split(".")
    return names[1] if names[0] == "families" and len(names) > 1 else ""


def is_at_home(module: str, home: str) -> bool:
    return is_within(module, home) or (home == f"families.*.{part_of(module)}" and bool(family_of(module)))


def run_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below `node`, less the bodies of `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from run_time_nodes(child)


@cache
def imports_in(path: Path) -> frozenset[str]:
    """Everything that a file imports at run time, by its full name."""
    names: set[str] = set()
    for node in run_time_nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


def imports_of(module: str) -> frozenset[str]:
    return imports_in(PATHS[module])


@cache
def own_imports_in(path: Path) -> frozenset[str]:
    """The modules of equivtest that a file imports, as keys of PATHS."""
    inside = {name.removeprefix("equivtest.") for name in imports_in(path) if name.startswith("equivtest.")}
    return frozenset(inside & PATHS.keys())


def own_imports_of(module: str) -> frozenset[str]:
    """The modules of equivtest that a module imports, as keys of PATHS."""
    return own_imports_in(PATHS[module])


def reached_from(module: str) -> set[str]:
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
def test_modules_import_from_lower_floors_only(module: str) -> None:
    floor, entry = entry_of(module)

    for imported in own_imports_of(module):
        imported_floor, imported_entry = entry_of(imported)
        assert imported_floor < floor or imported_entry == entry, f"{module} imports {imported}"


def test_package_root_contains_few_modules() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_LOOSE


def test_every_module_in_the_table_of_imports_exists() -> None:
    homes = {home for homes in HOMES.values() for home in homes if "*" not in home}
    entries = {entry for names in FLOORS for entry in names} | homes | PARTS_OF_KIT.keys()

    assert entries <= PATHS.keys()


def test_no_imports_form_a_cycle() -> None:
    for module in PATHS:
        for imported in own_imports_of(module):
            assert module not in reached_from(imported), f"{module} -> {imported} -> ... -> {module}"


@pytest.mark.parametrize("module", PATHS)
def test_heavy_package_is_imported_only_where_the_table_allows(module: str) -> None:
    for name, homes in HOMES.items():
        if not any(is_at_home(module, home) for home in homes):
            assert not any(is_within(imported, name) for imported in imports_of(module)), f"{module} imports {name}"


def test_file_of_a_family_imports_only_files_that_the_table_of_parts_allows() -> None:
    for module in PATHS:
        for imported in own_imports_of(module):
            if part_of(module) and part_of(imported):
                assert part_of(imported) in PARTS[part_of(module)], f"{module} imports {imported}"


def test_every_module_of_a_family_is_a_known_part_such_as_case_or_oracle() -> None:
    for module, path in PATHS.items():
        if family_of(module) and path.name != "__init__.py":
            assert part_of(module), module


def test_family_imports_only_families_that_the_table_allows() -> None:
    for module in PATHS:
        for imported in own_imports_of(module):
            family, other = family_of(module), family_of(imported)
            if family and other and family != other:
                assert other in KNOWN_FAMILIES.get(family, ()), f"{module} imports {imported}"


def test_no_module_outside_the_families_imports_a_family() -> None:
    knowing = {module for module in PATHS if not family_of(module) and any(map(family_of, own_imports_of(module)))}

    assert not knowing


@pytest.mark.parametrize(("part", "others"), [("oracle", {"subject"}), ("subject", {"oracle"})])
def test_oracle_and_subjects_never_import_each_other(part: str, others: set[str]) -> None:
    for module in PATHS:
        if part_of(module) == part:
            assert others.isdisjoint({part_of(reached) for reached in reached_from(module)}), module


@pytest.mark.parametrize("path", DEFECTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_defects_import_no_oracle(path: Path) -> None:
    reached = {name for imported in own_imports_in(path) for name in reached_from(imported)}

    assert "oracle" not in {part_of(name) for name in reached}


def test_package_imports_only_modules_that_ship_with_it() -> None:
    for module in PATHS:
        assert not any(is_within(name, top) for name in imports_of(module) for top in OWN_FOLDERS[1:]), module


def test_oracle_never_imports_torch_distributed() -> None:
    for module in PATHS:
        if part_of(module) == "oracle":
            imported = {name for reached in reached_from(module) for name in imports_of(reached)}
            assert not any(is_within(name, "torch.distributed") for name in imported), module


def test_list_of_imports_leaves_out_imports_under_type_checking() -> None:
    """property.py names a strategy and a claim in annotations, and imports neither."""
    assert "hypothesis" in PATHS["property"].read_text()
    assert not any(is_within(name, "hypothesis") for name in imports_of("property"))


def test_plugin_imports_no_torch_and_no_hypothesis_until_it_is_used() -> None:
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
