"""The search: every failure separately, and the smallest case of each."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from equivtest.base import limits
from equivtest.cases.case import Case, from_code, from_data
from equivtest.errors import Misuse
from equivtest.families.linear.strategy import linear_cases
from equivtest.families.zero3.fetch.case import FetchCase, RefusedFetchCase
from equivtest.families.zero3.fetch.strategy import fetch_cases, refused_fetch_cases
from equivtest.module import module_property
from equivtest.programs.case import ModuleCase
from equivtest.property import Property, Space
from equivtest.ranks.pool import Pool
from equivtest.ranks.reply import Reply
from equivtest.report.handover import TORCHS, Record
from equivtest.search.chunks import Chunk, chunk_cases
from equivtest.search.differential import fails_alike
from equivtest.search.known import Condition, KnownFailure, KnownFailures
from equivtest.search.replay import read_replay, replay
from equivtest.search.search import Findings, search
from equivtest.verdicts.claims import agrees_on_all_ranks, does_not_touch_its_inputs, equals_unsharded, refuses
from equivtest.verdicts.judging import judge_replies
from equivtest.verdicts.verdict import Judgement, Mismatch, Verdict
from tests.replies import (
    StubPool,
    change_answer,
    drop_tensor,
    raised,
    right_replies,
    set_element,
)

CLAIMS = (equals_unsharded, agrees_on_all_ranks, does_not_touch_its_inputs)
CHUNK = Chunk(2, limits.DTYPES, 0, 20)
NOTHING = KnownFailures()
SMALLEST = FetchCase(world_size=1)
Change = Callable[[FetchCase, list[Reply]], list[Reply]]


def claimed(subject: str = "mine:fetch", **fields: Any) -> Property:
    """A property of fetches; no module may hold one, or pytest would run it."""
    made = Property(subject, "Fetched parameters are right.", "nowhere", fetch_cases, CLAIMS)
    return replace(made, **fields)


def wrong_second_value(case: FetchCase, replies: list[Reply]) -> list[Reply]:
    """Puts NaN into the second parameter's first element on rank 0, if there is one."""
    if len(case.parameters) < 2 or not math.prod(case.parameters[1]):
        return replies
    return set_element(replies, 0, "param.1", (0,) * len(case.parameters[1]), float("nan"))


def misused_for_three(case: FetchCase, replies: list[Reply]) -> list[Reply]:
    """Makes rank 0 break its contract with the harness if there are three parameters."""
    broken = replace(replies[0], outcome="misused", answers=(), error_text="a subject must return a dict")
    return [broken, *replies[1:]] if len(case.parameters) > 2 else replies


def missing_third(case: FetchCase, replies: list[Reply]) -> list[Reply]:
    """Removes the third parameter from rank 0, if there is one."""
    return drop_tensor(replies, 0, "param.2") if len(case.parameters) > 2 else replies


def touches_three(case: FetchCase, replies: list[Reply]) -> list[Reply]:
    """Rank 0 touches a first parameter of at least three elements."""
    if math.prod(case.parameters[0]) < 3:
        return replies
    return change_answer(replies, 0, lambda answer: replace(answer, touched=("param.0: values have changed",)))


def stub(*changes: Change, from_world: int = 1) -> StubPool:
    """Right replies to which every change was made, in worlds of at least that size."""

    def answer(case: Case) -> list[Reply]:
        assert isinstance(case, FetchCase)
        replies = right_replies(case)
        for change in changes if case.world_size >= from_world else ():
            replies = change(case, replies)
        return replies

    return StubPool(answer)


def against_gloo(pool: StubPool, gloo: StubPool, tmp_path: Path, known: KnownFailures = NOTHING) -> Findings:
    """Searches on a backend whose failures run again on gloo, on one rank."""
    chunk = replace(CHUNK, world_size=1)
    own, other = cast(Pool, pool), cast(Pool, gloo)
    return search(one_draw(claimed()), chunk, own, known, tmp_path, gloo=lambda: other)


def one_draw(prop: Property) -> Property:
    """The property over cases of one draw in the whole world: changes are made to the first, on process 0."""

    def simpler(case: Case) -> Case:
        return replace(case, values=case.values[:1], members=())

    return replace(prop, cases=lambda space: prop.cases(space).map(simpler))


def run(
    pool: StubPool, tmp_path: Path, *, chunk: Chunk = CHUNK, known: KnownFailures = NOTHING, **fields: Any
) -> Findings:
    return search(one_draw(claimed(**fields)), chunk, cast(Pool, pool), known, tmp_path)


