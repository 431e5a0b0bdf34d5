"""Claims: each holds, and fails in every way it can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from equivtest.cases.case import Case
from equivtest.layout import Layout, Partial, Replicate, Shard
from equivtest.oracle import expect
from equivtest.ranks.reply import Reply
from equivtest.tensors import Placed
from equivtest.verdicts.claims import (
    CLAIMS,
    Claim,
    agrees_on_all_ranks,
    does_not_touch_its_inputs,
    equals_unsharded,
    gradients_equal_unsharded,
    is_exact_but_for_added_zeros,
    is_exact_without_reduction,
    is_the_identity_for_one_rank,
    keeps_layout_of_parameter,
    refuses,
    repeats_itself,
    uses_only_collectives,
)
from equivtest.verdicts.verdict import Judgement
from tests.drawing import SPACE, STRATEGIES, drawn
from tests.replies import (
    FETCH,
    LINEAR,
    answers_of,
    change_answer,
    drop_tensor,
    on_all_ranks,
    right_replies,
    set_element,
    set_tensor,
)

WHOLE = Layout((Replicate(),))
BITS = (is_exact_without_reduction, is_exact_but_for_added_zeros, is_the_identity_for_one_rank)
JUDGED = [c for c in CLAIMS.values() if c not in (refuses, repeats_itself, uses_only_collectives, *BITS)]


def judge(claim: Claim, replies: Sequence[Reply], case: Case = LINEAR) -> Judgement:
    return claim.judge(case, expect(case, 0), answers_of(replies))


def wrong_tensors(judgement: Judgement) -> list[str]:
    return [mismatch.tensor for mismatch in judgement.mismatches]


@pytest.mark.parametrize("case", [LINEAR, FETCH, replace(LINEAR, world_size=1), replace(LINEAR, dtype="bfloat16")])
@pytest.mark.parametrize("claim", JUDGED, ids=lambda claim: claim.name)
def test_claim_holds_for_right_replies(claim: Claim, case: Case) -> None:
    """Without a mismatch and with margin 0, unless it applies to nothing in the case."""
    judgement = judge(claim, right_replies(case), case)

    assert judgement is not None or not claim.applies(case, 0)
    assert judgement is None or (judgement.kind, judgement.mismatches, judgement.margin) == ("holds", (), 0.0)


JUDGED_BY_BITS = (
    *("parallel_dropout", "redistribute", "collectives", "prepared_module", "rowwise_embedding"),
    *("zero3_lifecycle_all_gather", "zero3_fetch_all_gather"),
)


@pytest.mark.parametrize("name", JUDGED_BY_BITS)
def test_claim_applies_only_to_cases_with_values_to_judge(name: str) -> None:
    """The code that fills the cells of a conformance run knows only the case, and must not count an empty verdict."""
    draws = [(case, draw) for case in drawn(STRATEGIES[name](SPACE), 60) for draw in range(len(case.values))]
    expected = [expect(*each).tensors for each in draws]

    for claim in (is_exact_without_reduction, is_exact_but_for_added_zeros):
        has_bits = [any(tensor.bits is not None for tensor in tensors.values()) for tensors in expected]
        assert name == "zero3_lifecycle_all_gather" or [claim.applies(*each) for each in draws] == has_bits
    has_gradients = [any(each.startswith("grad.") for each in tensors) for tensors in expected]
    assert [gradients_equal_unsharded.applies(*each) for each in draws] == has_gradients


@pytest.mark.parametrize(
    ("claim", "name", "others"),
    [
        (equals_unsharded, "output", ("param.weight", "param.bias")),
        (equals_unsharded, "param.weight", ("output", "param.bias")),
        (gradients_equal_unsharded, "grad.x", ("grad.weight", "grad.bias")),
        (gradients_equal_unsharded, "grad.weight", ("grad.x", "grad.bias")),
    ],
)
def test_claim_fails_only_at_the_tensor_with_a_wrong_value(claim: Claim, name: str, others: tuple[str, ...]) -> None:
    judgement = judge(claim, set_element(right_replies(LINEAR), 2, name, (0, 0), 0.5))

    assert (judgement.kind, wrong_tensors(judgement), judgement.agreeing) == ("value", [name], others)
    assert judgement.margin > 1


@pytest.mark.parametrize(("claim", "name"), [(equals_unsharded, "output"), (gradients_equal_unsharded, "grad.weight")])
@pytest.mark.parametrize("local", [torch.zeros(1, 1), torch.zeros(2, 1, dtype=torch.float64)])
def test_claim_fails_for_a_wrong_shape_or_dtype(claim: Claim, name: str, local: torch.Tensor) -> None:
    judgement = judge(claim, set_tensor(right_replies(LINEAR), 2, name, local=local))

    assert (judgement.kind, wrong_tensors(judgement)) == ("shape", [name])


@pytest.mark.parametrize(("claim", "name"), [(equals_unsharded, "output"), (gradients_equal_unsharded, "grad.bias")])
def test_missing_tensor_fails_with_kind_shape(claim: Claim, name: str) -> None:
    judgement = judge(claim, drop_tensor(right_replies(LINEAR), 1, name))

    assert (judgement.kind, wrong_tensors(judgement), judgement.mismatches[0].rank) == ("shape", [name], 1)


def test_wrong_shape_is_reported_before_wrong_values() -> None:
    replies = set_element(right_replies(LINEAR), 0, "param.weight", (0, 0), 0.5)
    judgement = judge(equals_unsharded, drop_tensor(replies, 1, "output"))

    assert (judgement.kind, wrong_tensors(judgement)) == ("shape", ["output"])


def test_right_output_under_a_wrong_layout_fails_with_kind_layout() -> None:
    value = expect(LINEAR, 0).tensors["output"].value.float()
    replies = right_replies(LINEAR)
    for rank in range(3):
        replies = set_tensor(replies, rank, "output", local=value, layout=WHOLE)
    judgement = judge(equals_unsharded, replies)

    assert (judgement.kind, wrong_tensors(judgement)) == ("layout", ["output"])
    assert (judgement.mismatches[0].expected, judgement.mismatches[0].actual) == ("shard(1)", "replicate")
    assert judgement.mismatches[0].extent == "3 of 3 ranks"


def test_wrong_output_under_a_wrong_layout_fails_with_kind_value() -> None:
    value = expect(LINEAR, 0).tensors["output"].value.float() + 1
    replies = right_replies(LINEAR)
    for rank in range(3):
        replies = set_tensor(replies, rank, "output", local=value, layout=WHOLE)

    assert judge(equals_unsharded, replies).kind == "value"


@pytest.mark.parametrize("name", ["param.weight", "grad.weight", "grad.x"])
def test_parameter_or_gradient_under_a_wrong_layout_on_one_rank_fails(name: str) -> None:
    value = expect(LINEAR, 0).tensors[name].value.float()
    layout = Layout((Shard(1),)) if name == "grad.x" else WHOLE
    local = value[:, :1] if name == "grad.x" else value
    replies = set_tensor(right_replies(LINEAR), 0, name, local=local, layout=layout)
    judgement = judge(keeps_layout_of_parameter, replies)

    assert (judgement.kind, wrong_tensors(judgement)) == ("layout", [name])
    assert judgement.mismatches[0].extent == "1 of 3 ranks"
    assert {judge(claim, replies).kind for claim in (equals_unsharded, gradients_equal_unsharded)} == {"holds"}


def test_layout_of_the_output_is_not_judged_by_the_claim_on_parameters() -> None:
    replies = set_tensor(right_replies(LINEAR), 0, "output", layout=WHOLE)

    assert judge(keeps_layout_of_parameter, replies).kind == "holds"


def test_claim_on_layouts_ignores_a_missing_tensor() -> None:
    judgement = judge(keeps_layout_of_parameter, drop_tensor(right_replies(LINEAR), 1, "grad.bias"))

    assert judgement.kind == "holds" and "grad.bias" not in judgement.agreeing


def test_claim_on_replicas_shows_bits_and_ranks_of_a_different_element() -> None:
    replies = set_element(right_replies(LINEAR), 1, "grad.x", (1, 2), 0.5)
    judgement = judge(agrees_on_all_ranks, replies)
    mismatch = judgement.mismatches[0]

    assert (judgement.kind, wrong_tensors(judgement)) == ("replica", ["grad.x"])
    assert (mismatch.rank, mismatch.local_index, mismatch.extent) == (1, (1, 2), "ranks 0 and 1")
    assert mismatch.expected.endswith("as on rank 0") and mismatch.actual == "5.000000000e-01 (bits 0x3f000000)"


def test_replicas_that_differ_in_the_sign_of_zero_fail() -> None:
    zeros = on_all_ranks(LINEAR, "grad.x", torch.zeros_like)
    replies = set_element(zeros, 2, "grad.x", (0, 1), -0.0)

    assert judge(agrees_on_all_ranks, replies).mismatches[0].actual == "-0.000000000e+00 (bits 0x80000000)"


def test_mismatch_of_replicas_shows_a_different_value_rather_than_a_different_sign_of_zero() -> None:
    zeros = set_element(set_element(right_replies(LINEAR), 0, "grad.x", (0, 0), 0.0), 2, "grad.x", (0, 0), 0.0)
    signed = set_element(zeros, 1, "grad.x", (0, 0), -0.0)
    judgement = judge(agrees_on_all_ranks, set_element(signed, 2, "grad.x", (1, 2), 0.5))

    assert (judgement.mismatches[0].rank, judgement.mismatches[0].local_index) == (2, (1, 2))
    assert judgement.mismatches[0].extent == "ranks 0 and 1, 0 and 2"


def test_mismatches_of_replicas_begin_with_a_tensor_whose_values_differ() -> None:
    fetch = replace(FETCH, parameters=((2,), (2,)))
    replies = set_element(set_element(right_replies(fetch), 0, "param.0", (0,), 0.0), 1, "param.0", (0,), -0.0)
    judgement = judge(agrees_on_all_ranks, set_element(replies, 1, "param.1", (1,), float("nan")), fetch)

    assert [mismatch.tensor for mismatch in judgement.mismatches] == ["param.1", "param.0"]


def test_replica_with_a_different_dtype_fails_and_shows_both_dtypes() -> None:
    replies = right_replies(LINEAR)
    local = replies[0].answers[0].tensors["grad.x"].local.double()
    mismatch = judge(agrees_on_all_ranks, set_tensor(replies, 2, "grad.x", local=local)).mismatches[0]

    assert (mismatch.expected, mismatch.actual) == ("(2, 3) torch.float32 as on rank 0", "(2, 3) torch.float64")


def test_claim_on_replicas_holds_if_only_a_shard_is_wrong() -> None:
    assert judge(agrees_on_all_ranks, set_element(right_replies(LINEAR), 0, "output", (0, 0), 0.5)).kind == "holds"


@pytest.mark.parametrize(
    "layouts",
    [(WHOLE, Layout((Shard(0),)), WHOLE), (Layout((Partial(),)),) * 3, (Layout((Replicate(), Replicate())),) * 3],
    ids=["different layouts", "partial", "layout of another mesh"],
)
def test_claim_on_replicas_ignores_tensors_that_are_partial_or_differ_in_layout(layouts: tuple[Layout, ...]) -> None:
    replies = right_replies(LINEAR)
    for rank, layout in enumerate(layouts):
        replies = set_tensor(replies, rank, "grad.x", local=torch.full((2, 3), float(rank)), layout=layout)

    assert judge(agrees_on_all_ranks, replies).kind == "holds"


def test_claim_on_replicas_ignores_a_missing_tensor() -> None:
    judgement = judge(agrees_on_all_ranks, drop_tensor(right_replies(LINEAR), 1, "grad.x"))

    assert judgement.kind == "holds" and "grad.x" not in judgement.agreeing


def test_claim_fails_if_the_subject_changed_an_input() -> None:
    replies = change_answer(
        right_replies(LINEAR), 1, lambda answer: replace(answer, touched=("x: values have changed",))
    )
    mismatch = judge(does_not_touch_its_inputs, replies).mismatches[0]

    assert (mismatch.tensor, mismatch.rank, mismatch.actual) == ("x", 1, "values have changed")


@pytest.mark.parametrize(("name", "right"), [("param.weight", True), ("output", True), ("param.1", False)])
def test_claim_fails_if_the_subject_changed_requires_grad(name: str, *, right: bool) -> None:
    case = FETCH if name == "param.1" else LINEAR
    replies = change_answer(
        right_replies(case), 1, lambda answer: replace(answer, requires_grad={**answer.requires_grad, name: not right})
    )
    judgement = judge(does_not_touch_its_inputs, replies, case)
    mismatch = judgement.mismatches[0]

    assert (judgement.kind, mismatch.tensor, mismatch.rank) == ("touched", name, 1)
    assert (mismatch.expected, mismatch.actual) == (f"requires_grad {right}", f"requires_grad {not right}")


@pytest.mark.parametrize("name", ["grad.x", "grad.weight"])
def test_requires_grad_of_a_gradient_is_not_judged(name: str) -> None:
    replies = change_answer(
        right_replies(LINEAR), 0, lambda answer: replace(answer, requires_grad={**answer.requires_grad, name: True})
    )

    assert judge(does_not_touch_its_inputs, replies).kind == "holds"


def test_flat_partition_is_judged_by_value() -> None:
    replies = set_element(right_replies(FETCH), 1, "partition.0", (3,), 0.5)
    judgement = judge(equals_unsharded, replies, FETCH)

    assert (judgement.kind, wrong_tensors(judgement)) == ("value", ["partition.0"])
    assert judgement.mismatches[0].global_index == (3, 2)


def test_empty_answer_fails_for_each_missing_tensor() -> None:
    replies = [
        change_answer(right_replies(LINEAR), rank, lambda answer: replace(answer, tensors={}, requires_grad={}))[rank]
        for rank in range(3)
    ]

    assert wrong_tensors(judge(equals_unsharded, replies)) == ["output", "param.weight", "param.bias"]


def test_refusal_claim_raises_if_passed_answers_instead_of_outcomes() -> None:
    with pytest.raises(AssertionError, match="judged from the replies' outcomes"):
        judge(refuses, right_replies(LINEAR))


def test_table_of_claims_lists_every_claim_once() -> None:
    assert list(CLAIMS) == [
        "equals_unsharded",
        "gradients_equal_unsharded",
        "agrees_on_all_ranks",
        "keeps_layout_of_parameter",
        "trains_like_unsharded",
        "does_not_touch_its_inputs",
        "is_exact_without_reduction",
        "is_exact_but_for_added_zeros",
        "is_the_identity_for_one_rank",
        "repeats_itself",
        "drops_at_random",
        "uses_only_collectives",
        "uses_only_documented_memory",
        "refuses",
    ]
    assert all(name == claim.name and claim.meaning for name, claim in CLAIMS.items())


def test_claim_holds_for_a_tensor_that_states_no_global_shape() -> None:
    replies = right_replies(LINEAR)
    for rank in range(3):
        placed = replies[rank].answers[0].tensors["output"]
        replies = change_answer(
            replies,
            rank,
            lambda answer, placed=placed: replace(
                answer, tensors={**answer.tensors, "output": Placed(placed.local, placed.layout)}
            ),
        )

    assert judge(equals_unsharded, replies).kind == "holds"
