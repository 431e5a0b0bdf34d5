"""examples/reports: of each public bug report the wrong program is red, and the right one green."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from equivtest.base.functions import load_file
from equivtest.base.profiles import PROFILES
from equivtest.property import Property
from equivtest.ranks.pool import Pool
from equivtest.search.chunks import chunk_of
from equivtest.search.known import KnownFailures
from equivtest.search.planned import parts_of
from equivtest.search.search import Findings, Target, search

FOLDER = Path(__file__).parents[2] / "examples/reports"
FILES = sorted(FOLDER.glob("test_*.py"))
KINDS = {"ValueMismatch": "value", "RankRaised": "raised"}
ON_ONE_RANK = ("fast_llm_551",)
"""Reports whose wrong program fails on one rank, and passes on two."""


def searched(prop: Property, world_size: int, pool: Pool, folder: Path, only: Target | None = None) -> Findings:
    """Searches the cases of the smallest profile.  With `only`, it ends at the first failure, which is shrunk."""
    [part] = parts_of(prop, PROFILES["smoke"], (world_size,))
    chunk = chunk_of(part, ("float32", "bfloat16"), world_sizes=(world_size,))
    return search(prop, chunk, pool, KnownFailures(), folder, only=only)


@pytest.mark.ranks
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem.removeprefix("test_"))
def test_wrong_program_of_each_report_fails_and_its_right_program_passes(
    file: Path, pool: Pool, tmp_path: Path
) -> None:
    report = load_file(str(file))
    [told] = re.findall("`test_wrong` prints: (.*)", report.__doc__ or "")
    error, tensor = re.findall(r"(\w+): module: (\w+)", told)[0]
    claim = "gradients_equal_unsharded" if tensor == "grad" else "equals_unsharded"
    wrong = replace(report.test_wrong, limit_s=5.0)  # one wrong program hangs in several cases
    size = 1 if file.stem.endswith(ON_ONE_RANK) else 2
    [failure] = searched(wrong, size, pool, tmp_path, (claim, KINDS[error])).failures
    right = searched(report.test_right, 2, pool, tmp_path)

    assert told in failure.message.splitlines()
    assert not right.misuse and not right.failures
    assert "holds" in {kind for record in right.records for kind in record.verdicts.values()}


def test_readme_of_reports_lists_every_report_with_its_upstream_issue() -> None:
    text = (FOLDER / "README.md").read_text("utf-8")

    for file in FILES:
        assert re.findall(r"^https://github.com/\S+$", file.read_text("utf-8"), flags=re.M)[0] in text
        assert f"({file.name})" in text