def targets(findings: Findings) -> set[tuple[str, str]]:
    return {(failure.claim, failure.kind) for failure in findings.failures}


def shrunk(findings: Findings, claim: str) -> FetchCase:
    [case] = [from_code(failure.case) for failure in findings.failures if failure.claim == claim]
    assert isinstance(case, FetchCase)
    return case


def entry(claim: str, kind: str, *where: Condition, case: Case = SMALLEST) -> KnownFailure:
    return KnownFailure("mine:fetch", claim, kind, where, case, "known since then")


# Found failures.


def test_search_of_a_right_subject_runs_each_case_once_and_finds_no_failure(tmp_path: Path) -> None:
    pool = stub()
    findings = run(pool, tmp_path / "failures")

    assert findings.failures == [] and len(findings.records) == len(pool.seen) == len(set(pool.seen))
    assert {kind for record in findings.records for kind in record.verdicts.values()} == {"holds"}
    assert not (tmp_path / "failures").exists()


def test_two_failures_are_shrunk_separately(tmp_path: Path) -> None:
    findings = run(stub(wrong_second_value, touches_three), tmp_path, chunk=replace(CHUNK, world_size=1))

    assert {"equals_unsharded", "does_not_touch_its_inputs"} <= {claim for claim, _ in targets(findings)}
    assert shrunk(findings, "equals_unsharded").parameters == ((1,), (1,))
    assert shrunk(findings, "does_not_touch_its_inputs").parameters == ((3,),)


def test_failure_that_also_occurs_on_gloo_and_the_cpu_counts_as_known(tmp_path: Path) -> None:
    gloo = stub(wrong_second_value)
    findings = against_gloo(stub(wrong_second_value), gloo, tmp_path)
    known = {reason for record in findings.records for reason in record.known.values()}

    assert findings.failures == [] and known == {f"{TORCHS} (value)"}
    assert 0 < len(gloo.seen) < len(findings.records)


def test_failure_of_the_backend_is_reported_beside_a_failure_of_torch_on_gloo(tmp_path: Path) -> None:
    findings = against_gloo(stub(wrong_second_value, touches_three), stub(wrong_second_value), tmp_path)

    assert targets(findings) == {("does_not_touch_its_inputs", "touched")}


def test_failure_is_attributed_to_the_backend_if_gloo_fails_at_another_tensor(tmp_path: Path) -> None:
    """On gloo the first parameter is wrong, on the backend the second."""

    def wrong_first_value(case: FetchCase, replies: list[Reply]) -> list[Reply]:
        shape = case.parameters[0]
        return set_element(replies, 0, "param.0", (0,) * len(shape), math.nan) if math.prod(shape) else replies

    findings = against_gloo(stub(wrong_second_value), stub(wrong_first_value), tmp_path)

    assert targets(findings) == {("equals_unsharded", "value")}


def test_shipped_known_failure_excuses_no_case_that_holds_on_gloo(tmp_path: Path) -> None:
    """The entry is about gloo and the CPU, which are right on these cases."""
    shipped = KnownFailures((replace(entry("equals_unsharded", "value"), is_shipped=True),))
    alone = against_gloo(stub(wrong_second_value), stub(), tmp_path, shipped)
    both = against_gloo(stub(wrong_second_value), stub(wrong_second_value), tmp_path, shipped)
    reasons = {reason for record in both.records for reason in record.known.values()}

    assert targets(alone) == {("equals_unsharded", "value")}
    assert both.failures == [] and reasons == {"known since then"}


def test_known_failure_of_a_users_own_list_needs_no_run_on_gloo(tmp_path: Path) -> None:
    own, gloo = KnownFailures((entry("equals_unsharded", "value"),)), stub()

    assert against_gloo(stub(wrong_second_value), gloo, tmp_path, own).failures == []
    assert not gloo.seen


@pytest.mark.parametrize(
    ("text", "alike"),
    [("ValueError: on cpu:0", True), ("ValueError: on two", False), ("RuntimeError: on cpu:0", False)],
)
def test_exceptions_that_differ_only_in_their_devices_count_as_equal(text: str, alike: bool) -> None:  # noqa: FBT001
    def ended(detail: str) -> Verdict:
        return Verdict(
            claim="",
            subject="mine:fetch",
            case=SMALLEST,
            judgement=Judgement("raised"),
            detail=f"rank 0 raised {detail}",
        )

    assert fails_alike(ended("ValueError: on npu:1\n..."), ended(text)) == alike


