"""Claims on real values: what a bound proves, and what it leaves open."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from equivtest.families.linear.case import LinearCase
from equivtest.layout import Layout, Replicate
from equivtest.oracle import expect
from equivtest.oracle.expected import Expected
from equivtest.verdicts.claims import equals_unsharded, gradients_equal_unsharded
from equivtest.verdicts.judging import judge_replies
from equivtest.verdicts.message import write_message
from equivtest.verdicts.verdict import Judgement
from tests.replies import LINEAR, answers_of, right_replies, set_element, set_tensor

CASE = replace(LINEAR, values=(("real", 0),))
OUTPUT = expect(CASE, 0).tensors["output"]


def widened(name: str, allowed: float) -> Expected:
    """Returns the expected values of CASE, one tensor with another allowance everywhere."""
    expected = expect(CASE, 0)
    tensor = expected.tensors[name]
    wide = replace(tensor, allowed=torch.full_like(tensor.value, allowed))
    return Expected({**expected.tensors, name: wide}, {})


def judge(expected: Expected, replies=None, claim=equals_unsharded) -> Judgement:
    return claim.judge(CASE, expected, answers_of(replies or right_replies(CASE)))


@pytest.mark.parametrize("mode", ["real", "real-cancelling"])
def test_claims_hold_for_values_that_differ_by_one_rounding(mode: str) -> None:
    case = replace(CASE, values=((mode, 0),))

    assert {verdict.kind for verdict in judge_replies("colwise_linear", case, right_replies(case))} == {"holds"}


def test_error_beyond_its_bound_fails_and_shows_the_derivation_of_the_bound() -> None:
    local = float(OUTPUT.value[0, 0]) + 3 * float(OUTPUT.allowed[0, 0]) + 1e-6
    judgement = judge(expect(CASE, 0), set_element(right_replies(CASE), 0, "output", (0, 0), local))

    assert (judgement.kind, judgement.mismatches[0].global_index) == ("value", (0, 0))
    assert judgement.mismatches[0].derivation.startswith("gamma(4 roundings of float32) |x||W|")


@pytest.mark.parametrize("allowed", [1e3, math.inf])
def test_claim_is_inconclusive_if_its_bound_is_too_wide(allowed: float) -> None:
    judgement = judge(widened("output", allowed))

    assert (judgement.kind, judgement.mismatches) == ("inconclusive", ())
    assert judgement.agreeing == ("param.weight", "param.bias")


def test_too_wide_bound_of_the_output_does_not_affect_the_claim_on_gradients() -> None:
    assert judge(widened("output", 1e3), claim=gradients_equal_unsharded).kind == "holds"


def test_nan_within_an_infinite_bound_is_inconclusive() -> None:
    replies = set_element(right_replies(CASE), 0, "output", (0, 0), math.nan)

    assert judge(widened("output", math.inf), replies).kind == "inconclusive"


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e5])
def test_error_beyond_a_too_wide_bound_fails(value: float) -> None:
    replies = set_element(right_replies(CASE), 0, "output", (0, 0), value)

    assert judge(widened("output", 1e3), replies).kind == "value"


def test_wrong_parameter_fails_the_claim_although_the_bound_of_the_output_is_infinite() -> None:
    replies = set_element(right_replies(CASE), 2, "param.weight", (0, 1), 0.5)
    judgement = judge(widened("output", math.inf), replies)

    assert (judgement.kind, [m.tensor for m in judgement.mismatches]) == ("value", ["param.weight"])


def test_wrong_layout_fails_although_values_are_inconclusive() -> None:
    whole = Layout((Replicate(),))
    replies = right_replies(CASE)
    for rank in range(3):
        replies = set_tensor(replies, rank, "output", layout=whole, local=OUTPUT.value.float())

    assert judge(widened("output", math.inf), replies).kind == "layout"


def test_every_bounded_tensor_has_a_margin() -> None:
    verdicts = judge_replies("colwise_linear", CASE, right_replies(CASE))
    told = {verdict.claim: set(verdict.judgement.margins) for verdict in verdicts if verdict.judgement.margins}

    assert told == {
        "equals_unsharded": {"output"},
        "gradients_equal_unsharded": {"grad.x", "grad.weight", "grad.bias"},
    }


def test_message_about_errors_that_lean_to_one_side_states_their_probability() -> None:
    case = LinearCase(
        world_size=1,
        style="colwise",
        leading=(30,),
        in_features=8,
        out_features=30,
        requires_grad=(),
        values=(("real", 0),),
    )
    replies = right_replies(case)
    local = expect(case, 0).tensors["output"].value * (1 - 2.0**-25)
    truncated = torch.where(
        local.float().double().abs() > local.abs(), local.float().nextafter(torch.zeros(())), local.float()
    )
    replies = set_tensor(replies, 0, "output", local=truncated)
    verdict = next(v for v in judge_replies("colwise_linear", case, replies) if v.failed)
    message = write_message(verdict)

    assert verdict.judgement.margin < 1
    assert "actual    errors mostly on one side of zero, by " in message
    assert "error     |sum of errors|, less" in message
