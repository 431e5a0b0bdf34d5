"""trains_like_unsharded: seen to hold, and to fail, on hand-made replies; and what ranks held, put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from equivtest.cases.case import Case
from equivtest.layout import Layout, Partial, Replicate, Shard
from equivtest.oracle import expect_held
from equivtest.oracle.held import whole
from equivtest.ranks.reply import Answer, Reply
from equivtest.tensors import Placed
from equivtest.verdicts.claims import (
    Claim,
    Judgement,
    equals_unsharded,
    gradients_equal_unsharded,
    keeps_layout_of_parameter,
    trains_like_unsharded,
)
from equivtest.verdicts.judging import default_claims, judge_replies
from tests.families.test_mlp import mlp_case, training_case
from tests.families.unsharded_training import train
from tests.replies import answers_of, drop_tensor, set_element, set_tensor
from tests.unsharded import held_of

CASE = training_case(momentum=0.5)
SHARDED = Layout((Shard(0),))


def replies_of(case: Case) -> list[Reply]:
    """Returns replies of ranks that train like one process, in the case's dtype."""
    held = held_of(case, train(case, torch.float32))  # type: ignore[arg-type]
    return [Reply(rank=rank, outcome="answered", answers=(Answer(tensors),)) for rank, tensors in held.items()]


def judge(claim: Claim, replies: Sequence[Reply]) -> Judgement:
    answers = answers_of(replies)
    expected = expect_held(CASE, 0, {rank: answer.tensors for rank, answer in answers.items()})
    return claim.judge(CASE, expected, answers)


def wrong_tensors(judgement: Judgement) -> list[str]:
    return [mismatch.tensor for mismatch in judgement.mismatches]


def test_training_claim_holds_for_right_ranks() -> None:
    judgement = judge(trains_like_unsharded, replies_of(CASE))

    assert (judgement.kind, judgement.mismatches) == ("holds", ())
    assert judgement.agreeing == tuple(name for name in CASE.answer_names() if name.startswith("step"))


@pytest.mark.parametrize("between", ["", "halve", "warm_up"])
@pytest.mark.parametrize(
    ("optimizer", "variant"),
    [("sgd", "nesterov"), ("sgd", "dampened"), ("sgd", "maximize"), ("adamw", "maximize")],
)
def test_training_claim_fails_if_ranks_omit_the_optimizer_variant(optimizer: str, variant: str, between: str) -> None:
    """With a weight decay, of torch's own optimizers; the parameters of a plain run are wrong in the last step."""
    fields = {"optimizer": optimizer, "steps": 3, "weight_decay": 0.25, "lr": 0.25, "values": (("real", 1),)}
    fields |= {"momentum": 0.5} if optimizer == "sgd" else {}
    case = training_case(**fields, variant=variant, between_steps=between)
    kinds = {}
    for given in (case, replace(case, variant="", between_steps="")):
        held = held_of(case, train(case, torch.float32) | train(given, torch.float32))
        answers = {rank: Answer(tensors) for rank, tensors in held.items()}
        kinds[given.variant] = trains_like_unsharded.judge(case, expect_held(case, 0, held), answers).kind

    assert kinds == {variant: "holds", "": "value"}


def test_training_claim_fails_if_ranks_lose_the_maximum_of_amsgrad() -> None:
    case = training_case(optimizer="adamw", steps=3, variant="amsgrad", values=(("real", 1),))
    right = train(case, torch.float32)
    lost = {name: torch.zeros_like(right[name]) for name in right if "max_exp_avg_sq" in name}
    kinds = []
    for given in (right, right | lost):
        held = held_of(case, given)
        answers = {rank: Answer(tensors) for rank, tensors in held.items()}
        kinds.append(trains_like_unsharded.judge(case, expect_held(case, 0, held), answers).kind)

    assert kinds == ["holds", "value"]


@pytest.mark.parametrize(
    "name", ["step2.output", "step2.grad.x", "step2.capture.in_proj.input", "step2.param.out_proj.bias"]
)
def test_wrong_element_of_a_later_step_fails_only_the_training_claim(name: str) -> None:
    replies = set_element(replies_of(CASE), 0, name, (0,) * len(CASE.shapes()[name]), 77.0)
    judgement = judge(trains_like_unsharded, replies)

    assert (judgement.kind, wrong_tensors(judgement)) == ("value", [name])
    assert judge(equals_unsharded, replies).kind == judge(gradients_equal_unsharded, replies).kind == "holds"


def test_training_claim_names_a_wrong_state_only_in_its_first_step() -> None:
    case = training_case(world_size=2)
    right = train(case, torch.float32)
    wrong = dict(right, **{"step1.param.out_proj.bias": right["step1.param.out_proj.bias"] + 4})
    wrong["step2.output"] = right["step2.output"] + 4
    wrong["step2.param.out_proj.bias"] = right["step2.param.out_proj.bias"] + 4
    held = held_of(case, wrong)
    answers = {rank: Answer(tensors) for rank, tensors in held.items()}
    judgement = trains_like_unsharded.judge(case, expect_held(case, 0, held), answers)

    assert (judgement.kind, wrong_tensors(judgement)) == ("value", ["step1.param.out_proj.bias"])