@pytest.mark.parametrize("kind", ["lost", "timed_out"])
def test_time_out_or_lost_rank_is_never_attributed_to_torch(kind: str) -> None:
    """A busy machine is enough for gloo to time out too."""
    ended = Verdict(claim="", subject="mine:fetch", case=SMALLEST, judgement=Judgement(kind))

    assert not fails_alike(ended, ended)


@pytest.mark.parametrize(
    ("kind", "mismatch", "other", "alike"),
    [
        ("collectives", Mismatch("", 0, "none", "1 all_reduce"), Mismatch("", 0, "none", "1 all_reduce"), True),
        ("collectives", Mismatch("", 0, "none", "1 all_reduce"), Mismatch("", 0, "none", "1 broadcast"), False),
        ("not_refused", Mismatch("refusal", 0, "an error", "OSError"), Mismatch("refusal", 0, "", "answered"), False),
        ("value", Mismatch("output", 0, "1", "2", (0,), error=1.0), Mismatch("output", 0, "1", "3", (0,)), True),
        (
            "value",
            Mismatch("output", 0, "1", "nan", (0,), error=math.nan),
            Mismatch("output", 0, "1", "3", (0,)),
            False,
        ),
        (
            "value",
            Mismatch("output", 0, "1", "2", (0,), extent="1"),
            Mismatch("output", 0, "1", "2", (1,), extent="1"),
            True,
        ),
        (
            "value",
            Mismatch("output", 0, "1", "2", (0,), extent="1"),
            Mismatch("output", 0, "1", "2", (1,), extent="2"),
            False,
        ),
        ("value", Mismatch("output", 0, "1", "2", (0,)), Mismatch("output", 0, "1", "2", (1,)), False),
    ],
    ids=[
        "same collectives",
        "different collectives",
        "different refusals",
        "different roundings",
        "NaN alone",
        "same extent",
        "different extent",
        "different element",
    ],
)
def test_failures_on_two_backends_count_as_equal_if_tensor_and_element_agree(
    kind: str, mismatch: Mismatch, other: Mismatch, *, alike: bool
) -> None:
    first, second = (
        Verdict(claim="", subject="mine:fetch", case=SMALLEST, judgement=Judgement(kind, (each,)))
        for each in (mismatch, other)
    )

    assert fails_alike(first, second) == alike


OUTPUT, GRAD = (Mismatch(name, 0, "1", "2", (0,), extent="1") for name in ("output", "grad.x"))


@pytest.mark.parametrize(
    ("here", "on_gloo", "alike"),
    [
        ((OUTPUT, GRAD), (OUTPUT, GRAD), True),
        ((GRAD,), (OUTPUT, GRAD), True),
        ((OUTPUT, GRAD), (OUTPUT,), False),
        ((OUTPUT, GRAD), (OUTPUT, replace(GRAD, local_index=(1,), extent="2")), False),
        ((OUTPUT,), (GRAD,), False),
    ],
    ids=["both tensors", "fewer than on gloo", "a second tensor", "other elements of the second", "another tensor"],
)
def test_failure_is_torchs_only_if_each_wrong_tensor_is_wrong_alike_on_gloo(
    here: tuple[Mismatch, ...], on_gloo: tuple[Mismatch, ...], *, alike: bool
) -> None:
    first, second = (
        Verdict(claim="", subject="mine:fetch", case=SMALLEST, judgement=Judgement("value", each))
        for each in (here, on_gloo)
    )

    assert fails_alike(first, second) == alike


def test_search_that_ends_with_misuse_reports_the_failure_found_before(tmp_path: Path) -> None:
    pool = stub(wrong_second_value, misused_for_three)
    first = FetchCase(world_size=1, parameters=((2,), (3,)), requires_grad=(True, True))
    second = FetchCase(world_size=1, parameters=((2,), (3,), (1,)), requires_grad=(True, True, True))
    findings = run(pool, tmp_path, chunk=replace(CHUNK, world_size=1), examples=(first, second))

    assert findings.misuse == "mine:fetch: a subject must return a dict"
    assert shrunk(findings, "equals_unsharded").parameters == ((1,), (1,))
    assert pool.seen[:2] == [first, second] and len(findings.records) == 1
    assert any(len(case.parameters) > 2 for case in pool.seen[2:])
    assert not run(stub(), tmp_path).misuse


def test_failure_is_shrunk_only_in_worlds_that_the_property_supports(tmp_path: Path) -> None:
    def cases(space: Space) -> SearchStrategy[FetchCase]:
        if 2 in space.world_sizes:
            raise Misuse("three ranks at least")
        return fetch_cases(space)

    findings = run(stub(touches_three), tmp_path, chunk=replace(CHUNK, world_size=3), cases=cases)

    assert shrunk(findings, "does_not_touch_its_inputs").world_size == 3 and not findings.misuse


