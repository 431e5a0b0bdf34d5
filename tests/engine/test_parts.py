"""Families are found by their folders, and each part is imported when it is first asked for."""

import json
import subprocess
import sys

import pytest

from equivtest.cases.names import SUBJECTS
from equivtest.cases.parts import FAMILIES, modules_of, packages
from equivtest.pytest_plugin.suite import shipped
from tests.defects.defect import defects


def printed_by(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=120
    ).stdout.strip()


def family_of(name: str) -> str:
    return name.removeprefix(f"{FAMILIES}.").partition(".")[0]


def test_subfolder_of_a_family_is_a_variant_unless_it_has_the_name_of_a_part() -> None:
    found = {name.removeprefix(f"{FAMILIES}.") for name in packages()}

    assert {"collectives", "embedding", "training.two_axes"} <= found
    assert found.isdisjoint({"training.two_axes.collectives", "linear.values", "training.zero3.subject"})


def test_every_subject_of_a_shipped_property_belongs_to_a_family() -> None:
    used = {prop.subject for prop in shipped().values() if ":" not in prop.subject}

    assert used == SUBJECTS.keys()


def test_every_family_with_a_case_has_an_oracle() -> None:
    families = {family_of(module.__name__) for module in modules_of("case")}

    assert families == {family_of(module.__name__) for module in modules_of("oracle")}
    assert families == {family_of(type(defect.smallest).__module__) for defect in defects()}


IMPORTED = """
import json, sys
def imported():
    print(json.dumps(sorted(sys.modules)))
import equivtest.cases.names
imported()
from equivtest.families.linear.case import LinearCase
case = LinearCase(world_size=1, style="rowwise")
imported()
from equivtest.cases.values import draw; draw(case, 0)
imported()
from equivtest.oracle import expect; expect(case, 0)
imported()
"""
"""Prints the modules of a process after it has used the names, the case, the values and the oracle of a family."""


@pytest.fixture(scope="module")
def imported() -> dict[str, set[str]]:
    """Last part that a new process has used -> its modules then."""
    used = ("names", "case", "values", "oracle")
    return {part: set(json.loads(line)) for part, line in zip(used, printed_by(IMPORTED).splitlines(), strict=True)}


@pytest.mark.parametrize(
    ("used", "wanted", "unwanted"),
    [
        ("case", "linear.case", "linear.values"),
        ("values", "linear.values", "linear.oracle"),
        ("oracle", "linear.oracle", "linear.subject"),
    ],
    ids=["case", "values", "oracle"],
)
def test_part_of_a_family_is_imported_only_when_it_is_used(
    imported: dict[str, set[str]], used: str, wanted: str, unwanted: str
) -> None:
    loaded = imported[used]

    assert f"{FAMILIES}.{wanted}" in loaded and f"{FAMILIES}.{unwanted}" not in loaded


def test_names_of_subjects_are_listed_without_importing_torch(imported: dict[str, set[str]]) -> None:
    assert "equivtest.cases.names" in imported["names"] and not {"torch", "hypothesis"} & imported["names"]


def test_rank_that_runs_a_defect_imports_no_verdicts_and_no_hypothesis() -> None:
    program = """
import sys
from equivtest.cases.names import resolve
resolve("tests.defects.linear.layers:bias_on_every_rank")
print({"hypothesis", "equivtest.verdicts", "equivtest.oracle"} & sys.modules.keys())
"""

    assert printed_by(program) == "set()"


def test_shipped_properties_are_listed_without_importing_the_plans_of_programs() -> None:
    program = "import sys; from equivtest.pytest_plugin.suite import shipped; shipped(); print(*sys.modules)"
    modules = set(printed_by(program).split())

    assert "equivtest.programs.property" in modules
    assert modules.isdisjoint({"torch._dynamo", "torch.distributed.tensor", "equivtest.programs.examples.plans"})