def test_missing_parameter_after_a_step_fails_with_kind_shape() -> None:
    judgement = judge(trains_like_unsharded, drop_tensor(replies_of(CASE), 1, "step1.param.in_proj.weight"))

    assert (judgement.kind, wrong_tensors(judgement)) == ("shape", ["step1.param.in_proj.weight"])


def test_training_claim_ignores_a_wrong_output_of_the_first_step() -> None:
    replies = set_element(replies_of(CASE), 0, "output", (0, 0, 0), 77.0)

    assert judge(trains_like_unsharded, replies).kind == "holds"
    assert wrong_tensors(judge(equals_unsharded, replies)) == ["output"]


def test_message_names_a_wrong_activation_before_a_wrong_output() -> None:
    replies = set_element(replies_of(CASE), 0, "capture.in_proj.output", (0, 0, 0), 77.0)
    replies = set_element(replies, 0, "grad.out_proj.input", (0, 0, 0), 77.0)

    assert wrong_tensors(judge(equals_unsharded, replies)) == ["capture.in_proj.output"]
    assert wrong_tensors(judge(gradients_equal_unsharded, replies)) == ["grad.out_proj.input"]


def test_layout_claim_judges_gradients_of_later_steps_and_no_activation() -> None:
    replies = replies_of(CASE)
    for name in ("capture.out_proj.input", "step2.grad.in_proj.weight"):
        for rank in range(3):
            replies = set_tensor(replies, rank, name, layout=Layout((Replicate(),)))

    assert wrong_tensors(judge(keeps_layout_of_parameter, replies)) == ["step2.grad.in_proj.weight"]


def test_training_claim_is_a_default_only_for_cases_that_train() -> None:
    assert trains_like_unsharded in default_claims(CASE)
    assert trains_like_unsharded not in default_claims(mlp_case())


def test_training_claim_continues_each_step_from_the_values_of_the_ranks() -> None:
    case = training_case(values=(("real", 0),), lr=0.1)
    verdicts = judge_replies("any", case, replies_of(case))

    assert {verdict.kind for verdict in verdicts if verdict.claim == trains_like_unsharded.name} == {"holds"}
    assert max(verdict.judgement.margin for verdict in verdicts) > 0


# ------------------------------------------------------------------------------------------------
# the ranks' values


def held(*locals_: torch.Tensor, layout: Layout = SHARDED) -> dict[int, dict[str, Placed]]:
    return {rank: {"t": Placed(local, layout)} for rank, local in enumerate(locals_)}


def test_oracle_assembles_shards_in_the_order_of_the_ranks() -> None:
    found = whole(held(torch.tensor([1.0, 2.0]), torch.tensor([3.0])), "t", (3,), (2,))

    assert found is not None and found.dtype == torch.float64
    assert found.tolist() == [1.0, 2.0, 3.0]


def test_oracle_adds_the_operands_of_a_partial_tensor_in_float64() -> None:
    """256 + 1 is 256 in bfloat16."""
    parts = (torch.tensor([256.0], dtype=torch.bfloat16), torch.tensor([1.0], dtype=torch.bfloat16))
    found = whole(held(*parts, layout=Layout((Partial(),))), "t", (1,), (2,))

    assert found is not None and found.item() == 257.0


@pytest.mark.parametrize(
    "broken",
    [
        {0: {}, 1: {}},
        {0: {"t": Placed(torch.zeros(2), SHARDED)}, 1: {}},
        held(torch.zeros(2), torch.zeros(2)),
        held(torch.zeros(2), torch.zeros(1, dtype=torch.float64)),
        {0: {"t": Placed(torch.zeros(2), SHARDED)}, 1: {"t": Placed(torch.zeros(3), Layout((Replicate(),)))}},
    ],
    ids=["on no rank", "on one rank", "wrong shape", "two dtypes", "two layouts"],
)
def test_oracle_cannot_assemble_shards_of_mismatched_shapes(broken: dict[int, dict[str, Placed]]) -> None:
    assert whole(broken, "t", (3,), (2,)) is None


def test_oracle_cannot_assemble_shards_with_a_layout_of_another_mesh() -> None:
    two_axes = Layout((Shard(0), Replicate()))

    assert whole(held(torch.zeros(2), torch.zeros(1), layout=two_axes), "t", (3,), (2,)) is None


def test_oracle_continues_from_the_replica_of_the_lowest_rank() -> None:
    replicas = held(torch.tensor([1.0]), torch.tensor([2.0]), layout=Layout((Replicate(),)))
    found = whole(replicas, "t", (1,), (2,))

    assert found is not None and found.item() == 1.0