def test_search_for_one_failure_stops_once_it_is_found_and_shrunk(tmp_path: Path) -> None:
    everything = run(stub(wrong_second_value, touches_three), tmp_path)
    prop = one_draw(claimed())
    pool = cast(Pool, stub(wrong_second_value, touches_three))
    found = search(prop, CHUNK, pool, NOTHING, tmp_path, only=("does_not_touch_its_inputs", "touched"))

    assert targets(everything) > targets(found) == {("does_not_touch_its_inputs", "touched")}
    assert shrunk(found, "does_not_touch_its_inputs") == shrunk(everything, "does_not_touch_its_inputs")
    assert 0 < len(found.records) < len(everything.records)


@pytest.mark.ranks
def test_search_for_one_failure_leaves_its_ranks_alive(pool: Pool, tmp_path: Path) -> None:
    wanted, case = ("equals_unsharded", "value"), FetchCase(world_size=2)
    prop = claimed("tests.defects.zero3_fetch.collectives:parameters_averaged")
    with Pool(beside=pool) as new:
        new.run("zero3_fetch_all_gather", case)
        before = new._worlds[2].pids
        found = search(prop, CHUNK, new, NOTHING, tmp_path, only=wanted, is_enough=lambda case: True)

        assert targets(found) == {wanted} and new._worlds[2].pids == before


def test_search_for_one_failure_stops_judging_at_the_failing_claim_and_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = ("does_not_touch_its_inputs", "touched")
    judged: list[tuple[set[str], set[int]]] = []

    def spy(*args: Any, until: Any) -> list[Verdict]:
        found = judge_replies(*args, until=until)
        if until == wanted and any(verdict.failed for verdict in found):
            judged.append(({verdict.claim for verdict in found}, {verdict.draw for verdict in found}))
        return found

    monkeypatch.setattr("equivtest.search.search.judge_replies", spy)
    pool = cast(Pool, stub(touches_three))
    whole_world = replace(claimed(), cases=lambda space: fetch_cases(space).map(lambda case: replace(case, members=())))
    found = search(whole_world, CHUNK, pool, NOTHING, tmp_path, only=wanted)

    assert judged and all(of == ({wanted[0]}, {0}) for of in judged)
    assert len(found.records[-1].verdicts) > 1 and targets(found) == {wanted}


def test_search_with_is_enough_stops_at_the_first_case_that_is_enough(tmp_path: Path) -> None:
    pool = stub(touches_three)

    def is_enough(case: Case) -> bool:
        return isinstance(case, FetchCase) and len(case.parameters) < 3 and math.prod(case.parameters[0]) in (4, 5)

    wanted = ("does_not_touch_its_inputs", "touched")
    found = search(one_draw(claimed()), CHUNK, cast(Pool, pool), NOTHING, tmp_path, only=wanted, is_enough=is_enough)

    assert sum(is_enough(case) for case in pool.seen) == 1
    assert shrunk(found, "does_not_touch_its_inputs") == pool.seen[-1]
    assert {case.world_size for case in pool.seen} == {2}


def test_search_with_is_enough_tries_smaller_worlds(tmp_path: Path) -> None:
    wanted = ("does_not_touch_its_inputs", "touched")
    pool = cast(Pool, stub(touches_three))
    found = search(
        one_draw(claimed()),
        replace(CHUNK, world_size=3),
        pool,
        NOTHING,
        tmp_path,
        only=wanted,
        is_enough=lambda case: case.world_size == 2,
    )

    assert shrunk(found, "does_not_touch_its_inputs").world_size == 2


def test_two_kinds_of_failure_of_one_claim_are_shrunk_separately(tmp_path: Path) -> None:
    findings = run(stub(wrong_second_value, missing_third), tmp_path, claims=(equals_unsharded,))
    numbers = {f.kind: len(cast(FetchCase, from_code(f.case)).parameters) for f in findings.failures}

    assert numbers == {"value": 2, "shape": 3}


def test_failure_has_a_message_that_names_its_replay_file(tmp_path: Path) -> None:
    [failure] = run(stub(touches_three), tmp_path).failures

    assert failure.message.startswith("InputTouched: mine:fetch: param.0")
    assert failure.message.endswith(f"equivtest replay {failure.replay}")
    assert Path(failure.replay).parent == tmp_path


