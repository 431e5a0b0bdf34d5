"""`equivtest compare`: the changes between two runs, and the exit code."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from equivtest.errors import Misuse
from equivtest.report.compare import CATEGORIES, Comparison, compare, in_words, parse_causes
from equivtest.report.handover import (
    NO_LONGER,
    OTHERWISE,
    STILL_FAILS,
    BackendFault,
    Coverage,
    CoveredRow,
    Handover,
    KnownState,
)
from equivtest.report.log import LOG, Run, read_run
from tests.engine.test_cli import call
from tests.runs import listed, record, searched, write_run

HOLDS = searched(record(0), record(1))
FAILS = searched(record(0), record(1, "value"))
ALL_FAIL = searched(record(0, "value"), record(1, "value"))
KNOWN = searched(record(0, "known"), record(1, "known"))
OPEN = searched(record(0, "inconclusive"), record(1, "inconclusive"))
PAIRS = ("dtype=float32 bias=True", "dtype=float32 bias=False")


def compared(tmp_path: Path, old: Handover, new: Handover, **environment: Any) -> Comparison:
    return compare(
        read_run(write_run(tmp_path / "old", old)), read_run(write_run(tmp_path / "new", new, **environment))
    )


def categories(comparison: Comparison) -> dict[str, str]:
    """Returns the first line of each category."""
    changes = {change.category: change.line for change in reversed(comparison.changes)}
    return {category: changes[category] for category in CATEGORIES if category in changes}


CLAIM = "rowwise_linear: equals_unsharded"
FIRST, SECOND = (f"LinearCase(in_features={number}, world_size=2), draw 0" for number in (0, 1))


@pytest.mark.parametrize("case", [{}, {"type": "LinearCase"}, {"type": 3, "fields": {}}, {"type": "A", "fields": 3}])
def test_record_without_a_written_case_raises_misuse(tmp_path: Path, case: dict[str, Any]) -> None:
    with pytest.raises(Misuse, match=r"run\.jsonl\.gz is broken"):
        read_run(write_run(tmp_path / "run", searched(record(0, case=case))))


def test_covered_pair_in_an_unknown_state_raises_misuse(tmp_path: Path) -> None:
    row = CoveredRow(state="jud", values=(("bias", "True"),))
    coverage = Coverage(array="", strength=2, rows=(row,), infeasible=())

    with pytest.raises(Misuse, match=r"run\.jsonl\.gz is broken"):
        read_run(write_run(tmp_path / "run", searched(record(0), coverage=coverage)))


def test_planned_label_that_names_no_search_raises_misuse(tmp_path: Path) -> None:
    with pytest.raises(Misuse, match=r"run\.jsonl\.gz is broken"):
        read_run(write_run(tmp_path / "run", searched(record(0), listed=listed(planned=("world_size",)))))


def test_complete_log_that_lacks_a_planned_search_raises_misuse(tmp_path: Path) -> None:
    part = searched(record(0), listed=listed(planned=("w2-0", "w3-0")))

    with pytest.raises(Misuse, match="1 of 2 searches of rowwise_linear ended"):
        read_run(write_run(tmp_path / "run", part, complete=True))


def test_new_fault_of_the_backend_counts_as_worse(tmp_path: Path) -> None:
    found = compared(tmp_path, HOLDS, FAULTY, failed=1)

    line = f"all tests: 0 failed -> 1: {FAULT}"
    assert (categories(found), found.failed_on) == ({"worse": line}, ("worse",))


FAULTY = structs.replace(HOLDS, faults=(BackendFault("all_reduce", "all_reduce of float32 adds nothing"),))


def gives(value: float, dtype: str = "float32") -> Handover:
    """Returns a run in which a probe of the backend got a wrong value."""
    text = f"all_reduce of {dtype} on 2 ranks is wrong: rank 0: expected [3.0], got [{value}]"
    return structs.replace(HOLDS, faults=(BackendFault("all_reduce", text),))


def known(number: int, state: str = NO_LONGER, subject: str = "rowwise_linear", case: int | None = None) -> Handover:
    """Returns the state of the known failure of `subject` with that number, and of the case with that number."""
    code = f"LinearCase(in_features={case or number})"
    fields = {"claim": "equals_unsharded", "kind": "value", "case": code, "reason": "", "link": "", "state": state}
    return Handover(known=KnownState(id=f"known_failures::{subject}::{number}", **fields))


FAULT = "the backend is wrong: all_reduce of float32 adds nothing"
ONE, TWO = (f"known failures that no longer fail: known_failures::rowwise_linear::{number}" for number in (1, 2))


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ((HOLDS, known(1, STILL_FAILS)), (HOLDS, known(1)), f"worse: all tests: 0 failed -> 1: {ONE}"),
        ((HOLDS, known(1)), (HOLDS, known(1, STILL_FAILS)), f"better: all tests: 1 failed -> 0: before: {ONE}"),
        ((HOLDS, known(1)), (HOLDS, known(2)), f"worse: all tests: 1 failed -> 1: {TWO}"),
        (
            (FAILS,),
            (FAULTY,),
            f"worse: all tests: 1 failed -> 1: {FAULT}",
        ),
        ((FAILS,), (HOLDS, known(1, OTHERWISE)), "worse: all tests: 1 failed -> 1"),
        ((HOLDS, known(1)), (HOLDS, known(1)), ""),
        ((HOLDS, known(1)), (HOLDS, known(3, case=1)), ""),
        (
            (HOLDS, known(1, subject="colwise_linear")),
            (HOLDS, known(1)),
            f"worse: all tests: 1 failed -> 1: {ONE}",
        ),
        ((gives(1.5),), (gives(7e22),), ""),
        (
            (gives(1.5),),
            (gives(1.5, "float64"),),
            "worse: all tests: 0 failed -> 0: the backend is wrong: all_reduce of float64 on 2 ranks is wrong: rank 0: "
            "expected [3.0], got [1.5]",
        ),
    ],
    ids=[
        *("no longer fails", "fails again", "another entry", "fault for a claim", "fails otherwise", "the same"),
        *("other number", "other subject", "other value", "other dtype"),
    ],
)
def test_failed_test_that_is_no_claim_is_listed_with_its_cause(
    tmp_path: Path, old: Sequence[Handover], new: Sequence[Handover], line: str
) -> None:
    def run(name: str, handovers: Sequence[Handover]) -> Run:
        is_red = any(each in (FAILS, FAULTY) or (each.known and each.known.state != STILL_FAILS) for each in handovers)
        return read_run(write_run(tmp_path / name, *handovers, failed=int(is_red)))

    found = compare(run("old", old), run("new", new))

    lines = [f"{each.category}: {each.line}" for each in found.changes if each.property_name == "all tests"]
    assert (lines, "worse" in found.failed_on) == ([line] * bool(line), line.startswith("worse"))


@pytest.mark.parametrize(
    ("old", "new", "changes", "failed_on"),
    [
        (HOLDS, HOLDS, {}, ()),
        (HOLDS, FAILS, {"worse": f"{CLAIM}: holds -> fails (1): {SECOND}"}, ("worse",)),
        (FAILS, HOLDS, {"better": f"{CLAIM}: fails -> holds (1): {SECOND}"}, ()),
        (HOLDS, KNOWN, {"worse": f"{CLAIM}: holds -> known to fail (2): {FIRST}"}, ("worse",)),
        (OPEN, ALL_FAIL, {"worse": f"{CLAIM}: open -> fails (2): {FIRST}"}, ("worse",)),
        (KNOWN, HOLDS, {"better": f"{CLAIM}: known to fail -> holds (2): {FIRST}"}, ()),
        (HOLDS, OPEN, {"no longer judged": f"{CLAIM}: holds -> open (2): {FIRST}"}, ("no longer judged",)),
        (OPEN, HOLDS, {"newly judged": f"{CLAIM}: open -> holds (2): {FIRST}"}, ()),
        (FAILS, ALL_FAIL, {"worse": f"{CLAIM}: holds -> fails (1): {FIRST}"}, ("worse",)),
    ],
)  # fmt: skip
def test_each_change_of_an_outcome_is_listed_as_worse_better_or_not_judged(
    tmp_path: Path, old: Handover, new: Handover, changes: dict[str, str], failed_on: tuple[str, ...]
) -> None:
    found = compared(tmp_path, old, new)

    assert {name: line for name, line in categories(found).items() if name != "different"} == changes
    assert found.failed_on == failed_on


def test_fewer_judged_verdicts_fail_the_comparison(tmp_path: Path) -> None:
    found = compared(tmp_path, HOLDS, searched(record(0)))

    assert categories(found)["no longer judged"] == f"{CLAIM}: 2 verdicts -> 1 verdicts"
    assert found.failed_on == ("no longer judged",)
    assert (found.old.verdicts, found.new.verdicts) == (2, 1)


def test_case_that_is_no_longer_judged_fails_the_comparison_despite_newly_judged_cases(tmp_path: Path) -> None:
    old = searched(record(0), record(1), record(2, "inconclusive"))

    assert compared(tmp_path, old, searched(record(2))).failed_on == ("no longer judged",)


def test_pair_of_values_that_is_no_longer_covered_fails_the_comparison_and_is_listed(tmp_path: Path) -> None:
    found = compared(tmp_path, searched(record(0), pairs=PAIRS), searched(record(0), pairs=PAIRS[:1]))

    line = "rowwise_linear: 2 pairs of values covered -> 1 (1): bias=False, dtype=float32"
    assert categories(found) == {"no longer judged": line} and found.failed_on


def test_property_that_is_missing_in_the_new_run_fails_the_comparison(tmp_path: Path) -> None:
    other = searched(record(0), name="scale")
    old = read_run(write_run(tmp_path / "old", HOLDS, other))
    found = compare(old, read_run(write_run(tmp_path / "new", HOLDS)))

    assert categories(found)["no longer judged"] == "scale: equals_unsharded: holds -> absent"
    assert found.failed_on == ("no longer judged",)


def test_new_failing_claim_counts_as_worse(tmp_path: Path) -> None:
    other = searched(record(0, "value"), name="scale")
    new = read_run(write_run(tmp_path / "new", HOLDS, other))

    assert compare(read_run(write_run(tmp_path / "old", HOLDS)), new).failed_on == ("worse",)


def test_slower_property_is_listed_without_failing_the_comparison(tmp_path: Path) -> None:
    found = compared(tmp_path, searched(record(busy_s=4.0)), searched(record(busy_s=10.0)))

    assert categories(found) == {"slower": "rowwise_linear: 4.0 s -> 10.0 s, 2.5 times as long (1)"}
    assert not found.failed_on


@pytest.mark.parametrize(("old_s", "new_s"), [(0.01, 4.0), (100.0, 140.0)])
def test_small_difference_of_time_is_not_listed(tmp_path: Path, old_s: float, new_s: float) -> None:
    assert not compared(tmp_path, searched(record(busy_s=old_s)), searched(record(busy_s=new_s))).changes


def test_changed_margins_do_not_fail_the_comparison_and_are_listed_as_different(tmp_path: Path) -> None:
    found = compared(tmp_path, HOLDS, searched(record(0), record(1, margins={"equals_unsharded": 0.5})))

    assert categories(found) == {"different": f"rowwise_linear: margins: as recorded -> others (1): {SECOND}"}


def test_differences_between_environments_are_printed_first(tmp_path: Path) -> None:
    found = compared(tmp_path, HOLDS, HOLDS, torch="2.12.0", seconds=99.0)

    assert found.environments == {"torch": ("2.13.0", "2.12.0")}
    assert in_words(found)[0] == "torch: 2.13.0 -> 2.12.0" and in_words(found)[-1] == "no change"


@pytest.mark.parametrize(
    ("options", "new", "code"),
    [
        ((), FAILS, 1),
        ((), HOLDS, 0),
        (("--fail-on", "never"), FAILS, 0),
        (("--fail-on", "slower"), FAILS, 0),
        (("--fail-on", "different"), searched(record(0), record(2)), 1),
    ],
)
def test_fail_on_option_decides_the_exit_code_of_the_compare_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], new: Handover, code: int
) -> None:
    folders = write_run(tmp_path / "old", HOLDS), write_run(tmp_path / "new", new)

    assert call(monkeypatch, "compare", *map(str, folders), *options) == code


def test_compare_command_prints_changes_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = write_run(tmp_path / "old", HOLDS) / LOG, write_run(tmp_path / "new", FAILS) / LOG

    assert call(monkeypatch, "compare", str(old), str(new), "--json") == 1
    assert msgspec.json.decode(capsys.readouterr().out, type=Comparison).changes[0].new == "fails"


def test_unknown_name_in_the_fail_on_option_raises_misuse() -> None:
    with pytest.raises(Misuse, match=r"--fail-on: expected some of worse, slower, different, never, got 'all'"):
        parse_causes("worse,all")


def test_folder_without_a_report_raises_misuse(tmp_path: Path) -> None:
    with pytest.raises(Misuse, match=r"has no log: name a folder that equivtest run --report has written"):
        read_run(tmp_path)


def test_file_that_is_not_a_log_raises_misuse(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("<html>")

    with pytest.raises(Misuse, match=r"has no readable log: Not a gzipped file"):
        read_run(tmp_path / "page.html")


def test_log_of_another_schema_raises_misuse(tmp_path: Path) -> None:
    with pytest.raises(Misuse, match=r"has a log of schema 99, this equivtest reads 1: use the release that wrote it"):
        read_run(write_run(tmp_path / "run", HOLDS, schema=99))


def test_broken_line_of_a_log_raises_misuse(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", HOLDS) / LOG
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) + b'{"handover": 3}\n'))

    with pytest.raises(Misuse, match=r"run\.jsonl\.gz is broken: Expected `object \| null`, got `int`"):
        read_run(path)


@pytest.mark.parametrize(("ended", "state"), [(False, "begun"), (True, "interrupted by Ctrl-C")])
def test_incomplete_run_raises_misuse(tmp_path: Path, ended: bool, state: str) -> None:  # noqa: FBT001
    folder = write_run(tmp_path / "run", HOLDS, ended=ended, complete=False, state=state)

    with pytest.raises(Misuse, match=r"is the report of an incomplete run: This run "):
        read_run(folder)


def test_log_of_a_killed_run_can_be_read_up_to_its_last_line(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", HOLDS) / LOG
    path.write_bytes(path.read_bytes()[:-30])

    with pytest.raises(Misuse, match=r"is the report of an incomplete run: This run began at 2026-11-25"):
        read_run(path)


def test_comparison_of_two_runs_can_be_encoded_as_json(tmp_path: Path) -> None:
    text = msgspec.json.encode(compared(tmp_path, HOLDS, FAILS))

    assert json.loads(text)["failed_on"] == ["worse"]
