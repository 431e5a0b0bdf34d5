"""Collectives: what is documented of a case, worked out by hand, and what is claimed of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from equivtest.base.collective import Collective, describe
from equivtest.cases.case import Case
from equivtest.errors import Misuse
from equivtest.families.linear.case import LinearCase
from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.oracle.collectives import expected_collectives, without_all_to_all
from equivtest.ranks.reply import Reply
from equivtest.verdicts.claims import uses_only_collectives
from equivtest.verdicts.judging import judge_replies
from equivtest.verdicts.message import write_message
from equivtest.verdicts.verdict import Verdict
from tests.replies import FETCH, LINEAR, change_answer, right_replies

RECORDED = replace(LINEAR, records=True)
ALL = ("x", "weight", "bias")


def linear(style: str, **fields: Any) -> LinearCase:
    """Two ranks, x (3, 5), weight (7, 5), output (3, 7) in float32, recorded; nothing divides by two."""
    defaults: dict[str, Any] = {"world_size": 2, "leading": (3,), "in_features": 5, "out_features": 7, "records": True}
    return LinearCase(style=style, **(defaults | {"x_is_dtensor": True, "requires_grad": ()} | fields))


def fetch(collective: str, *parameters: tuple[int, ...], world_size: int = 2) -> FetchCase:
    flags = (True,) * len(parameters)
    return FetchCase(
        world_size=world_size, parameters=parameters, requires_grad=flags, collective=collective, records=True
    )


def texts(case: Case, rank: int = 0, *, phase: str = "") -> list[str]:
    return [str(call) for call in expected_collectives(case, rank) if call.phase == phase or not phase]


# Documented collectives, worked out by hand.


@pytest.mark.parametrize(
    ("style", "input_layout", "expected"),
    [
        ("colwise", "replicate", []),
        ("colwise", "shard(0)", ["forward all_gather of 40 bytes"]),  # 2 of 4 rows of 5
        ("colwise", "shard(1)", ["forward all_gather of 36 bytes"]),  # 3 rows of 3 of 6
        ("rowwise", "replicate", []),
        ("rowwise", "shard(1)", []),
        ("rowwise", "shard(0)", ["forward all_to_all of 48 bytes"]),  # 2 of 4 rows of 6
    ],
)
def test_documented_collectives_redistribute_x_to_the_layout_of_the_style(
    style: str, input_layout: str, expected: list[str]
) -> None:
    output = "shard(1)" if style == "colwise" else "replicate"
    found = texts(linear(style, input_layout=input_layout, output_layout=output))

    assert [text for text in found if "scatter" not in text and "all_reduce" not in text] == expected


@pytest.mark.parametrize(
    ("style", "output_layout", "expected"),
    [
        ("colwise", "shard(1)", []),
        ("colwise", "replicate", ["forward all_gather of 48 bytes"]),  # 3 rows of 4 of 8
        ("colwise", "shard(0)", ["forward all_to_all of 64 bytes"]),  # 4 rows of 4 of 8
        ("rowwise", "replicate", ["forward all_reduce of 84 bytes"]),  # 3 rows of 7
        ("rowwise", "shard(0)", ["forward reduce_scatter of 112 bytes"]),  # 4 rows of 7
        ("rowwise", "shard(1)", ["forward reduce_scatter of 96 bytes"]),  # 3 rows of 8
    ],
)
def test_documented_collectives_include_the_redistribution_of_the_output(
    style: str, output_layout: str, expected: list[str]
) -> None:
    assert texts(linear(style, output_layout=output_layout), rank=1)[1:] == expected


@pytest.mark.parametrize(
    ("style", "fields", "expected"),
    [
        ("colwise", {"output_layout": "shard(1)"}, ["backward all_reduce of 60 bytes"]),
        (
            "colwise",
            {"input_layout": "shard(0)", "output_layout": "shard(0)"},
            ["backward all_to_all of 64 bytes", "backward reduce_scatter of 80 bytes"],
        ),
        ("colwise", {"output_layout": "shard(1)", "requires_grad": ("weight", "bias")}, []),
        ("rowwise", {}, ["backward all_gather of 36 bytes"]),
        ("rowwise", {"input_layout": "shard(1)"}, []),
        ("rowwise", {"input_layout": "shard(0)", "requires_grad": ("weight",)}, []),
        ("rowwise", {"output_layout": "shard(0)", "requires_grad": ("bias",)}, ["backward all_gather of 56 bytes"]),
    ],
)
def test_documented_collectives_of_the_backward_mirror_the_forward(
    style: str, fields: dict[str, Any], expected: list[str]
) -> None:
    case = linear(style, **({"bias": True, "requires_grad": ALL} | fields))

    assert texts(case, phase="backward") == expected


def test_documented_scatters_of_parameters_come_from_rank_0() -> None:
    """Weight (7, 5) as 8 rows or 6 columns, the bias of 7 as 8 or whole; other ranks hand in nothing of a scatter."""
    colwise, rowwise = (linear(style, bias=True, output_layout="shard(1)") for style in ("colwise", "rowwise"))

    assert texts(colwise)[:2] == ["forward scatter of 160 bytes", "forward scatter of 32 bytes"]
    assert texts(colwise, rank=1)[:2] == ["forward scatter of 0 bytes"] * 2
    assert texts(rowwise)[:2] == ["forward scatter of 168 bytes", "forward broadcast of 28 bytes"]
    assert texts(rowwise, rank=1)[:2] == ["forward scatter of 0 bytes", "forward broadcast of 28 bytes"]


def test_layer_on_one_rank_documents_only_the_scatter_of_its_weight() -> None:
    case = linear("colwise", world_size=1, input_layout="shard(0)", output_layout="shard(0)", requires_grad=("x",))

    assert texts(case) == ["forward scatter of 140 bytes"]


def test_fetch_documents_one_collective_for_all_parameters() -> None:
    """Five and three elements are padded to 6 and 4: ranks hand in 3 + 2, or 6 + 4."""
    assert texts(fetch("all_gather", (5,), (3,))) == ["forward all_gather of 20 bytes"]
    assert texts(fetch("all_reduce", (5,), (3,))) == ["forward all_reduce of 40 bytes"]


def test_fetch_without_elements_documents_no_collective() -> None:
    assert texts(fetch("all_gather", (0, 3))) == texts(fetch("all_reduce", (0,), (2, 0))) == []


def test_documented_bytes_depend_on_the_dtype() -> None:
    assert texts(replace(fetch("all_reduce", (4,)), dtype="bfloat16")) == ["forward all_reduce of 8 bytes"]


def test_case_class_without_documented_collectives_raises_misuse() -> None:
    with pytest.raises(Misuse, match=r"no collectives are documented for Case.*expected_collectives\.register"):
        expected_collectives(object.__new__(Case), 0)


def test_recorded_fetch_case_that_names_no_collective_raises_misuse() -> None:
    with pytest.raises(Misuse, match="set collective='all_gather' or collective='all_reduce'"):
        FetchCase(world_size=1, records=True)


# Claims.


def verdicts_on(replies: Sequence[Reply], case: Case = RECORDED) -> list[Verdict]:
    return judge_replies("mine", case, replies, [uses_only_collectives])


def with_calls(rank: int, *calls: Collective) -> list[Reply]:
    """Right replies to RECORDED, but one rank called something else."""
    return change_answer(right_replies(RECORDED), rank, lambda answer: replace(answer, collectives=calls))


@pytest.mark.parametrize("case", [RECORDED, linear("rowwise", requires_grad=ALL[:2]), fetch("all_gather", (5,))])
def test_claim_on_collectives_ignores_the_order_of_the_calls(case: Case) -> None:
    replies = right_replies(case)
    for rank in range(case.world_size):
        replies = change_answer(
            replies, rank, lambda answer: replace(answer, collectives=(answer.collectives or ())[::-1])
        )

    assert [verdict.kind for verdict in verdicts_on(replies, case)] == ["holds"]


def test_claim_on_collectives_gives_no_verdict_on_an_unrecorded_case() -> None:
    assert verdicts_on(right_replies(LINEAR), LINEAR) == []
    assert verdicts_on(right_replies(FETCH), FETCH) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda calls: (*calls, Collective("barrier", 0)),
        lambda calls: calls[:-1],
        lambda calls: (*calls[:-1], replace(calls[-1], size_bytes=calls[-1].size_bytes + 4)),
        lambda calls: (*calls[:-1], replace(calls[-1], kind="reduce_scatter")),
        lambda calls: (*calls[:-1], replace(calls[-1], phase="forward")),
        lambda calls: (*calls[:-1], replace(calls[-1], group="processes 0, 1, 2, 3")),
    ],
    ids=["additional call", "missing call", "wrong bytes", "wrong kind", "wrong phase", "wrong group"],
)
def test_claim_on_collectives_fails_for_an_undocumented_collective(change: Any) -> None:
    [verdict] = verdicts_on(with_calls(1, *change(expected_collectives(RECORDED, 1))), RECORDED)

    assert verdict.kind == "collectives" and [mismatch.rank for mismatch in verdict.judgement.mismatches] == [1]


def test_message_lists_documented_and_actual_collectives() -> None:
    case = fetch("all_gather", (5,))
    call = Collective("all_gather", 12)
    replies = change_answer(
        right_replies(case), 1, lambda answer: replace(answer, collectives=(call, call, Collective("barrier", 0)))
    )
    lines = write_message(verdicts_on(replies, case)[0]).splitlines()

    assert lines[:6] == [
        "CollectiveMismatch: mine: other collectives than the documented ones",
        "  claim     uses_only_collectives",
        "  where     rank 1 of 2",
        "  expected  forward all_gather of 12 bytes",
        "  actual    2 x forward all_gather of 12 bytes; forward barrier of 0 bytes",
        "  extent    1 of 2 ranks: 1",
    ]


def test_claim_on_collectives_accepts_all_gather_in_place_of_all_to_all() -> None:
    """gloo has none: torch gathers as many bytes and cuts."""
    case = linear("colwise", output_layout="shard(0)", requires_grad=("weight",))
    instead = [
        tuple(c if c.kind == "scatter" else replace(c, kind="all_gather") for c in expected_collectives(case, r))
        for r in (0, 1)
    ]
    replies = right_replies(case)
    for rank in (0, 1):
        replies = change_answer(replies, rank, lambda answer, rank=rank: replace(answer, collectives=instead[rank]))
    mixed = change_answer(
        replies, 0, lambda answer: replace(answer, collectives=(*instead[0][:2], *expected_collectives(case, 0)[2:]))
    )

    assert verdicts_on(replies, case)[0].kind == "holds"
    assert verdicts_on(mixed, case)[0].kind == "collectives"


def test_all_gather_may_replace_all_to_all_only_in_all_calls_of_all_ranks() -> None:
    case = linear("colwise", output_layout="shard(0)", requires_grad=("weight",))
    replies = right_replies(case)
    for rank in (0, 1):
        gathered = without_all_to_all(expected_collectives(case, rank))
        replies = change_answer(replies, rank, partial(replace, collectives=gathered))
    mixed = change_answer(replies, 1, partial(replace, collectives=(*gathered[:2], *expected_collectives(case, 1)[2:])))

    assert [verdicts_on(given, case)[0].kind for given in (replies, mixed)] == ["holds", "collectives"]


def test_claim_on_collectives_is_a_default_for_a_recorded_case() -> None:
    judged = {
        case.records: {v.claim for v in judge_replies("mine", case, right_replies(case))} for case in (LINEAR, RECORDED)
    }

    assert judged[True] - judged[False] == {"uses_only_collectives"} and judged[False] < judged[True]


def test_message_shows_an_empty_list_of_collectives_as_none() -> None:
    assert describe(()) == "none"


def test_claim_on_collectives_gives_no_verdict_on_a_python_process_group() -> None:
    """Neither a pass nor a failure: its groups are Python's own, which torch's dispatcher does not see."""
    replies = right_replies(RECORDED)
    for rank in range(RECORDED.world_size):
        replies = change_answer(replies, rank, lambda answer: replace(answer, collectives=None))

    assert verdicts_on(replies, RECORDED) == []


def test_claim_on_collectives_fails_if_only_some_ranks_recorded() -> None:
    replies = change_answer(right_replies(RECORDED), 0, lambda answer: replace(answer, collectives=None))

    [verdict] = verdicts_on(replies, RECORDED)

    assert verdict.kind == "collectives" and "not recorded" in verdict.judgement.mismatches[0].actual
