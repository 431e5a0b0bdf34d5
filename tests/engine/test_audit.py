"""An audit: whether the claims of a property see a collective that does nothing, or something else."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from equivtest.base import limits
from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.module import module_property
from equivtest.programs.case import ModuleCase
from equivtest.property import Property
from equivtest.pytest_plugin.suite import shipped
from equivtest.ranks.messages import FAULTS, NO_FAULT, Fault
from equivtest.ranks.pool import Pool
from equivtest.ranks.reply import Reply
from equivtest.report import audits
from equivtest.report.handover import AuditRow
from equivtest.search.audit import audit, is_possible, representatives
from equivtest.search.audited import Audit, Site
from equivtest.search.known import KnownFailures
from tests.commands import Command, Ended
from tests.engine.fake_suite import log_of, make_suite, run_suite

ROOT = Path(__file__).parents[2]
PROGRAMS = "tests.programs.audit:"
MODULES = "tests.programs.module:"
FETCH = "zero3_fetch_all_gather"


def of_fetch(subject: str = FETCH) -> Property:
    subject = subject if subject == FETCH else PROGRAMS + subject
    return replace(shipped()[FETCH], subject=subject)


def audited(prop: Property, pool: Pool, *, is_thorough: bool = False) -> Audit:
    return audit(prop, pool, KnownFailures(), (1, 2), limits.DTYPES, is_thorough=is_thorough)


# Summary of an audit.


@pytest.mark.ranks
def test_audit_of_a_right_subject_finds_a_failing_claim_for_every_collective(pool: Pool) -> None:
    found = audited(of_fetch(), pool)

    assert (found.problem, found.unseen, found.cases > 0) == ("", [], True)
    assert [str(site) for site in found.sites] == ["all_gather in the forward"]


@pytest.mark.ranks
def test_audit_runs_a_program_that_reads_the_devices_of_the_group(pool: Pool) -> None:
    case = ModuleCase(
        world_size=2,
        needs_world=True,
        build="equivtest.programs.examples.gated:gated_block",
        parallelize="equivtest.programs.examples.plans:fully_sharded_from_rank_0",
        x_shape=(2, 2),
        batch="mean of parts",
    )

    replies = pool.run("module", case, fault=NO_FAULT)

    assert [reply.outcome for reply in replies] == ["answered"] * 2


@pytest.mark.ranks
def test_audit_draws_more_cases_if_no_claim_failed_in_the_first(pool: Pool) -> None:
    found = audit(shipped()["dtensor_cross_entropy"], pool, KnownFailures(), (2,), limits.DTYPES)

    assert found.cases > limits.AUDIT_CASES and found.problem == ""


@pytest.mark.ranks
def test_audit_ends_after_two_cases_if_a_claim_failed_for_every_collective(pool: Pool) -> None:
    found = audit(of_fetch(), pool, KnownFailures(), (2,), limits.DTYPES)

    assert (found.cases, found.unseen, found.problem) == (2, [], "")


@pytest.mark.ranks
def test_audit_of_a_first_look_ends_when_a_claim_failed_for_one_collective(pool: Pool) -> None:
    whole, first = (
        audit(shipped()["zero3_mlp_all_gather"], pool, KnownFailures(), (2,), limits.DTYPES, is_first_look=is_first)
        for is_first in (False, True)
    )

    assert len(whole.seen) > len(first.seen) == 1 and first.cases == 1 and first.problem == ""


@pytest.mark.ranks
def test_audit_draws_more_cases_if_the_first_called_no_collective(pool: Pool) -> None:
    found = audit(of_fetch("with_collectives_for_many_parameters"), pool, KnownFailures(), (2,), limits.DTYPES)

    assert found.cases > limits.AUDIT_CASES and found.problem == ""


@pytest.mark.ranks
def test_second_round_of_an_audit_has_its_own_visits_and_repeats_no_case(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases: list[Any] = []
    run = Pool.run

    def noted(self: Pool, subject: str, case: Any, **how: Any) -> Any:
        cases.append((case, how["fault"]))
        return run(self, subject, case, **how)

    monkeypatch.setattr(limits, "AUDIT_VISITS", 2)
    monkeypatch.setattr(Pool, "run", noted)
    found = audit(shipped()["dtensor_cross_entropy"], pool, KnownFailures(), (2,), limits.DTYPES)

    assert found.cases > limits.AUDIT_CASES
    assert Counter(case for case, fault in cases if fault == NO_FAULT).most_common(1)[0][1] == 2


@pytest.mark.ranks
def test_audit_reports_a_problem_if_the_subject_calls_no_collective(pool: Pool) -> None:
    problem = audited(of_fetch("without_collectives"), pool).problem

    assert "although it called no collective: nothing shows that it is parallel" in problem
    assert "say why: without_collectives='...'" in problem


@pytest.mark.ranks
def test_audit_accepts_a_reason_why_no_collective_is_needed(pool: Pool) -> None:
    found = audited(replace(of_fetch("without_collectives"), without_collectives="each rank has all"), pool)

    assert (found.problem, found.rows) == ("", {})


@pytest.mark.ranks
def test_audit_reports_a_problem_if_no_claim_fails_when_the_only_collective_is_spoiled(pool: Pool) -> None:
    prop = replace(of_fetch("with_an_idle_collective"), without_collectives="each rank has all")

    assert (
        "although its collectives ignored the other ranks (all_reduce in the forward): each rank got its own operand"
        in (audited(prop, pool).problem)
    )


@pytest.mark.ranks
def test_audit_reports_that_no_claim_fails_for_a_spoiled_recv_without_source(pool: Pool) -> None:
    """The receiver learns the sender, as without a fault."""
    found = audit(of_fetch("with_an_idle_message"), pool, KnownFailures(), (2,), ("float32",))

    assert "its collectives ignored the other ranks (recv in the forward)" in found.problem
    assert any(row.runs for row in found.rows.values())


@pytest.mark.ranks
def test_audit_passes_if_spoiling_one_of_two_collectives_makes_claims_fail(pool: Pool) -> None:
    found = audited(of_fetch("with_an_idle_broadcast"), pool)

    assert (found.problem, [str(site) for site in found.unseen]) == ("", ["broadcast in the forward"])


@pytest.mark.ranks
def test_audit_does_not_count_faults_in_a_broadcast_of_equal_values(pool: Pool) -> None:
    found = audited(of_fetch("with_a_broadcast_of_equal_values"), pool)
    runs = {str(site): row.runs for (site, _), row in found.rows.items()}

    assert (found.problem, found.unseen) == ("", [])
    assert runs["broadcast in the forward"] == 0 < runs["all_gather in the forward"]


@pytest.mark.ranks
def test_audit_names_no_collective_of_a_right_ddp_program(pool: Pool) -> None:
    prop = module_property(MODULES + "mlp", MODULES + "ddp", x_shapes=[(2, 3)], batch="mean of parts")
    found = audit(prop, pool, KnownFailures(), (2,), ("float64",))

    assert {site.kind for site in found.sites} >= {"broadcast", "all_reduce"}
    assert (found.problem, found.unseen) == ("", [])


@pytest.mark.ranks
def test_audit_counts_an_exception_under_a_spoiled_collective_as_a_rejection(pool: Pool) -> None:
    found = audited(of_fetch("raises_on_another_sum"), pool)

    assert found.problem == "" and {name for row in found.rows.values() for name in row.by} == {"raised"}


@pytest.mark.ranks
def test_audit_reports_a_problem_if_all_ranks_average_equal_gradients(pool: Pool) -> None:
    """Every rank has the same batch: an average of equal gradients is what each rank had."""
    prop = module_property(MODULES + "mlp", MODULES + "ddp", x_shapes=[(2, 3)], batch="whole")
    prop = replace(prop, subject=PROGRAMS + "averaged_by_hand")
    found = audit(prop, pool, KnownFailures(), (2,), ("float64",))

    assert (
        "its collectives ignored the other ranks (all_reduce in the backward): each rank got its own operand"
        in found.problem
    )
    assert "batch='mean of parts'" in found.problem


@pytest.mark.ranks
def test_thorough_audit_plants_each_fault_in_each_case(pool: Pool) -> None:
    found = audited(of_fetch(), pool, is_thorough=True)
    runs = {kind: row.runs for (_, kind), row in found.rows.items()}

    assert runs == dict.fromkeys(FAULTS[:-1], found.cases)
    assert all(row.rejected == row.runs for row in found.rows.values())


@pytest.mark.ranks
def test_audit_spoils_the_all_reduce_of_ddps_reducer_in_the_backward(pool: Pool) -> None:
    prop = shipped()["ddp_mlp"]

    assert "all_reduce in the backward" in map(str, audited(prop, pool).sites)


REDUCED = "reduce_scatter in the backward"


def audited_fsdp2(pool: Pool, batch: str) -> Audit:
    prop = module_property(MODULES + "mlp", MODULES + "fsdp2", x_shapes=[(2, 3)], batch=batch)
    return audit(prop, pool, KnownFailures(), (2,), ("float64",))


@pytest.mark.ranks
def test_audit_finds_a_failing_claim_for_every_collective_of_fsdp2(pool: Pool) -> None:
    """With a divided batch, each rank's gradients must reach the others."""
    found = audited_fsdp2(pool, "mean of parts")
    rejected = {row.fault: row.rejected for row in found.rows.values() if row.collective == REDUCED}

    assert (found.problem, found.unseen) == ("", [])
    assert rejected["own operand"] > 0, rejected


