"""Earlier visits: draws that run again, worlds that are renewed, failures that need earlier visits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from equivtest.base import limits
from equivtest.cases.case import Case
from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.families.zero3.fetch.strategy import fetch_cases
from equivtest.property import Property, Space
from equivtest.ranks.pool import Pool
from equivtest.ranks.reply import Reply
from equivtest.search.chunks import Chunk
from equivtest.search.known import KnownFailures
from equivtest.search.search import Findings, Target, search
from equivtest.verdicts.claims import does_not_touch_its_inputs, equals_unsharded
from tests.replies import StubPool, on_all_ranks, right_replies

COUNTS = "tests.programs.memory:counts_calls"
CASE = FetchCase(world_size=2, dtype="float64", values=(("dense", 0), ("dense", 1), ("dense", 2)))


@pytest.fixture(scope="module")
def pool(pool: Pool) -> Iterator[Pool]:
    """Ranks that have run nothing else."""
    with Pool(beside=pool) as own:
        yield own


def calls(pool: Pool, case: FetchCase) -> list[int]:
    """Returns the first rank's counts: its calls at each draw, then at the repeat if there is one."""
    answers = pool.run(COUNTS, case)[0].answers
    counted = [answer.tensors["param.0"] for answer in answers]
    return [int(placed.local) for placed in [*counted, *answers[0].again.values()]]


@pytest.mark.ranks
def test_case_with_repeats_runs_its_first_draw_twice_in_one_process(pool: Pool) -> None:
    pool.renew(2)
    assert calls(pool, CASE) == [1, 2, 3]
    assert calls(pool, replace(CASE, repeats=True)) == [4, 5, 6, 7]
    pool.renew(2)
    assert calls(pool, CASE) == [1, 2, 3]


@pytest.mark.ranks
def test_restarting_a_world_keeps_worlds_of_other_sizes(pool: Pool) -> None:
    one = replace(CASE, world_size=1, values=(("dense", 0),))
    [before] = calls(pool, one)
    pool.renew(2)
    pool.renew(3)

    assert calls(pool, one) == [before + 1]


class Remembering(StubPool):
    """A pool whose second and later visits of a world fail, until the world is renewed."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.visits: dict[int, int] = {}

    def _answer(self, case: Case) -> list[Reply]:
        self.visits[case.world_size] = self.visits.get(case.world_size, 0) + 1
        assert isinstance(case, FetchCase)
        has_elements = bool(right_replies(case)[0].answers[0].tensors["param.0"].local.numel())
        if self.visits[case.world_size] < 3 or not has_elements:
            return right_replies(case)
        return on_all_ranks(case, "param.0", lambda local: local * 0 + 0.5)

    def renew(self, world_size: int) -> None:
        super().renew(world_size)
        self.visits[world_size] = 0


def run(
    pool: StubPool,
    directory: Path,
    only: Target | None = None,
    cases: Callable[[Space], SearchStrategy[Case]] = fetch_cases,
) -> Findings:
    prop = Property("mine:fetch", "It is.", "nowhere", cases, (equals_unsharded,))
    chunk = Chunk(1, limits.DTYPES, 0, 10)
    return search(prop, chunk, pool, KnownFailures(), directory, only=only)  # type: ignore[arg-type]


def test_message_has_a_history_line_if_the_failure_needs_earlier_cases(tmp_path: Path) -> None:
    pool = Remembering()
    [failure] = run(pool, tmp_path).failures
    [line] = [line for line in failure.message.splitlines() if line.strip().startswith("history")]

    assert "holds alone in new ranks; it failed after" in line and repr(pool.seen[0]) in line
    assert pool.renewed == [1] and repr(pool.seen[-1]) == failure.case


def test_message_has_no_history_line_if_the_case_fails_in_new_ranks(tmp_path: Path) -> None:
    pool = StubPool(lambda case: on_all_ranks(case, "param.0", lambda local: local * 0 + 0.5))
    [failure] = run(pool, tmp_path).failures

    assert "  history " not in failure.message and pool.renewed == [1]


def test_message_has_no_history_line_if_new_ranks_report_misuse(tmp_path: Path) -> None:
    def answer(case: Case) -> list[Reply]:
        if pool.renewed:
            return [Reply(rank=rank, outcome="misused", error_text="no dict") for rank in range(case.world_size)]
        return on_all_ranks(case, "param.0", lambda local: local * 0 + 0.5)

    pool = StubPool(answer)
    [failure] = run(pool, tmp_path).failures

    assert "  history " not in failure.message and pool.renewed == [1]


def test_failure_found_for_an_audit_is_not_run_again_in_new_ranks(tmp_path: Path) -> None:
    pool = StubPool(lambda case: on_all_ranks(case, "param.0", lambda local: local * 0 + 0.5))
    [failure] = run(pool, tmp_path, only=("equals_unsharded", "value")).failures

    assert failure.kind == "value" and pool.renewed == []


@pytest.mark.ranks
def test_message_has_a_history_line_if_the_subject_keeps_state_between_cases(pool: Pool, tmp_path: Path) -> None:
    subject = "tests.programs.memory:touches_from_the_third_call_on"
    prop = Property(subject, "It is.", "nowhere", fetch_cases, (does_not_touch_its_inputs,))
    [failure] = search(prop, Chunk(1, ("float32",), 0, 8), pool, KnownFailures(), tmp_path).failures

    assert (failure.kind, "holds alone in new ranks" in failure.message) == ("touched", True)


BREAKS = ["raised", "lost", "timed_out"]


@pytest.mark.parametrize("outcome", BREAKS)
def test_message_has_no_history_line_if_a_rank_breaks_in_new_processes(tmp_path: Path, outcome: str) -> None:
    outcomes = iter([outcome] * (limits.BROKEN_RUNS - 1))
    pool = StubPool(lambda case: [Reply(rank=rank, outcome=next(outcomes, "lost")) for rank in range(case.world_size)])  # type: ignore[arg-type]
    failures = run(pool, tmp_path).failures

    assert len(failures) == len(pool.renewed) and not any("  history " in failure.message for failure in failures)


@pytest.mark.parametrize("outcome", BREAKS)
def test_message_has_a_history_line_if_a_rank_breaks_only_after_earlier_cases(tmp_path: Path, outcome: str) -> None:
    visits = iter(range(1000))
    pool = StubPool(
        lambda case: [Reply(rank=0, outcome=outcome)] if next(visits) == 3 else right_replies(case)  # type: ignore[arg-type]
    )
    few = st.sampled_from([FetchCase(world_size=1, parameters=((size,),)) for size in range(1, 9)])
    [failure] = run(pool, tmp_path, cases=lambda space: few).failures

    assert "holds alone in new ranks; it failed after 3 earlier cases" in failure.message