def test_failure_that_only_an_example_shows_is_reported_without_shrinking(tmp_path: Path) -> None:
    odd = FetchCase(world_size=2, parameters=((77,),))
    pool = stub(lambda case, replies: touches_three(case, replies) if case.parameters == odd.parameters else replies)
    [failure] = run(pool, tmp_path, examples=(odd,)).failures

    assert from_code(failure.case) == odd


# Known failures.


@pytest.mark.parametrize("neighbour", [touches_three, missing_third], ids=["another claim", "another kind"])
def test_known_failure_does_not_hide_another_failure(tmp_path: Path, neighbour: Change) -> None:
    known = KnownFailures((entry("equals_unsharded", "value"), entry("agrees_on_all_ranks", "replica")))
    findings = run(stub(wrong_second_value, neighbour), tmp_path, known=known)
    records = [record for record in findings.records if record.verdicts["equals_unsharded"] == "known"]

    assert targets(findings) == {
        ("does_not_touch_its_inputs", "touched") if neighbour is touches_three else ("equals_unsharded", "shape")
    }
    assert records and all(record.known["equals_unsharded"] == "known since then" for record in records)


def test_two_known_failures_of_different_kinds_apply_to_one_claim(tmp_path: Path) -> None:
    known = KnownFailures(
        (
            entry("equals_unsharded", "shape"),
            entry("equals_unsharded", "value"),
            entry("agrees_on_all_ranks", "replica"),
        )
    )

    findings = run(stub(wrong_second_value), tmp_path, known=known)

    assert findings.records and not findings.misuse and findings.failures == []


def test_shrinking_avoids_cases_that_are_known_to_fail(tmp_path: Path) -> None:
    where = Condition("world_size", "==", 1)
    known = KnownFailures((entry("does_not_touch_its_inputs", "touched", where),))
    findings = run(stub(touches_three), tmp_path, known=known)

    assert shrunk(findings, "does_not_touch_its_inputs").world_size == 2


@pytest.mark.parametrize("kind", ["raised", "lost", "timed_out"])
def test_case_covered_by_a_known_failure_that_breaks_ranks_does_not_run(tmp_path: Path, kind: str) -> None:
    known = KnownFailures((entry("equals_unsharded", kind, Condition("dtype", "==", "float32")),))
    pool = stub(touches_three)
    findings = run(pool, tmp_path, known=known)
    barred = [record for record in findings.records if record.dtype == "float32"]

    assert {case.dtype for case in pool.seen} == set(limits.DTYPES) - {"float32"}
    assert barred and all(record.verdicts == {"equals_unsharded": "known"} for record in barred)
    assert all(record.known == {"equals_unsharded": "known since then"} for record in barred)
    assert shrunk(findings, "does_not_touch_its_inputs").dtype == "float64"


# Shrinking.


def test_shrinking_tries_smaller_worlds_first(tmp_path: Path) -> None:
    """In 2, where it fails; never in 3."""
    pool = stub(touches_three, from_world=2)
    findings = run(pool, tmp_path, chunk=replace(CHUNK, world_size=4))
    visited = list(dict.fromkeys(case.world_size for case in pool.seen))

    assert visited == [4, 2]
    assert shrunk(findings, "does_not_touch_its_inputs") == FetchCase(world_size=2, parameters=((3,),))


def test_shrinking_keeps_several_ranks_if_the_failure_on_one_rank_has_another_cause(tmp_path: Path) -> None:
    def on_one_rank(case: FetchCase, replies: list[Reply]) -> list[Reply]:
        return set_element(replies, 0, "param.0", (0,) * len(case.parameters[0]), float("nan"))

    def answer(case: Case) -> list[Reply]:
        assert isinstance(case, FetchCase)
        change = on_one_rank if case.world_size == 1 else wrong_second_value
        return change(case, right_replies(case))

    findings = run(StubPool(answer), tmp_path, chunk=replace(CHUNK, dtypes=("float32",)))

    assert shrunk(findings, "equals_unsharded") == FetchCase(
        world_size=2, parameters=((1,), (1,)), requires_grad=(True, True)
    )


def test_message_names_another_wrong_tensor_that_the_failure_had_before_shrinking(tmp_path: Path) -> None:
    def wrong_first_value(case: FetchCase, replies: list[Reply]) -> list[Reply]:
        return set_element(replies, 0, "param.0", (0,), float("nan")) if len(case.parameters) == 1 else replies

    example = FetchCase(world_size=2, parameters=((2,), (3,)), requires_grad=(True, True))
    fields: dict[str, Any] = {"examples": (example,), "claims": (equals_unsharded,)}
    [slid] = run(stub(wrong_second_value, wrong_first_value), tmp_path, **fields).failures
    [same] = run(stub(wrong_second_value), tmp_path, **fields).failures

    assert f"  at first  param.1 was the first wrong tensor, in {example!r}: check if" in slid.message
    assert "at first" not in same.message


