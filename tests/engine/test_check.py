"""check: one exception class per kind of failure, and no pass if nothing is shown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from equivtest.errors import BrokenSetup, Inconclusive
from equivtest.ranks.pool import Pool
from equivtest.ranks.reply import Reply
from equivtest.verdicts.claims import equals_unsharded, keeps_layout_of_parameter, trains_like_unsharded
from equivtest.verdicts.judging import DEFAULT_CLAIMS, check, judge, judge_replies, raise_for, require_conclusion
from equivtest.verdicts.verdict import (
    FAILING,
    KINDS,
    WHOLE_RUN,
    BackendRefuses,
    ClaimFailed,
    Judgement,
    Mismatch,
    NotRefused,
    ValueMismatch,
    Verdict,
)
from tests.replies import LINEAR, REFUSED, StubPool, drop_tensor, on_all_ranks, raised, right_replies, set_element


def verdict_of(kind: str) -> Verdict:
    judgement = Judgement(kind, (Mismatch("output", 0, "1", "2"),))
    return Verdict(claim="equals_unsharded", subject="mine", case=LINEAR, judgement=judgement)


def caught(kind: str) -> ClaimFailed:
    with pytest.raises(ClaimFailed) as info:
        raise_for(verdict_of(kind))
    return info.value


def stub(replies: list[Reply]) -> Any:
    return StubPool(lambda case: replies)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_failure_raises_a_separate_class(kind: str) -> None:
    failure = caught(kind)

    assert type(failure) is KINDS[kind] and failure.verdict == verdict_of(kind)
    assert str(failure).startswith(f"{KINDS[kind].__name__}: mine: ")


def test_defining_one_class_adds_a_kind_of_failure() -> None:
    class OddElements(ClaimFailed, kind="odd", headline="{tensor} has odd elements"):
        """An element is odd."""

    try:
        failure = caught("odd")
    finally:
        del KINDS["odd"]

    assert type(failure) is OddElements
    assert str(failure).splitlines()[0] == "OddElements: mine: output has odd elements"


def test_every_kind_of_failure_except_not_supported_fails_the_run() -> None:
    assert WHOLE_RUN == ("raised", "lost", "timed_out") and set(KINDS) - {*FAILING} == {"not_supported"}


def test_judgement_of_an_unknown_kind_raises_assertion_error() -> None:
    with pytest.raises(AssertionError, match="vaule"):
        Judgement("vaule")


def test_check_returns_verdicts_if_every_claim_holds() -> None:
    verdicts = check("mine", LINEAR, stub(right_replies(LINEAR)))

    assert [verdict.claim for verdict in verdicts] == [claim.name for claim in DEFAULT_CLAIMS]


def test_check_raises_the_first_failure() -> None:
    with pytest.raises(ValueMismatch, match=r"grad\.x differs from the oracle"):
        check("mine", LINEAR, stub(set_element(right_replies(LINEAR), 1, "grad.x", (0, 0), 0.5)))


def test_check_raises_the_failure_of_a_later_draw() -> None:
    case = replace(LINEAR, values=(("dense", 0), ("wide-w", 1)))
    replies = right_replies(case)
    replies = [replace(reply, answers=(reply.answers[0], reply.answers[0])) for reply in replies]

    with pytest.raises(ValueMismatch, match=r"wide-w, seed 1 \(draw 1\)"):
        check("mine", case, stub(replies))


def test_check_raises_if_the_backend_lacks_a_collective() -> None:
    replies = [Reply(rank=rank, outcome="not_supported", error_text="no float16") for rank in range(3)]

    with pytest.raises(BackendRefuses, match="rank 0 of 3 cannot: no float16"):
        check("mine", LINEAR, stub(replies))


def test_check_raises_if_no_claim_applies_to_the_case() -> None:
    with pytest.raises(Inconclusive, match=r"nothing was shown in .*: none of these claims applies to it; pass"):
        check("mine", LINEAR, stub(right_replies(LINEAR)), [trains_like_unsharded])


@pytest.mark.parametrize(
    ("kinds", "error", "message"),
    [
        (["inconclusive"], Inconclusive, "a right answer may be off by more than a tenth .*; use exact values"),
        (["not_supported"], BrokenSetup, "this backend does not support LinearCase"),
    ],
)
def test_check_raises_if_every_verdict_is_inconclusive_or_not_supported(
    kinds: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        require_conclusion("mine", LINEAR, [verdict_of(kind) for kind in kinds])


@pytest.mark.parametrize("kind", ["holds", "value"])
def test_check_passes_with_one_conclusive_verdict(kind: str) -> None:
    require_conclusion("mine", LINEAR, [verdict_of("inconclusive"), verdict_of(kind)])


def test_check_judges_only_the_claims_passed_by_the_caller() -> None:
    pool = stub(on_all_ranks(LINEAR, "output", torch.zeros_like))

    assert check("mine", LINEAR, pool, [keeps_layout_of_parameter])
    with pytest.raises(ValueMismatch):
        check("mine", LINEAR, pool, [equals_unsharded])


def test_check_applies_only_the_refusal_claim_to_a_case_that_must_be_refused() -> None:
    pool = stub([raised(rank) for rank in range(3)])

    assert [verdict.claim for verdict in check("mine", REFUSED, pool)] == ["refuses"]


def test_case_that_must_be_refused_fails_if_the_ranks_answer() -> None:
    with pytest.raises(NotRefused):
        check("mine", REFUSED, stub([Reply(rank=rank, outcome="answered") for rank in range(3)]))


def test_judge_returns_failures_without_raising() -> None:
    kinds = {v.claim: v.kind for v in judge("mine", LINEAR, stub(drop_tensor(right_replies(LINEAR), 0, "grad.x")))}

    assert kinds["gradients_equal_unsharded"] == "shape" and kinds["equals_unsharded"] == "holds"


def test_rank_that_raised_gives_one_verdict_for_all_draws() -> None:
    case = replace(LINEAR, values=(("dense", 0), ("dense", 1)))
    replies = [*right_replies(case)[:2], raised(2)]

    assert [verdict.kind for verdict in judge_replies("mine", case, replies)] == ["raised"]


@pytest.mark.ranks
def test_case_is_checked_on_real_ranks(pool: Pool) -> None:
    [verdict] = check("zero3_fetch_all_reduce", replace(REFUSED, world_size=2), pool)

    assert verdict.kind == "holds"