@pytest.mark.ranks
def test_audit_lists_fsdp2s_reduction_as_unseen_if_all_ranks_have_one_batch(pool: Pool) -> None:
    """Every rank has it whole, so that the mean of all is what each had; the parameters are gathered all the same."""
    found = audited_fsdp2(pool, "whole")

    assert "all_gather in the forward" in map(str, found.sites)
    assert (found.problem, [str(site) for site in found.unseen]) == ("", [REDUCED])


@pytest.mark.ranks
def test_case_that_fails_before_a_fault_is_planted_is_not_audited(pool: Pool) -> None:
    found = audited(of_fetch("wrong_everywhere"), pool)

    assert (found.cases, found.rows) == (0, {})
    assert not found.problem and "not audited: it failed in all" in found.waits and "--audit off" in found.waits
    assert "first in equals_unsharded: value in FetchCase(world_size=2" in found.waits


@pytest.mark.ranks
def test_audit_ends_at_the_first_fault_that_hangs_the_program(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hang is a failure of a run, so the collective is seen; further ones would only cost their limits."""
    monkeypatch.setattr(limits, "AUDIT_CASE_S", 2.0)
    outcomes: list[str] = []
    run = Pool.run

    def noted(*args: Any, **fields: Any) -> list[Reply]:
        replies = run(*args, **fields)
        outcomes.extend({reply.outcome for reply in replies})
        return replies

    monkeypatch.setattr(Pool, "run", noted)
    found = audit(of_fetch("loops_until_all_are_done"), pool, KnownFailures(), (2,), ("float32",))

    assert outcomes.count("timed_out") == 1
    assert (found.problem, found.unseen, found.hung) == ("", [], "all_reduce in the forward")
    assert "the program hung when all_reduce in the forward was spoiled" in audits.in_lines([found.as_data("p")])[-1]


# Effect of each fault, on two ranks.

RIGHT = [[3, 1, 2, 11, 2, 10, 20], [3, 1, 2, 22, 2, 11, 21]]
"""By rank: all_reduce, all_gather, reduce_scatter, broadcast from rank 1, all_to_all."""


def each(pool: Pool, fault: Fault) -> list[list[float]]:
    replies = pool.run(PROGRAMS + "calls_each", FetchCase(world_size=2), fault=fault)
    return [reply.answers[0].tensors["param.0"].local.tolist() for reply in replies]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "index", "changed"),
    [
        ("dropped", -1, ({}, {})),
        ("own operand", 0, ({0: 2}, {0: 4})),
        ("own operand", 1, ({2: 1}, {1: 2})),
        ("own operand", 2, ({3: 2}, {3: 40})),
        ("own operand", 4, ({6: 11}, {5: 20})),
        ("dropped", 0, ({0: 1}, {0: 2})),
        ("dropped", 1, ({2: 0}, {1: 0})),
        ("dropped", 2, ({3: 1}, {3: 20})),
        ("dropped", 3, ({4: 1}, {})),
        ("dropped", 4, ({6: 11}, {5: 20})),
        ("another operand", 0, ({0: 4}, {0: 4})),
        ("another operand", 1, ({1: 2}, {1: 2})),
        ("another operand", 2, ({3: 20}, {3: 40})),
        ("another operand", 4, ({5: 20}, {5: 21})),
        ("doubled", 0, ({0: 6}, {0: 6})),
        ("doubled", 2, ({3: 22}, {3: 44})),
    ],
)
def test_planted_fault_spoils_exactly_one_collective_on_every_rank(
    pool: Pool, kind: str, index: int, changed: tuple[dict[int, float], dict[int, float]]
) -> None:
    right = [
        [changes.get(place, value) for place, value in enumerate(row)]
        for row, changes in zip(RIGHT, changed, strict=True)
    ]

    assert each(pool, Fault(kind, index)) == right


@pytest.mark.ranks
def test_fault_named_poisoned_writes_nan_into_the_result_of_a_collective(pool: Pool) -> None:
    poisoned = torch.tensor(each(pool, Fault("poisoned", 1))).isnan()

    assert poisoned.tolist() == [[False, True, True, False, False, False, False]] * 2


@pytest.mark.ranks
def test_run_records_its_collectives_only_if_a_fault_is_passed(pool: Pool) -> None:
    bare = pool.run(PROGRAMS + "calls_each", FetchCase(world_size=2))
    watched = pool.run(PROGRAMS + "calls_each", FetchCase(world_size=2), fault=Fault())
    kinds = [call.kind for call in watched[0].answers[0].collectives or ()]

    assert bare[0].answers[0].collectives is None
    assert kinds == ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"]


@pytest.mark.ranks
def test_audit_ignores_runs_in_which_planting_the_fault_failed(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equivtest.search.audit.CANNOT", "Traceback")  # as if planting raised every exception
    monkeypatch.setattr(limits, "AUDIT_VISITS", 2)
    found = audit(of_fetch("raises_on_another_sum"), pool, KnownFailures(), (2,), ("float32",))

    assert found.rows and not any(row.runs for row in found.rows.values())


@pytest.mark.ranks
def test_fault_in_a_world_of_one_rank_spoils_no_collective(pool: Pool) -> None:
    replies = pool.run("zero3_fetch_all_gather", FetchCase(world_size=1), fault=Fault("another operand", 0))

    assert (replies[0].outcome, replies[0].answers[0].collectives) == ("answered", ())


# Text of the summary.


def test_broadcast_allows_two_kinds_of_fault_and_all_reduce_allows_all_five() -> None:
    assert [is_possible(kind, "broadcast") for kind in FAULTS] == [False, False, True, True, False]
    assert [is_possible(kind, "all_reduce") for kind in FAULTS] == [True] * 5


def found_of(**rejected: int) -> Audit:
    """An audit in which that many of two runs were rejected, by the site's kind."""
    rows = {}
    for kind, count in rejected.items():
        site = Site(kind, "forward", "mesh")
        row = AuditRow(collective=str(site), fault="own operand", runs=2, rejected=count)
        rows[site, "own operand"] = row
    return Audit("mine", cases=2, rows=rows)


@pytest.mark.parametrize(
    ("num_calls", "chosen"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (4, [0, 1, 3]), (20, [0, 9, 19])]
)
def test_audit_spoils_the_first_middle_and_last_of_many_calls(num_calls: int, chosen: list[int]) -> None:
    assert representatives(range(num_calls), [4] * num_calls) == chosen


def test_audit_spoils_one_call_for_each_operand_size() -> None:
    assert representatives(range(10, 20), [4, 4, 4, 4, 4, 4, 8, 8, 16, 4]) == [10, 14, 16, 18, 19]
    assert representatives(range(20), range(20)) == [0, 1, 2, 3, 9, 19]


def test_audit_is_inconclusive_if_claims_reject_only_the_fault_that_writes_nan() -> None:
    """That NaN is rejected shows that a result is looked at, not that it had to be another."""
    found = found_of(all_reduce=0)
    found.rows[Site("all_reduce", "forward", "mesh"), "poisoned"] = AuditRow(
        collective="all_reduce in the forward", fault="poisoned", runs=2, rejected=2
    )

    assert "shows nothing" in audits.in_lines([found.as_data("p")])[0]


def test_audit_table_has_a_row_for_each_fault_of_each_collective() -> None:
    lines = audits.as_csv([found_of(all_reduce=1, broadcast=0).as_data("p")]).splitlines()

    assert lines[1:] == [
        "p,all_reduce in the forward,own operand,2,1,no claim",
        "p,broadcast in the forward,own operand,2,0,no claim",
    ]


# Audits within a run.

SUITE = """
from dataclasses import replace
from equivtest.verdicts.judging import DEFAULT_CLAIMS
from equivtest.pytest_plugin.suite import load_properties, properties_dir

prop = load_properties(properties_dir())["zero3_fetch_all_gather"]
mine = replace(prop, subject="{subject}", examples=(), claims=(DEFAULT_CLAIMS[0], DEFAULT_CLAIMS[2]))
del prop
"""


def write_property(folder: Path, subject: str) -> str:
    (folder / "test_mine.py").write_text(SUITE.format(subject=subject))
    return str(folder)


@pytest.mark.ranks
def test_run_ends_with_exit_code_2_if_a_property_calls_no_collective(command: Command, tmp_path: Path) -> None:
    mine, report = write_property(tmp_path, PROGRAMS + "without_collectives"), tmp_path / "report"
    ended = command(ROOT, "run", mine, "-n0", "--profile=smoke", "--world-sizes=2", f"--report={report}")
    claims = [line for line in ended.stdout.splitlines() if line.startswith("open ")]

    assert ended.code == 2 and "it called no collective: nothing shows that it is parallel" in ended.stdout
    assert len(claims) == 1 and "equals_unsharded" not in ended.stdout.partition("open ")[0]
    assert "none was called" in (report / "audit.csv").read_text()


def run_of_a_wrong_fetch(command: Command, folder: Path, *args: str) -> Ended:
    mine = write_property(folder, PROGRAMS + "wrong_everywhere")
    return command(ROOT, "run", mine, "-n0", "--profile=smoke", "--world-sizes=2", "--dtypes=float32", *args)


@pytest.mark.ranks
def test_audit_of_a_wrong_program_adds_no_failure_to_the_run(command: Command, tmp_path: Path) -> None:
    ended = run_of_a_wrong_fetch(command, tmp_path)

    assert ended.code == 1 and "Misuse" not in ended.stdout and "mine[audit]" not in ended.stdout
    assert ended.stdout.count("audit   mine: not audited: the audit waits until the property holds") == 1


@pytest.mark.ranks
def test_run_that_selects_only_audits_exits_with_2_if_the_program_is_wrong(command: Command, tmp_path: Path) -> None:
    ended = run_of_a_wrong_fetch(command, tmp_path, "-k", "audit")

    assert ended.code == 2 and "nothing is shown: " in ended.stdout
    assert "not audited: it failed in all" in ended.stdout


def test_summary_says_that_no_property_is_audited_if_audits_are_off(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "mine")
    result = run_suite(pytester, "--audit=off", "--report=out")
    environment = json.loads((pytester.path / "out" / "environment.json").read_text())

    assert (result.ret, environment["audit"]) == (0, "off") and "; not audited" in result.stdout.str()


@pytest.mark.parametrize(("keyword", "told"), [("w2", [": mine"]), ("mine", [])])
def test_summary_says_that_audits_were_deselected(pytester: pytest.Pytester, keyword: str, told: list[str]) -> None:
    make_suite(pytester, "mine")
    result = run_suite(pytester, "--audit=on", "-k", keyword)
    line = "audit   not selected, so green claims may show nothing"

    assert [row.removeprefix(line) for row in result.outlines if row.startswith("audit ")] == told
    assert result.ret == 0 and ("audit mine" in log_of(pytester)) != bool(told)


def test_audit_on_one_rank_is_refused_with_a_reason(command: Command, tmp_path: Path) -> None:
    ended = command(ROOT, "audit", write_property(tmp_path, FETCH), "-n0", "--world-sizes=1")

    assert (ended.code, ended.stdout) == (2, "")
    assert ended.stderr.startswith("equivtest: --world-sizes: an audit needs at least two ranks, got only 1: add 2")


@pytest.mark.ranks
def test_audit_command_prints_the_failed_claims_of_each_collective(command: Command, tmp_path: Path) -> None:
    ended = command(ROOT, "audit", write_property(tmp_path, "zero3_fetch_all_gather"), "-n0", "--world-sizes=2")
    row = next(line for line in ended.stdout.splitlines() if "all_gather in the forward" in line and "dropped" in line)

    assert ended.code == 0 and "equals_unsharded" in row and "properties: 1, cases: " in ended.stdout