def test_shrinking_uses_only_the_world_sizes_and_dtypes_of_the_run(tmp_path: Path) -> None:
    """Though it fails on one rank too, and the first dtype would be simpler."""
    pool = stub(touches_three)
    chunk = replace(CHUNK, world_size=4, world_sizes=(4, 2), dtypes=("bfloat16", "float16"))
    findings = run(pool, tmp_path, chunk=chunk)

    assert {(case.world_size, case.dtype) for case in pool.seen} == {
        (size, dtype) for size in (2, 4) for dtype in chunk.dtypes
    }
    assert shrunk(findings, "does_not_touch_its_inputs") == FetchCase(
        world_size=2, dtype="bfloat16", parameters=((3,),)
    )


def test_property_draws_no_case_of_a_world_size_outside_the_run(tmp_path: Path) -> None:
    def cases_of_three(space: Space) -> SearchStrategy[Case]:
        return {(3,): fetch_cases(space)}[space.world_sizes]

    findings = run(
        stub(touches_three), tmp_path, chunk=replace(CHUNK, world_size=3, world_sizes=(3,)), cases=cases_of_three
    )

    assert shrunk(findings, "does_not_touch_its_inputs") == FetchCase(world_size=3, parameters=((3,),))


def test_shrinking_a_module_uses_only_the_shapes_of_its_property(tmp_path: Path) -> None:
    shapes = ((7, 2), (5, 3), (1, 4))
    prop = one_draw(module_property("torch.nn:Identity", "mine:whole", shapes, batch="whole"))
    pool = StubPool(lambda case: set_element(right_replies(case), 0, "output", (0, 0), float("nan")))
    chunk = replace(CHUNK, world_size=3, world_sizes=(2, 3))
    findings = search(prop, chunk, cast(Pool, pool), NOTHING, tmp_path)
    seen = [case for case in pool.seen if isinstance(case, ModuleCase)]
    [smallest] = {from_code(failure.case) for failure in findings.failures if failure.kind == "value"}

    assert {case.arguments.x_shape for case in seen} <= set(shapes) and {case.world_size for case in seen} == {2, 3}
    assert isinstance(smallest, ModuleCase) and (smallest.arguments.x_shape, smallest.world_size) == ((7, 2), 2)


def test_failure_that_needs_three_ranks_is_shrunk_on_three_ranks(tmp_path: Path) -> None:
    pool = stub(touches_three, from_world=3)
    findings = run(pool, tmp_path, chunk=replace(CHUNK, world_size=3))
    tried = [case.world_size for case in pool.seen]

    assert shrunk(findings, "does_not_touch_its_inputs") == FetchCase(world_size=3, parameters=((3,),))
    assert not tried.count(1) and 0 < tried.count(2) <= limits.SHRINK_TRIES


def test_failure_found_while_shrinking_another_failure_is_reported(tmp_path: Path) -> None:
    def wrong_on_two(case: FetchCase, replies: list[Reply]) -> list[Reply]:
        return drop_tensor(replies, 0, "param.0") if case.world_size == 2 else replies

    findings = run(stub(touches_three, wrong_on_two), tmp_path, chunk=replace(CHUNK, world_size=3))

    assert {("does_not_touch_its_inputs", "touched"), ("equals_unsharded", "shape")} <= targets(findings)


def test_shrinking_past_its_time_limit_uses_only_results_of_cases_that_already_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SHRINK_S", -1.0)
    pool = stub(touches_three)
    few = st.sampled_from([FetchCase(world_size=2, parameters=((size,),)) for size in range(1, 9)])
    [failure] = run(pool, tmp_path, cases=lambda space: few).failures

    assert len(pool.limits_s) == len(pool.renewed) == 1
    assert from_code(failure.case) == pool.seen[-1] and pool.seen[-1] in pool.seen[:-1]


def test_case_runs_once_during_search_and_shrinking(tmp_path: Path) -> None:
    pool = stub(wrong_second_value, touches_three)
    failures = run(pool, tmp_path).failures

    assert len(pool.renewed) == len(failures)
    assert len(pool.seen) == len(set(pool.seen)) + len(failures)


@pytest.mark.parametrize(("outcome", "limit_s"), [("timed_out", limits.SHRINK_CASE_S), ("lost", limits.CASE_S)])
def test_time_out_is_shrunk_under_a_shorter_time_limit(tmp_path: Path, outcome: str, limit_s: float) -> None:
    pool = StubPool(lambda case: [Reply(rank=0, outcome=outcome), *right_replies(case)[1:]])  # type: ignore[arg-type]
    [failure] = run(pool, tmp_path).failures

    assert failure.kind == outcome and set(pool.limits_s) == {limit_s}


