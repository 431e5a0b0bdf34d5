"""Verdicts from replies: runs that ended badly, refusals, and one verdict per claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from equivtest.cases.case import Case
from equivtest.errors import Misuse
from equivtest.oracle import expect
from equivtest.ranks.reply import Outcome, Reply
from equivtest.verdicts.claims import (
    CLAIMS,
    agrees_on_all_ranks,
    equals_unsharded,
    refuses,
)
from equivtest.verdicts.compare import compare
from equivtest.verdicts.judging import DEFAULT_CLAIMS, judge_replies
from equivtest.verdicts.verdict import Verdict
from tests.replies import LINEAR, REFUSED, change_answer, raised, right_replies, set_element

LOST_PEER = raised(0, "RuntimeError", "Connection closed by peer", at_s=0.5)


def judge(replies: Sequence[Reply], case: Case = LINEAR) -> list[Verdict]:
    return judge_replies("mine", case, replies)


def with_reply(reply: Reply) -> list[Reply]:
    """Returns right replies except for one rank's."""
    replies = right_replies(LINEAR)
    replies[reply.rank] = reply
    return replies


def refusals(*replies: Reply) -> Verdict:
    """The one verdict on a case that should be refused; ranks that are not given refuse."""
    given = {reply.rank: reply for reply in replies}
    [verdict] = judge([given.get(rank, raised(rank)) for rank in range(3)], REFUSED)
    return verdict


def test_right_replies_give_one_verdict_per_claim_and_draw() -> None:
    case = replace(LINEAR, values=(("dense", 0), ("wide-x", 1)))
    verdicts = judge(right_replies(case), case)

    assert [(v.draw, v.claim) for v in verdicts] == [(d, c.name) for d in (0, 1) for c in DEFAULT_CLAIMS]
    assert {v.kind for v in verdicts} == {"holds"} and not any(v.failed for v in verdicts)


def test_wrong_value_in_the_second_draw_fails_only_the_second_draw() -> None:
    case = replace(LINEAR, values=(("dense", 0), ("dense", 1)))
    replies = right_replies(case)
    first = replies[1].answers[0]
    verdicts = judge(change_answer(replies, 1, lambda _: first, draw=1), case)

    assert {v.draw for v in verdicts if v.failed} == {1}


def test_remaining_claims_are_judged_after_one_fails() -> None:
    verdicts = judge(set_element(right_replies(LINEAR), 1, "grad.x", (0, 0), 0.5))

    assert {v.claim: v.kind for v in verdicts} == {
        "equals_unsharded": "holds",
        "gradients_equal_unsharded": "value",
        "agrees_on_all_ranks": "replica",
        "keeps_layout_of_parameter": "holds",
        "does_not_touch_its_inputs": "holds",
    }


@pytest.mark.parametrize("outcome", ["raised", "lost", "timed_out", "not_supported"])
def test_missing_answer_of_a_rank_gives_one_verdict_under_the_first_claim(outcome: Outcome) -> None:
    [verdict] = judge(with_reply(Reply(rank=1, outcome=outcome, error_text="why", detail="why")))

    assert (verdict.kind, verdict.claim, verdict.judgement.mismatches) == (outcome, "equals_unsharded", ())
    assert "rank 1 of 3" in verdict.detail and "why" in verdict.detail


def test_unsupported_case_gets_one_verdict_of_kind_not_supported() -> None:
    [verdict] = judge([Reply(rank=rank, outcome="not_supported", error_text="no all_reduce") for rank in range(3)])

    assert (verdict.kind, verdict.failed) == ("not_supported", False)
    assert verdict.detail.startswith("rank 0 of 3 cannot: no all_reduce")


def test_verdict_blames_the_rank_that_raised_before_ranks_that_lost_their_peer() -> None:
    [verdict] = judge([LOST_PEER, right_replies(LINEAR)[1], raised(2, "ValueError", "mine", at_s=9.0)])
    lines = verdict.detail.splitlines()

    assert lines[0] == "rank 2 of 3 raised ValueError: mine"
    assert "Traceback of rank 2" in lines and "Traceback of rank 0" not in lines
    assert lines[-2:] == ["rank 0 raised RuntimeError: Connection closed by peer", "rank 1 answered"]


def test_lost_rank_is_the_cause_of_its_peers_errors() -> None:
    [verdict] = judge(
        [
            LOST_PEER,
            right_replies(LINEAR)[1],
            Reply(rank=2, outcome="lost", error_text="killed", detail="killed by 9", at_s=9.0),
        ]
    )

    assert verdict.kind == "lost" and verdict.detail.splitlines()[:2] == ["rank 2 of 3 was lost", "killed by 9"]


def test_message_has_stacks_of_every_silent_rank() -> None:
    silent = [Reply(rank=rank, outcome="timed_out", detail=f"stack {rank}", at_s=2.0) for rank in (0, 1)]
    [verdict] = judge([*silent, right_replies(LINEAR)[2]])

    assert verdict.kind == "timed_out"
    assert verdict.detail.splitlines() == [
        "rank 0 of 3 did not answer",
        "stack 0",
        "rank 1 did not answer",
        "stack 1",
        "rank 2 answered",
    ]


def test_exception_without_text_is_reported_by_its_type() -> None:
    [verdict] = judge(with_reply(raised(1, "ValueError", "")))

    assert verdict.detail.startswith("rank 1 of 3 raised ValueError: ")


