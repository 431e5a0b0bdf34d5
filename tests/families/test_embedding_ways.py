"""One embedding by rows and by columns: names, what one must be beside the other, what is excused and what is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from equivtest.cases.values import draw
from equivtest.cases.values.special import special_patterns
from equivtest.check import declared, judge_replies
from equivtest.families.embedding.ways.case import EmbeddingWaysCase, of_style
from equivtest.layout import Layout, Replicate, Shard
from equivtest.oracle import expect, expect_held
from equivtest.oracle.collectives import expected_collectives
from equivtest.oracle.expected import Expected
from equivtest.oracle.rounding import TORCH_CPU
from equivtest.ranks.reply import Reply
from equivtest.tensors import same_bits
from equivtest.verdicts.claims import both_ways_agree
from equivtest.verdicts.message import write_message
from equivtest.verdicts.verdict import Judgement
from tests.replies import LINEAR, answers_of, drop_tensor, right_replies, set_element, set_tensor

CASE = EmbeddingWaysCase(world_size=2, leading=(6,), num_embeddings=2, embedding_dim=4, output_layout="shard(0)")
"""Three tokens and one row by rows, two columns by columns, on each rank."""

REAL = replace(CASE, values=(("real", 0),))
NEGATIVE_ZERO = replace(CASE, values=(("special", 0),))
IN_ANY_ORDER = {dtype: replace(record, adds_rows_in_order=False) for dtype, record in TORCH_CPU.items()}


def expected_beside(case: EmbeddingWaysCase, replies: Sequence[Reply]) -> Expected:
    return expect_held(case, 0, {reply.rank: reply.answers[0].tensors for reply in replies})


def judge(case: EmbeddingWaysCase, replies: Sequence[Reply]) -> Judgement:
    judgement = both_ways_agree.judge(case, expected_beside(case, replies), answers_of(replies))
    assert judgement is not None
    return judgement


def with_element(case: EmbeddingWaysCase, name: str, change: Callable[[float], float]) -> list[Reply]:
    """Right replies, but for the first element of one tensor on rank 1."""
    replies = right_replies(case)
    index = (0,) * replies[1].answers[0].tensors[name].local.dim()
    return set_element(replies, 1, name, index, change(float(replies[1].answers[0].tensors[name].local[index])))


# ------------------------------------------------------------------------------------------------
# The case


def test_an_answer_carries_its_style() -> None:
    assert CASE.answer_names() == (
        "output.rowwise", "param.rowwise.weight", "grad.rowwise.weight",
        "output.colwise", "param.colwise.weight", "grad.colwise.weight",
    )  # fmt: skip


def test_each_style_has_its_own_layouts_and_all_else_is_shared() -> None:
    layouts = CASE.layouts()

    assert layouts["grad.rowwise.weight"] == Layout((Shard(0),))
    assert layouts["grad.colwise.weight"] == Layout((Shard(1),))
    assert layouts["output.rowwise"] == layouts["output.colwise"] == Layout((Shard(0),))
    assert layouts["ids"] == Layout((Replicate(),))


def test_both_are_given_the_same_values() -> None:
    """As each of them alone is."""
    case = replace(CASE, values=(("special", 3),))
    both = draw(case, 0)

    for style in ("rowwise", "colwise"):
        alone = draw(case.of_style(style), 0)
        assert alone.keys() == both.keys() and all(same_bits(alone[name], both[name]) for name in both)


def test_the_one_that_runs_first_calls_its_collectives_first() -> None:
    calls = {
        style: [call.kind for call in expected_collectives(CASE.of_style(style), 0)] for style in ("rowwise", "colwise")
    }

    assert calls["rowwise"] != calls["colwise"]
    assert [call.kind for call in expected_collectives(CASE, 0)] == calls["rowwise"] + calls["colwise"]
    reverse = expected_collectives(replace(CASE, style="colwise"), 0)
    assert [call.kind for call in reverse] == calls["colwise"] + calls["rowwise"]


def test_each_must_answer_what_it_must_alone() -> None:
    expected = expect(CASE, 0)
    for style in ("rowwise", "colwise"):
        for name, alone in expect(CASE.of_style(style), 0).tensors.items():
            assert torch.equal(expected.tensors[of_style(name, style)].value, alone.value)


# ------------------------------------------------------------------------------------------------
# What one must be beside the other


@pytest.mark.parametrize("values", [("dense", 0), ("index", 1), ("special", 8), ("real", 3)])
def test_right_replies_agree(values: tuple[str, int]) -> None:
    case = replace(CASE, values=(values,))
    judgement = judge(case, right_replies(case))

    assert (judgement.kind, judgement.margin) == ("holds", 0)
    assert judgement.agreeing == ("output.rowwise", "param.rowwise.weight", "grad.rowwise.weight")


@pytest.mark.parametrize("case", [CASE, REAL], ids=["exact", "real"])
@pytest.mark.parametrize("style", ["rowwise", "colwise"])
@pytest.mark.parametrize("name", ["output", "param.weight", "grad.weight"])
def test_one_changed_element_of_either_way_is_told(name: str, style: str, case: EmbeddingWaysCase) -> None:
    """By one ulp; the mismatch is always the rowwise tensor's."""
    up = with_element(
        case, of_style(name, style), lambda value: float(torch.tensor(value).nextafter(torch.tensor(9e9)))
    )
    judgement = judge(case, up)

    assert (judgement.kind, [wrong.tensor for wrong in judgement.mismatches]) == ("ways", [of_style(name, "rowwise")])