def test_message_of_a_shrunk_time_out_names_the_limits_before_and_during_shrinking(tmp_path: Path) -> None:
    """A rank without an answer in 5 s during shrinking might have answered later."""
    silent = Reply(rank=0, outcome="timed_out", detail="no answer within 5 s\nstacks")
    pool = StubPool(lambda case: [silent, *right_replies(case)[1:]])
    [failure] = run(pool, tmp_path, chunk=replace(CHUNK, world_size=3)).failures

    assert (
        "  no answer within 5 s, the limit while equivtest shrinks a time-out; before shrinking the limit was "
        "60 s\n  stacks\n" in failure.message
    )


def test_message_of_a_shrunk_time_out_names_the_longer_limits_of_many_ranks(tmp_path: Path) -> None:
    silent = Reply(rank=0, outcome="timed_out", detail="no answer within 5.625 s\nstacks")
    pool = StubPool(lambda case: [silent, *right_replies(case)[1:]])
    [failure] = run(pool, tmp_path, chunk=replace(CHUNK, world_size=16, world_sizes=(9, 16))).failures

    assert "no answer within 5.625 s, the limit while" in failure.message
    assert "before shrinking the limit was 67.5 s" in failure.message


def test_search_stops_early_after_several_runs_in_which_ranks_broke(tmp_path: Path) -> None:
    pool = StubPool(lambda case: [raised(rank) for rank in range(case.world_size)])
    findings = run(pool, tmp_path)

    assert len(findings.records) == limits.BROKEN_RUNS
    assert targets(findings) == {("equals_unsharded", "raised")}
    assert shrunk(findings, "equals_unsharded") == FetchCase(world_size=2)


def test_answer_to_a_case_that_must_be_refused_is_shrunk_to_a_case_that_must_be_refused(tmp_path: Path) -> None:
    pool = StubPool(lambda case: [Reply(rank=rank, outcome="answered") for rank in range(case.world_size)])
    [failure] = run(pool, tmp_path, cases=refused_fetch_cases, claims=(refuses,)).failures

    assert failure.kind == "not_refused" and isinstance(from_code(failure.case), RefusedFetchCase)


# Budget.


def test_search_without_time_left_runs_one_case_and_counts_the_omitted_cases(tmp_path: Path) -> None:
    pool = StubPool(right_replies)
    findings = search(claimed(), CHUNK, cast(Pool, pool), NOTHING, tmp_path, until_s=0.0)

    assert len(pool.seen) == 1 and len(findings.records) == len(pool.seen[0].values)
    assert findings.cut == len(chunk_cases(claimed(), CHUNK)) - 1 >= CHUNK.num_cases - 1


def test_search_within_a_budget_runs_examples_last(tmp_path: Path) -> None:
    pool, example = StubPool(right_replies), FetchCase(world_size=2, parameters=((77,),))
    found = search(claimed(examples=(example,)), CHUNK, cast(Pool, pool), NOTHING, tmp_path, until_s=1e12)

    assert pool.seen[-1] == example and found.cut == 0


def test_array_row_counts_as_covered_only_after_its_case_ran(tmp_path: Path) -> None:
    chunk, pool = replace(CHUNK, strength=1), cast(Pool, StubPool(right_replies))
    cut, whole = (search(claimed(), chunk, pool, NOTHING, tmp_path, until_s=until_s) for until_s in (0.0, 1e12))
    assert cut.coverage is not None and whole.coverage is not None

    assert [row.state for row in cut.coverage.rows].count("open") == len(cut.coverage.rows) - 1
    assert {row.state for row in whole.coverage.rows} == {"judged"}


# Records.


def test_record_of_a_draw_has_its_case_seed_verdicts_and_margins(tmp_path: Path) -> None:
    pool = StubPool(right_replies)
    findings = search(claimed(), replace(CHUNK, num_cases=3), cast(Pool, pool), NOTHING, tmp_path)
    first = findings.records[0]
    case = pool.seen[0]

    assert len(findings.records) == sum(len(case.values) for case in pool.seen)
    assert (first.draw, first.mode, first.seed) == (0, *case.values[0])
    assert (first.world_size, first.dtype, first.shard_kind) == (2, case.dtype, case.shard_kind)
    assert first.margins == {claim.name: 0.0 for claim in CLAIMS}
    assert from_data(msgspec.json.decode(msgspec.json.encode(first), type=Record).case) == case


