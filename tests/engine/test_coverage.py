"""Coverage: what the cases of a run have in common with all that cases can have."""

from __future__ import annotations

import pytest

from equivtest.errors import Misuse
from equivtest.pytest_plugin.suite import coverage_lines
from equivtest.report.coverage import Covered
from equivtest.report.handover import Coverage, CoveredRow


def coverage(array: str = "", **states: dict[str, str]) -> Coverage:
    """Returns rows of the states; each gives the values of its axes."""
    rows = tuple(CoveredRow(state=state, values=tuple(values.items())) for state, values in states.items())
    return Coverage(array=array, strength=2, rows=rows, infeasible=((("b", "2"), ("a", "2")),))


def covered(*parts: Coverage) -> Covered:
    found = Covered()
    for part in parts:
        found.add(part)
    return found


def test_pair_of_values_counts_as_judged_if_any_of_its_cases_is_judged() -> None:
    found = covered(coverage(judged={"a": "1", "b": "1"}, known={"a": "1", "b": "1"}, open={"b": "1", "a": "1"}))

    assert found.text == "1 pairs of values covered, 1 infeasible"


def test_summary_counts_pairs_of_values_in_known_failures_and_open_cases_separately() -> None:
    found = covered(coverage(known={"a": "1", "b": "1"}), coverage(open={"a": "2", "b": "1"}))

    assert found.text == "0 pairs of values covered, 1 known to fail, 1 open, 1 infeasible"


def test_pair_of_values_counts_once_for_each_covering_array() -> None:
    values = {"a": "1", "b": "1"}

    assert covered(coverage("w2", judged=values), coverage("w3", judged=values)).text.startswith("2 pairs")


def test_coverage_table_shows_the_covered_share_of_feasible_pairs() -> None:
    found = covered(coverage(judged={"a": "1", "b": "1", "c": "1"}, open={"a": "2", "b": "1", "c": "1"}))

    assert found.matrix() == [("a", []), ("b", ["1/2"]), ("c", ["1/2", "1"])]


def test_run_without_covering_arrays_reports_no_coverage() -> None:
    assert Covered().text == "" and Covered().matrix() == [] and Covered.all_of([Covered()]) == ""


def test_coverage_command_prints_numbers_of_pairs_without_running_a_case() -> None:
    head, scale = coverage_lines("gate", ["scale"])

    assert head.split() == ["property", "cases", "covered", "known", "open", "infeasible"]
    name, cases, pairs, known, left, infeasible = scale.replace(",", "").split()
    assert (name, known, left) == ("scale", "0", "0")
    assert int(cases) < 60 and int(pairs) > 600 and int(infeasible) > 0


@pytest.mark.parametrize(
    ("profile", "names", "message"),
    [
        ("soak", [], "--profile must be one of smoke, gate, conformance, got soak"),
        ("gate", ["scales"], "called scales"),
    ],
)
def test_coverage_command_refuses_a_property_without_covering_arrays(
    profile: str, names: list[str], message: str
) -> None:
    with pytest.raises(Misuse, match=message):
        coverage_lines(profile, names)
