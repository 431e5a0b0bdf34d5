"""examples/reports: of each public bug report the wrong program is red, and the right one green."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from equivtest.base import limits
from equivtest.base.functions import load_file
from equivtest.programs import checking
from equivtest.ranks.pool import Pool

FOLDER = Path(__file__).parents[2] / "examples/reports"
FILES = sorted(FOLDER.glob("test_*.py"))


@pytest.fixture(params=FILES, ids=lambda file: file.stem.removeprefix("test_"))
def report(request: pytest.FixtureRequest, pool: Pool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.setattr(limits, "SHRINK_CASE_S", 1.0)  # one wrong program hangs in several cases
    monkeypatch.setattr(limits, "SHRINK_S", 5.0)
    monkeypatch.setitem(checking._pools, pool.backend, pool)
    monkeypatch.chdir(tmp_path)
    return load_file(str(request.param))


@pytest.mark.ranks
def test_wrong_program_of_each_report_fails_and_its_right_program_passes(report: ModuleType) -> None:
    wrong = replace(report.test_wrong, limit_s=5.0).check(world_sizes=(1, 2), audit=False)
    right = report.test_right.check(world_sizes=(2,), audit=False)

    [expected] = re.findall("`test_wrong` prints: (.*)", report.__doc__ or "")
    assert expected in str(wrong).splitlines()
    assert right.ok, right


def test_readme_of_reports_lists_every_report_with_its_upstream_issue() -> None:
    text = (FOLDER / "README.md").read_text("utf-8")

    for file in FILES:
        assert re.findall(r"^https://github.com/\S+$", file.read_text("utf-8"), flags=re.M)[0] in text
        assert f"({file.name})" in text