def test_record_of_real_values_has_the_margin_of_each_tensor(tmp_path: Path) -> None:
    prop = claimed(cases=lambda space: linear_cases(space, style="colwise"))
    records = search(prop, CHUNK, cast(Pool, StubPool(right_replies)), NOTHING, tmp_path).records
    margins = {mode: [r.tensor_margins for r in records if r.mode == mode] for mode in ("dense", "real")}

    assert margins["dense"] and not any(margins["dense"])
    assert all(0 <= found["output"] <= 1 for found in margins["real"]) and margins["real"]


@pytest.mark.parametrize(("num_open", "num_cells_open"), [(3, 0), (10**6, 3)], ids=["a few", "all"])
def test_cells_that_are_often_inconclusive_are_judged_on_further_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_open: int, num_cells_open: int
) -> None:
    rest = iter([True] * num_open)
    monkeypatch.setattr("equivtest.verdicts.values.is_too_wide", lambda expected: next(rest, False))
    prop = claimed(cases=lambda space: linear_cases(space, style="colwise"), claims=(equals_unsharded,))
    chunk = replace(CHUNK, num_cases=1, per_cell=9, dtypes=("float32",))
    records = search(prop, chunk, cast(Pool, StubPool(right_replies)), NOTHING, tmp_path).records
    verdicts = Counter((r.dtype, r.shard_kind, r.verdicts["equals_unsharded"]) for r in records)
    places = {place[:2] for place in verdicts}
    open_places = {p for p in places if verdicts[(*p, "inconclusive")] > verdicts[(*p, "holds")]}

    judged = [sum(verdicts[(*place, kind)] for kind in ("holds", "inconclusive")) for place in places]

    assert len(places) == 3 and len(open_places) == num_cells_open
    assert min(verdicts[(*place, "inconclusive" if num_cells_open else "holds")] for place in places) >= 9
    assert min(judged) >= (40 if num_cells_open else 9) and max(judged) < 60


def test_search_that_stopped_early_adds_no_cases_to_fill_cells(tmp_path: Path) -> None:
    pool = StubPool(lambda case: [raised(rank) for rank in range(case.world_size)])
    findings = run(pool, tmp_path, chunk=replace(CHUNK, num_cases=1, per_cell=9))

    assert len(findings.records) == limits.BROKEN_RUNS


def test_infinite_margin_is_recorded_as_the_largest_float(tmp_path: Path) -> None:
    """JSON has no infinity."""
    findings = run(stub(wrong_second_value), tmp_path)

    assert max(record.margins["equals_unsharded"] for record in findings.records) == sys.float_info.max
    assert b"null" not in msgspec.json.encode(findings.records)


def test_unsupported_case_is_recorded_and_is_no_failure(tmp_path: Path) -> None:
    pool = StubPool(
        lambda case: [Reply(rank=r, outcome="not_supported", error_text="no") for r in range(case.world_size)]
    )
    findings = run(pool, tmp_path)

    assert findings.failures == []
    assert {tuple(record.verdicts.items()) for record in findings.records} == {(("equals_unsharded", "not_supported"),)}
    assert {record.lacking for record in findings.records} == {"no"}


# On real ranks.


@pytest.mark.ranks
def test_two_bugs_of_a_real_subject_are_found_shrunk_and_replayed(pool: Pool, tmp_path: Path) -> None:
    findings = search(claimed("tests.programs.search:two_bugs"), CHUNK, pool, NOTHING, tmp_path)

    assert targets(findings) == {("equals_unsharded", "value"), ("does_not_touch_its_inputs", "touched")}
    assert shrunk(findings, "equals_unsharded") == FetchCase(
        world_size=2, parameters=((1,), (1,)), requires_grad=(True, True)
    )
    assert shrunk(findings, "does_not_touch_its_inputs") == FetchCase(world_size=2, parameters=((3,),))
    for failure in findings.failures:
        data = read_replay(Path(failure.replay))
        assert replay(data, pool)[0]
        assert not replay(data | {"subject": "zero3_fetch_all_gather"}, pool)[0]


@pytest.mark.ranks
def test_search_on_real_ranks_finds_no_failure_of_a_right_subject(pool: Pool, tmp_path: Path) -> None:
    chunk = replace(CHUNK, num_cases=5)
    findings = search(claimed("zero3_fetch_all_reduce"), chunk, pool, NOTHING, tmp_path)

    assert findings.records and not findings.misuse and findings.failures == []
    assert all(0 < record.busy_s < 60 for record in findings.records)