def test_misuse_on_a_rank_is_raised_in_the_parent() -> None:
    """A subject that breaks its contract with the harness is no finding."""
    with pytest.raises(Misuse, match=r"^mine: no such name"):
        judge(with_reply(Reply(rank=1, outcome="misused", error_type="Misuse", error_text="no such name")))


def test_misuse_on_every_rank_is_raised_and_does_not_count_as_a_refusal() -> None:
    with pytest.raises(Misuse, match="no such name"):
        judge(
            [Reply(rank=rank, outcome="misused", error_type="Misuse", error_text="no such name") for rank in range(3)],
            REFUSED,
        )


def test_refusal_claim_holds_if_every_rank_raises_one_type_of_error() -> None:
    verdict = refusals(raised(1, text="rank 1 has 3"))

    assert (verdict.kind, verdict.claim, verdict.judgement.mismatches, verdict.detail) == ("holds", "refuses", (), "")


def test_refusal_claim_fails_if_one_rank_answers() -> None:
    verdict = refusals(Reply(rank=1, outcome="answered"))
    [mismatch] = verdict.judgement.mismatches

    assert (verdict.kind, mismatch.rank) == ("not_refused", 1)
    assert (mismatch.expected, mismatch.actual) == ("ValueError on every rank", "answered")
    assert "rank 1 answered" in verdict.detail


def test_refusal_claim_fails_if_one_rank_raises_a_different_type_of_error() -> None:
    verdict = refusals(raised(2, "IndexError", "out of range", at_s=2.0))

    assert verdict.kind == "not_refused"
    assert [(m.rank, m.actual) for m in verdict.judgement.mismatches] == [(2, "IndexError")]


def test_refusal_claim_fails_on_every_rank_if_all_ranks_answer() -> None:
    verdict = refusals(*(Reply(rank=rank, outcome="answered") for rank in range(3)))

    assert verdict.kind == "not_refused"
    assert [(m.rank, m.expected) for m in verdict.judgement.mismatches] == [
        (r, "an error on every rank") for r in range(3)
    ]


@pytest.mark.parametrize("outcome", ["timed_out", "lost", "not_supported"])
def test_refusal_claim_fails_if_ranks_are_lost_or_hang(outcome: Outcome) -> None:
    verdict = refusals(*(Reply(rank=rank, outcome=outcome, error_text="why", detail="why") for rank in range(3)))

    assert (verdict.kind, verdict.claim) == (outcome, "refuses") and "why" in verdict.detail


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("thread terminated with exception: CUDA error: device-side assert triggered", "holds"),
        ("thread terminated with exception: CUDA error: an illegal memory access was encountered", "lost"),
        ("CUDA error: device-side assert triggered", "lost"),
    ],
)
def test_rank_that_the_watchdog_ended_after_a_failed_assertion_has_refused(said: str, kind: str) -> None:
    raised_first = raised(0, "AcceleratorError", "CUDA error: device-side assert triggered")
    lost = Reply(rank=1, outcome="lost", detail=f"killed by SIGABRT\nits output:\nProcess group watchdog {said}")

    assert refusals(raised_first, lost, replace(raised_first, rank=2)).kind == kind


@pytest.mark.parametrize("outcome", ["timed_out", "lost"])
def test_verdict_describes_a_lost_rank_before_the_refusals_of_its_peers(outcome: Outcome) -> None:
    verdict = refusals(Reply(rank=1, outcome=outcome, detail="stack 1", at_s=5.0))

    assert verdict.kind == outcome
    assert verdict.detail.splitlines()[1:] == [
        "stack 1",
        "rank 0 raised ValueError: no",
        "rank 2 raised ValueError: no",
    ]


def test_claims_are_judged_in_the_order_in_which_they_are_passed() -> None:
    claims = (agrees_on_all_ranks, equals_unsharded)
    verdicts = compare("mine", LINEAR, 0, [expect(LINEAR, 0)], right_replies(LINEAR), claims)

    assert [v.claim for v in verdicts] == ["agrees_on_all_ranks", "equals_unsharded"]


@pytest.mark.parametrize(
    ("claim", "where_it_is_silent"),
    [
        ("gradients_equal_unsharded", {"requires_grad": ()}),
        ("agrees_on_all_ranks", {"world_size": 1}),
        ("trains_like_unsharded", {}),
        ("uses_only_collectives", {"records": False}),
        ("drops_at_random", {}),
        ("uses_only_documented_memory", {}),
        ("is_the_identity_for_one_rank", {"world_size": 2}),
        ("is_the_identity_for_one_rank", {"world_size": 1, "values": (("real", 0),)}),
        ("repeats_itself", {"repeats": False}),
    ],
)
def test_claim_gives_no_verdict_if_the_case_has_no_tensor_to_judge(
    claim: str, where_it_is_silent: dict[str, object]
) -> None:
    """A verdict that could not have failed would count as a proof."""
    case = replace(LINEAR, **where_it_is_silent)

    assert compare("mine", case, 0, [expect(case, 0)], right_replies(case), [equals_unsharded, CLAIMS[claim]])[1:] == []


def test_refusal_claim_alone_judges_replies_to_a_case_that_must_be_refused() -> None:
    assert [v.claim for v in judge([raised(rank) for rank in range(3)], REFUSED)] == [refuses.name]
