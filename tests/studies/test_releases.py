"""Other releases of torch: what they have not, what is known of their collectives, and the tables beside each other."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from equivtest.base.lacking import is_allowed
from equivtest.base.refusal import is_missing
from equivtest.cases.case import Case
from equivtest.cases.known import freezes
from equivtest.families.embedding.case import EmbeddingCase
from equivtest.families.linear.case import LinearCase
from equivtest.families.operators.case import OperatorCase
from equivtest.families.redistribute.case import RedistributeCase
from equivtest.families.redistribute.known import scatters_no_sum
from equivtest.pytest_plugin.pools import is_known_fault
from equivtest.pytest_plugin.settings import Settings
from equivtest.ranks.support import Finding
from equivtest.verdicts.verdict import Judgement, Verdict
from studies.operator_coverage import outcome_of
from studies.operator_releases import beside, swept
from studies.releases import by_claim, counted, of_findings, put, release, table

ENTRY = """
[[known_failure]]
subject = "collectives"
claim = "equals_unsharded"
kind = "value"
where = [["scatters_no_sum", "==", true], ["world_size", ">", 1]]
case = "CollectivesCase(world_size=2, collectives=('reduce_scatter_tensor_avg',))"
reason = "the sum comes back"
"""


@pytest.mark.parametrize(("installed", "expected"), [("2.8.0+cu128", True), ("2.13.0+cpu", False), ("2.15.0", False)])
def test_a_strategy_that_an_old_release_has_not_is_missing_and_a_failure_in_a_newer_one(
    installed: str, *, expected: bool
) -> None:
    error = NotImplementedError("Operator aten.foo.default does not have a sharding strategy registered.")

    assert is_missing(error, installed) == expected


def test_another_error_of_an_old_release_is_a_failure() -> None:
    assert not is_missing(RuntimeError("does not have a sharding strategy registered"), "2.8.0")
    assert not is_missing(NotImplementedError("no kernel"), "2.8.0")


@pytest.mark.parametrize(
    ("installed", "backend", "allowed", "expected"),
    [
        ("2.8.0+cu128", "gloo", {"release"}, True),
        ("2.13.0+cpu", "gloo", {"release"}, False),
        ("2.8.0+cu128", "fake", {"release"}, False),
        ("2.8.0+cu128", "gloo", {"float16"}, False),
    ],
)
def test_what_torchs_own_backend_refuses_an_old_release_has_not(
    monkeypatch: pytest.MonkeyPatch, installed: str, backend: str, allowed: set[str], *, expected: bool
) -> None:
    monkeypatch.setattr(metadata, "version", {"torch": installed}.__getitem__)
    settings = Settings(backend=backend, allowed=frozenset(allowed))

    assert is_allowed(("float32:all_to_all",), settings.excused) == expected


@pytest.mark.parametrize(
    ("collective", "kind", "expected"),
    [
        ("reduce_scatter_tensor_avg", "wrong", True),
        ("reduce_scatter_tensor_avg", "hung", False),
        ("reduce_scatter_tensor", "wrong", False),
        ("all_reduce_avg", "wrong", False),
    ],
)
def test_a_probe_that_finds_what_is_known_of_the_collective_is_no_fault(
    tmp_path: Path, collective: str, kind: str, *, expected: bool
) -> None:
    path = tmp_path / "known.toml"
    path.write_text(ENTRY)
    fault = Finding(collective, "float32", 2, kind, "rank 0: expected 1, got 2")  # type: ignore[arg-type]

    assert is_known_fault(fault, Settings(known_failures=(str(path),))) == expected


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (LinearCase(world_size=1, style="colwise", requires_grad=("x",)), True),
        (LinearCase(world_size=1, style="colwise", requires_grad=("x", "weight")), False),
        (EmbeddingCase(world_size=1, style="rowwise", requires_grad=()), True),
        (EmbeddingCase(world_size=1, style="rowwise"), False),
    ],
)
def test_a_case_freezes_a_parameter_that_needs_no_gradient(case: Case, *, expected: bool) -> None:
    assert freezes(case) == expected


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("partial(avg)", "shard(0)", True),
        ("partial(sum)", "shard(0)", False),
        ("partial(avg)", "replicate", False),
        ("shard(0)", "shard(0)", False),
    ],
)
def test_a_partial_average_is_scattered_where_it_becomes_a_shard(source: str, target: str, *, expected: bool) -> None:
    on_two, on_one = (RedistributeCase(world_size=size, source=(source,), target=(target,)) for size in (2, 1))

    assert scatters_no_sum(on_two) == expected and not scatters_no_sum(on_one)


def written_report(folder: Path, torch: str, kinds: dict[str, str], *, complete: bool = True) -> Path:
    """A report of one verdict of each of these claims of "scale"."""
    folder.mkdir()
    environment = {"torch": torch, "complete": complete, "state": "interrupted"}
    (folder / "environment.json").write_text(json.dumps(environment))
    (folder / "verdicts.jsonl").write_text(json.dumps({"subject": "scale", "verdicts": kinds}) + "\n")
    return folder


def test_the_table_has_rows_in_which_some_release_says_otherwise(tmp_path: Path) -> None:
    old = written_report(tmp_path / "old", "2.8.0+cu128", {"equals_unsharded": "known", "repeats_itself": "holds"})
    new = written_report(tmp_path / "new", "2.13.0", {"equals_unsharded": "holds", "repeats_itself": "holds"})

    lines = table("claims", counted([new, old], by_claim)).splitlines()

    assert lines == [
        "1 more rows hold, or are open, on each of them.",
        "",
        "| subject | claim | 2.8.0 | 2.13.0 |",
        "| --- | --- | --- | --- |",
        "| `scale` | `equals_unsharded` | known 1 of 1 | holds |",
    ]


def test_a_report_of_a_run_that_did_not_end_is_refused(tmp_path: Path) -> None:
    report = written_report(tmp_path / "cut", "2.8.0", {"equals_unsharded": "holds"}, complete=False)

    with pytest.raises(ValueError, match="cut: not complete: interrupted"):
        counted([report], by_claim)


def test_a_finding_counts_the_known_failures_that_fail_on_each_release(tmp_path: Path) -> None:
    file = tmp_path / "tried.jsonl"
    ends = ("fails", "holds", "not_supported", "not_supported", "inconclusive", "fails as raised")
    lines = [{"torch": "2.8.0", "findings": [1], "ended": ended} for ended in ends]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    assert list(of_findings([file]).values()) == [{"2.8.0": "1 of 6, 2 not supported, 1 refused, 1 otherwise"}]


def test_a_table_takes_the_place_of_the_one_before() -> None:
    page = "a\n<!-- claims -->\n\nold\n\n<!-- end -->\nb\n"

    assert put(page, "claims", "new\n") == "a\n<!-- claims -->\n\nnew\n\n<!-- end -->\nb\n"
    with pytest.raises(ValueError, match="has 0 tables of operators where one must be"):
        put(page, "operators", "new\n")


def written_sweep(file: Path, torch: str, outcomes: dict[str, str], operator: str = "abs") -> Path:
    """A file of a sweep: of each case of an operator what became of it."""
    line = {"torch": torch, "operator": operator, "outcomes": {case: [found, ""] for case, found in outcomes.items()}}
    file.write_text(json.dumps(line) + "\n")
    return file


def test_releases_are_compared_case_by_case(tmp_path: Path) -> None:
    old = written_sweep(tmp_path / "old", "2.8.0", {"a": "wrong", "b": "refused", "c": "holds", "d": "holds"})
    new = written_sweep(tmp_path / "new", "2.13.0", {"a": "holds", "b": "raises", "c": "holds", "e": "wrong"})

    lines = beside(swept([new, old])).splitlines()

    assert lines[0] == "3 cases were drawn on each release, and 2 on some."
    assert "| 2.8.0, 2.13.0 | 0 | 0 | 0 | 1 | 1 | 0 |" in lines
    assert lines[-1] == "| `abs` | 3 | wrong 1, refused 1 | raises 1 | 2.13.0 mends 1, 2.13.0 breaks 1 |"


def test_an_operator_that_one_release_refuses_is_named_and_has_no_row(tmp_path: Path) -> None:
    old = written_sweep(tmp_path / "old", "2.8.0", {"a": "refused"})
    new = written_sweep(tmp_path / "new", "2.13.0", {"a": "holds"})

    lines = beside(swept([old, new])).splitlines()

    assert "- 2.8.0 refuses all cases of 1 operators: `abs`" in lines
    assert "- 2.13.0 refuses all cases of 0 operators." in lines
    assert lines[-1] == "| --- | --- | --- | --- | --- |"


@pytest.mark.parametrize(
    ("kinds", "signs", "expected"),
    [
        ({"gradients_equal_unsharded": "value", "agrees_on_all_ranks": "replica"}, set(), "wrong"),
        ({"equals_unsharded": "holds", "gradients_equal_unsharded": "value"}, set(), "wrong gradient"),
        ({"equals_unsharded": "timed_out"}, set(), "hangs"),
        ({"equals_unsharded": "inconclusive", "agrees_on_all_ranks": "holds"}, {("forward", "R")}, "refused"),
        ({"equals_unsharded": "value"}, {("gradient", "R")}, "wrong"),
        ({"equals_unsharded": "inconclusive"}, {("forward", "?")}, "holds"),
    ],
)
def test_what_becomes_of_a_case_is_what_is_worst(
    kinds: dict[str, str], signs: set[tuple[str, str]], expected: str
) -> None:
    case = OperatorCase(world_size=1)
    verdicts = [
        Verdict(claim=claim, subject="dtensor_operators", case=case, judgement=Judgement(kind), draw=0)
        for claim, kind in kinds.items()
    ]

    assert outcome_of(verdicts, signs)[0] == expected


def test_a_release_is_its_public_version() -> None:
    assert release("2.13.0+cpu") == "2.13.0"