def test_the_same_change_of_both_ways_is_no_difference() -> None:
    """Whether they are right is another claim."""
    replies = right_replies(CASE)
    for style in ("rowwise", "colwise"):
        held = {rank: reply.answers[0].tensors[f"output.{style}"] for rank, reply in enumerate(replies)}
        for rank, placed in held.items():
            replies = set_tensor(replies, rank, f"output.{style}", local=2 * placed.local)

    assert judge(CASE, replies).kind == "holds"
    assert any(verdict.failed for verdict in judge_replies("mine", CASE, replies))


@pytest.mark.parametrize(
    ("style", "world_size", "expected"),
    [("rowwise", 2, "holds"), ("colwise", 2, "ways"), ("rowwise", 1, "ways"), ("colwise", 1, "ways")],
)
def test_only_the_zeros_that_ranks_add_excuse_a_lost_sign(style: str, world_size: int, expected: str) -> None:
    case = replace(NEGATIVE_ZERO, world_size=world_size)
    replies = right_replies(case)
    for rank, reply in enumerate(replies):
        lost = reply.answers[0].tensors[f"output.{style}"].local + 0.0
        assert not same_bits(lost, reply.answers[0].tensors[f"output.{style}"].local)
        replies = set_tensor(replies, rank, f"output.{style}", local=lost)

    assert judge(case, replies).kind == expected


def test_a_lost_sign_of_a_parameter_is_not_excused() -> None:
    replies = right_replies(NEGATIVE_ZERO)
    for rank, reply in enumerate(replies):
        local = reply.answers[0].tensors["param.rowwise.weight"].local
        replies = set_tensor(replies, rank, "param.rowwise.weight", local=local + 0.0)

    assert [wrong.tensor for wrong in judge(NEGATIVE_ZERO, replies).mismatches] == ["param.rowwise.weight"]


def test_any_nan_stands_for_another_where_zeros_were_added() -> None:
    number = next(n for n, bits in enumerate(special_patterns("float32")) if torch.isnan(_as_float(bits)))
    case = replace(CASE, values=(("special", number),))
    replies = right_replies(case)
    for rank, reply in enumerate(replies):
        local = reply.answers[0].tensors["output.rowwise"].local
        replies = set_tensor(replies, rank, "output.rowwise", local=local.nan_to_num(nan=float("nan")))

    assert judge(case, replies).kind == "holds"


def _as_float(bits: Any) -> torch.Tensor:
    return torch.tensor(bits & 0xFFFFFFFF, dtype=torch.int64).to(torch.int32).view(torch.float32)


def test_a_way_that_makes_no_whole_agrees_with_nothing() -> None:
    """Half of it under another layout, so that no claim on values fails."""
    replies = set_tensor(right_replies(CASE), 0, "grad.colwise.weight", layout=Layout((Replicate(),)))
    judgement = judge(CASE, replies)

    assert judgement.kind == "ways" and "grad.rowwise.weight" not in judgement.agreeing


def test_a_missing_tensor_is_another_claims_business() -> None:
    judgement = judge(CASE, drop_tensor(right_replies(CASE), 1, "output.rowwise"))

    assert judgement.kind == "holds" and "output.rowwise" not in judgement.agreeing


def test_only_what_has_a_bound_has_a_margin() -> None:
    assert judge(CASE, right_replies(CASE)).margins == {}
    assert judge(REAL, right_replies(REAL)).margins == {"grad.rowwise.weight beside grad.colwise.weight": 0.0}


def test_of_what_is_computed_once_there_is_no_verdict() -> None:
    replies = right_replies(LINEAR)

    assert both_ways_agree.judge(LINEAR, expect(LINEAR, 0), answers_of(replies)) is None


def test_real_gradients_may_differ_where_the_order_of_additions_is_not_known() -> None:
    """By up to twice what each may be off; rows of one token never."""
    allowed = expect(REAL, 0).tensors["grad.rowwise.weight"].allowed
    with declared(IN_ANY_ORDER):
        twin = expected_beside(REAL, right_replies(REAL)).twins["grad.rowwise.weight"]

    assert allowed is not None and twin.right is not None and twin.right.allowed is not None
    assert bool((allowed > 0).any()) and torch.equal(twin.right.allowed, 2 * allowed)


def test_terms_that_are_scaled_by_a_rounded_factor_may_be_fused_into_the_addition() -> None:
    """Three and three tokens of two ids, or five and one: only rows whose 1 / n is rounded are off."""
    case = replace(REAL, scale_grad_by_freq=True)
    counts = torch.bincount(draw(case, 0)["ids"])
    twin = expected_beside(case, right_replies(case)).twins["grad.rowwise.weight"]

    assert twin.right is not None and twin.right.allowed is not None
    rounded = [int(count) & (int(count) - 1) != 0 for count in counts]
    assert (twin.right.allowed > 0).all(1).tolist() == rounded and any(rounded)


def test_the_message_says_that_the_other_way_gives_something_else() -> None:
    replies = with_element(CASE, "output.rowwise", lambda value: 2 * value)
    [verdict] = judge_replies("mine", CASE, replies, [both_ways_agree])
    told = write_message(verdict)

    assert told.startswith("WaysMismatch: mine: output.rowwise is not what the other way gives")
    assert "rank 1 of 2, local (0, 0), global (3, 0) of (6, 4), shard(0)" in told
