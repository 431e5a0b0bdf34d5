"""Bit by bit: signs of zero, NaN and their payloads, repeats; what is excused and what is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from equivtest.cases.case import Case
from equivtest.cases.values.special import special_patterns
from equivtest.families.linear.case import LinearCase
from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.layout import Layout, Partial
from equivtest.oracle import expect
from equivtest.oracle.declared import Arithmetics
from equivtest.oracle.rounding import TORCH_CPU
from equivtest.ranks.reply import Reply
from equivtest.verdicts.claims import (
    Claim,
    Judgement,
    agrees_on_all_ranks,
    equals_unsharded,
    is_exact_but_for_added_zeros,
    is_exact_without_reduction,
    is_the_identity_for_one_rank,
    repeats_itself,
)
from equivtest.verdicts.judging import judge_replies
from equivtest.verdicts.message import write_message
from equivtest.verdicts.verdict import Verdict
from tests.replies import LINEAR, answers_of, change_answer, on_all_ranks, right_replies, set_element, set_tensor

SPECIAL = FetchCase(world_size=2, parameters=((3,),), values=(("special", 0),))
"""The first of three elements is -0.0; rank 0 keeps two of them, rank 1 one and one of padding."""

NAN = replace(SPECIAL, values=(("special", 8),))
"""The first is a signalling NaN."""

REPEATS = replace(SPECIAL, repeats=True)
BITS = (is_exact_without_reduction, is_exact_but_for_added_zeros, is_the_identity_for_one_rank)
each_claim = pytest.mark.parametrize("claim", BITS, ids=lambda claim: claim.name)


def judge(claim: Claim, replies: Sequence[Reply], case: Case = SPECIAL) -> Judgement:
    return claim.judge(case, expect(case, 0), answers_of(replies))


def with_first(case: FetchCase, value: float) -> list[Reply]:
    """Returns right replies, except for the fetched parameter's first element on every rank."""
    return on_all_ranks(case, "param.0", lambda local: torch.cat((torch.tensor([value]), local[1:])))


@each_claim
@pytest.mark.parametrize("number", range(len(special_patterns("float32"))))
def test_claims_on_bits_hold_for_equal_bits_and_ignore_padding(claim: Claim, number: int) -> None:
    case = replace(SPECIAL, values=(("special", number),))
    judgement = judge(claim, right_replies(case), case)

    assert (judgement.kind, judgement.agreeing) == ("holds", ("param.0", "partition.0"))


@each_claim
def test_claim_on_bits_gives_no_verdict_if_the_oracle_expects_no_bits(claim: Claim) -> None:
    assert judge(claim, right_replies(LINEAR), LINEAR) is None
    assert judge_replies("mine", LINEAR, right_replies(LINEAR), [claim]) == []


@pytest.mark.parametrize(
    ("claim", "kind"), [*zip((*BITS, equals_unsharded), ("bits", "holds", "bits", "holds"), strict=True)]
)
def test_lost_sign_of_zero_is_excused_only_by_the_claim_that_allows_added_zeros(claim: Claim, kind: str) -> None:
    assert judge(claim, with_first(SPECIAL, 0.0)).kind == kind


@pytest.mark.parametrize(("claim", "kind"), [*zip(BITS, ("bits", "holds", "bits"), strict=True)])
def test_signalling_nan_may_become_quiet_only_under_the_claim_that_allows_added_zeros(claim: Claim, kind: str) -> None:
    assert judge(claim, with_first(NAN, float("nan")), NAN).kind == kind


@each_claim
def test_negative_zero_in_place_of_positive_zero_fails_claims_on_bits(claim: Claim) -> None:
    """Adding zeros never makes +0.0 negative."""
    case = replace(SPECIAL, values=(("special", 1),))

    assert judge(claim, with_first(case, -0.0), case).kind == "bits"


@each_claim
@pytest.mark.parametrize("value", [1.5, float("inf"), 1e-45])
def test_value_that_adding_zeros_cannot_produce_fails_claims_on_bits(claim: Claim, value: float) -> None:
    """Neither a number, nor an infinity, nor the smallest one, in place of -0.0 or of a NaN."""
    assert judge(claim, with_first(SPECIAL, value)).kind == "bits"
    assert judge(claim, with_first(NAN, value), NAN).kind == "bits"


