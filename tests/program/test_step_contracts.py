"""The table of docs/reference/contracts.md names existing properties and findings, and all properties of steps."""

from __future__ import annotations

import re
from pathlib import Path

from equivtest.pytest_plugin.suite import shipped
from studies.findings_index import FOLDER

ROOT = Path(__file__).parents[2]


def cells() -> str:
    """Returns the cells of the table without its head and its first column."""
    text = (ROOT / "docs/reference/contracts.md").read_text()
    table = text.partition("| contract |")[2].partition("\n\n")[0]
    return "\n".join(line.split("|", 2)[2] for line in table.splitlines()[2:])


def defined_in(path: str) -> set[str]:
    """The names that a file gives to properties."""
    text = (ROOT / path).read_text()
    return set(re.findall(r"^(\w+) = (?:clipped|trained|module_property)\(", text, re.MULTILINE))


def test_every_property_in_the_table_of_contracts_exists() -> None:
    named = set(re.findall(r"`(\w+)`", cells()))

    assert named and named <= {
        *shipped(),
        *defined_in("tests/clients/test_trained.py"),
        *defined_in("tests/clients/test_engines.py"),
    }


def test_every_finding_in_the_table_of_contracts_exists() -> None:
    numbers = set(re.findall(r"\b(\d+)\b", cells()))

    assert numbers and all(list(FOLDER.glob(f"{number}-*.md")) for number in numbers)


def test_every_property_of_steps_is_in_the_table_of_contracts() -> None:
    steps = defined_in("properties/test_steps.py")

    assert len(steps) == 7 and steps <= set(re.findall(r"`(\w+)`", cells()))
