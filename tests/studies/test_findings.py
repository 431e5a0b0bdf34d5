"""Findings: every known failure names one, every one is in the index, and the index is as its command prints it."""

from __future__ import annotations

from pathlib import Path

import pytest

from equivtest.search.known import SHIPPED, KnownFailures
from studies.findings_index import EFFECTS, FOLDER, FOUND, INDEX, counted, indexed, known_failures, read, read_all


def test_every_known_failure_names_findings_that_exist() -> None:
    numbers = {finding.number for finding in read_all()}

    for entry in known_failures():
        assert entry.get("findings"), f"{entry['subject']}, {entry['claim']}: no finding: {entry['reason']}"
        assert set(entry["findings"]) <= numbers, entry["findings"]  # type: ignore[call-overload]


RETIRED = {44, *range(84, 94), *range(104, 109), 112, 113, 114}
"""Numbers of deleted findings, which hold in no supported release of torch or are no defect."""


def test_each_finding_number_is_used_once_or_retired() -> None:
    findings = read_all()

    numbers = sorted([*(finding.number for finding in findings), *RETIRED])
    assert numbers == list(range(1, len(numbers) + 1))
    assert all(finding.path.name.startswith(f"{finding.number:02}-") for finding in findings)


def test_every_effect_of_a_finding_is_explained_in_the_index() -> None:
    for finding in read_all():
        assert set(finding.effects) <= set(EFFECTS), finding.path.name


def test_finding_without_an_upstream_report_says_what_was_searched_for() -> None:
    for finding in read_all():
        none = finding.fields["Upstream"].startswith(("none found (searched for: ", "not reported: "))
        assert bool(finding.reports) != none, finding.path.name


def test_index_of_findings_is_up_to_date() -> None:
    text = INDEX.read_text("utf-8")

    assert text == indexed(text), "run python -m studies.findings_index --write"


def test_counts_of_findings_are_up_to_date() -> None:
    text = FOUND.read_text("utf-8")

    assert text == counted(text), "run python -m studies.findings_index --write"


def test_links_between_findings_have_existing_targets() -> None:
    for path in FOLDER.glob("*.md"):
        for target in _links(path):
            assert (FOLDER / target).is_file(), f"{path.name}: {target}"


def _links(path: Path) -> list[str]:
    parts = path.read_text("utf-8").split("](")[1:]
    return [target for part in parts if not (target := part.partition(")")[0]).startswith("http")]


@pytest.mark.parametrize("text", ["# Title\n", "# 1. Title\n\n- **Project**: torch\n- **Effect**: silent\n"])
def test_finding_that_does_not_begin_with_number_and_title_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "01-title.md"
    path.write_text(text)

    with pytest.raises(ValueError, match=r"01-title\.md: must begin with '# NUMBER\. TITLE'"):
        read(path)


def test_reason_of_a_known_failure_ends_with_its_findings() -> None:
    entry = KnownFailures.load(SHIPPED).of("module")[-1]

    assert entry.findings == (41,) and entry.reason.endswith("(finding 41)")