@each_claim
def test_lost_sign_of_zero_in_a_partition_fails_claims_on_bits(claim: Claim) -> None:
    assert judge(claim, set_element(right_replies(SPECIAL), 0, "partition.0", (0,), 0.0)).kind == "bits"


def test_mismatch_shows_numbers_bits_local_index_and_global_index() -> None:
    case = replace(SPECIAL, values=(("special", 4),))
    replies = set_element(right_replies(case), 1, "partition.0", (0,), 1.5)
    replies = set_element(replies, 1, "partition.0", (1,), 7.0)
    [mismatch] = judge(is_exact_without_reduction, replies, case).mismatches

    assert (mismatch.rank, mismatch.local_index, mismatch.global_index) == (1, (0,), (2,))
    assert mismatch.actual == "1.500000000e+00 (bits 0x3fc00000)"
    assert mismatch.extent == "elements with other bits: 1 on rank 1"


def test_claim_on_bits_ignores_tensors_of_a_wrong_shape_or_a_partial_layout() -> None:
    """They are judged there, and no comparison of bits would mean anything."""
    replies = set_tensor(right_replies(SPECIAL), 0, "param.0", local=torch.zeros(2))
    replies = set_tensor(replies, 1, "param.0", layout=Layout((Partial("sum"),)))

    assert judge(is_exact_without_reduction, replies).kind == "holds"


def test_identity_claim_is_judged_only_in_a_world_of_one_rank() -> None:
    one = replace(SPECIAL, world_size=1)
    kinds = [[v.kind for v in judge_replies("s", case, right_replies(case), [equals_unsharded, BITS[2]])]
             for case in (one, SPECIAL)]  # fmt: skip

    assert kinds == [["holds", "holds"], ["holds"]]


# Repeats.


def again(replies: Sequence[Reply], rank: int, value: float) -> list[Reply]:
    """The replies, the first element of one rank's second `param.0` replaced."""
    placed = replies[rank].answers[0].again["param.0"]
    local = torch.cat((torch.tensor([value]), placed.local[1:]))
    changed = {**replies[rank].answers[0].again, "param.0": replace(placed, local=local)}
    return change_answer(replies, rank, lambda answer: replace(answer, again=changed))


def test_repeat_claim_holds_if_the_second_run_gives_equal_bits() -> None:
    assert judge(repeats_itself, right_replies(REPEATS), REPEATS).kind == "holds"


def test_repeat_claim_fails_if_the_second_run_gives_different_bits() -> None:
    replies = again(right_replies(REPEATS), 1, 0.0)
    judgement = judge(repeats_itself, replies, REPEATS)

    assert judgement.kind == "repeat" and judgement.agreeing == ("partition.0",)
    assert judgement.mismatches[0].expected == "-0.000000000e+00 (bits 0x80000000) as the first time"
    assert judge(agrees_on_all_ranks, replies, REPEATS).kind == "holds"


def test_repeat_claim_fails_if_the_second_run_lacks_a_tensor() -> None:
    replies = change_answer(right_replies(REPEATS), 0, lambda answer: replace(answer, again={}))

    assert judge(repeats_itself, replies, REPEATS).mismatches[0].actual == "none"


def test_repeat_claim_fails_if_the_second_run_gives_another_layout_or_shape() -> None:
    placed = right_replies(REPEATS)[0].answers[0].again["param.0"]
    for other in (replace(placed, local=torch.zeros(2)), replace(placed, layout=Layout((Partial("sum"),)))):
        both = {**right_replies(REPEATS)[0].answers[0].again, "param.0": other}
        replies = change_answer(right_replies(REPEATS), 0, lambda answer, both=both: replace(answer, again=both))
        assert judge(repeats_itself, replies, REPEATS).kind == "repeat"


def test_repeat_claim_is_judged_only_on_the_first_draw_of_values() -> None:
    case = replace(REPEATS, values=(("special", 0), ("dense", 0)))
    draws = [v.draw for v in judge_replies("s", case, right_replies(case), [repeats_itself])]

    assert draws == [0] and judge_replies("s", SPECIAL, right_replies(SPECIAL), [repeats_itself]) == []


def test_message_names_the_tensor_that_differs_in_the_second_run() -> None:
    replies = again(right_replies(REPEATS), 1, 0.0)
    [verdict] = judge_replies("mine", REPEATS, replies, [repeats_itself])
    told = write_message(verdict)

    assert told.startswith("RepeatMismatch: mine: param.0 differs when the case runs again")
    assert "rank 1 of 2, local (0,)" in told and "repeats=True" in told


def test_sum_that_equals_zero_may_have_either_sign() -> None:
    """The kernel decides where a sum of products begins; torch's own depends on the strides of x."""
    case = LinearCase(world_size=1, style="rowwise", in_features=2, requires_grad=("x",), values=(("wide-x", 0),))
    gradient = expect(case, 0).tensors["grad.x"].value
    zero = (0, int((gradient[0] == 0).nonzero()[0]))

    for value, kind in ((-0.0, "holds"), (0.0, "holds"), (1e-30, "bits")):
        replies = set_element(right_replies(case), 0, "grad.x", zero, value)
        assert judge(is_the_identity_for_one_rank, replies, case).kind == kind


VARYING = {dtype: replace(record, order_varies=True) for dtype, record in TORCH_CPU.items()}
FLUSHING = {dtype: replace(record, flushes_subnormals=True) for dtype, record in TORCH_CPU.items()}
REPEATED = replace(LINEAR, repeats=True)


def repeated(case: LinearCase, factor: float, arithmetics: Arithmetics) -> Verdict:
    """Returns the verdict on a right run whose second output is the first one times a factor."""
    replies = right_replies(case)
    for rank in range(case.world_size):
        both = dict(replies[rank].answers[0].again)
        both["output"] = replace(both["output"], local=both["output"].local * factor)
        replies = change_answer(replies, rank, lambda answer, both=both: replace(answer, again=both))
    [verdict] = judge_replies("mine", case, replies, [repeats_itself], arithmetics)
    return verdict


@pytest.mark.parametrize(
    ("mode", "factor", "kinds"),
    [
        ("real", 1 + 2.0**-23, ("repeat", "holds")),  # one rounding
        ("real", 1 + 2.0**-12, ("repeat", "repeat")),  # more than two orders of summation are apart
        ("dense", 1 + 2.0**-23, ("repeat", "repeat")),  # exact in any order
        ("dense", 1.0, ("holds", "holds")),
    ],
)
def test_rounded_sum_may_differ_in_the_second_run_if_the_order_varies(
    mode: str, factor: float, kinds: tuple[str, str]
) -> None:
    case = replace(REPEATED, values=((mode, 0),))
    assert tuple(repeated(case, factor, each).kind for each in (TORCH_CPU, VARYING)) == kinds


def test_repeat_claim_is_inconclusive_for_different_bits_within_a_too_wide_bound() -> None:
    """A value that cancels in bfloat16 may be off by a fifth of itself."""
    case = LinearCase(
        world_size=3, dtype="bfloat16", style="rowwise", in_features=3, repeats=True, values=(("real-cancelling", 1),)
    )
    assert repeated(case, 1 + 2.0**-7, VARYING).kind == "inconclusive"


@pytest.mark.parametrize(
    ("number", "value", "kind"),
    [(12, 0.0, "holds"), (13, 0.0, "holds"), (13, -0.0, "holds"), (12, -0.0, "bits"), (14, 0.0, "bits")],
    ids=["+subnormal to +0", "-subnormal to +0", "-subnormal to -0", "+subnormal to -0", "smallest normal"],
)
def test_reduction_may_flush_a_subnormal_if_the_backend_declares_it(number: int, value: float, kind: str) -> None:
    case = replace(SPECIAL, collective="all_reduce", values=(("special", number),))
    replies = with_first(case, value)
    claims = [is_exact_but_for_added_zeros]
    found = [judge_replies("mine", case, replies, claims, each)[0].kind for each in (TORCH_CPU, FLUSHING)]
    assert found == ["bits", kind]


@pytest.mark.parametrize("claim", [equals_unsharded, is_exact_without_reduction], ids=lambda claim: claim.name)
def test_subnormal_flushed_without_an_addition_fails_claims_on_bits(claim: Claim) -> None:
    case = replace(SPECIAL, collective="all_gather", values=(("special", 12),))
    [verdict] = judge_replies("mine", case, with_first(case, 0.0), [claim], FLUSHING)
    assert verdict.failed
    reduced = replace(case, collective="all_reduce")
    partition = on_all_ranks(reduced, "partition.0", torch.zeros_like)
    [verdict] = judge_replies("mine", reduced, partition, [claim], FLUSHING)
    assert verdict.failed
