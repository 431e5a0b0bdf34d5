"""Hand-made replies: what correct ranks would answer, and one change to it; no processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from equivtest.base import limits
from equivtest.cases.case import Case
from equivtest.families.linear.case import LinearCase
from equivtest.families.zero3.fetch.case import FetchCase, RefusedFetchCase
from equivtest.oracle import expect
from equivtest.oracle.collectives import expected_collectives
from equivtest.ranks.backend import Backend
from equivtest.ranks.reply import Answer, Reply
from equivtest.ranks.support import Finding
from equivtest.tensors import DTYPES, Placed, slice_local

LINEAR = LinearCase(
    world_size=3,
    style="colwise",
    leading=(2,),
    in_features=3,
    out_features=5,
    bias=True,
    output_layout="shard(1)",
    use_local_output=False,
    requires_grad=("x", "weight", "bias"),
)
"""Shards of 2, 2 and 1: output (2, 5) and weight (5, 3) are uneven, x and its gradient replicated."""

FETCH = FetchCase(world_size=2, parameters=((5, 3), (2,)), requires_grad=(True, False))
"""Fifteen elements padded to sixteen, and two that need no padding."""

REFUSED = RefusedFetchCase(world_size=3, misfit="in_flight")


def right_replies(case: Case) -> list[Reply]:
    """Returns one correct reply per process, including those in no mesh."""
    return [_right_reply(case, process) for process in range(case.num_processes)]


def _right_reply(case: Case, process: int) -> Reply:
    rank = next((group.index(process) for group in case.groups if process in group), None)
    if rank is None:
        return Reply(rank=process, outcome="not_in_mesh", at_s=1.0 + process)
    answers = tuple(_right_answer(case, draw, rank) for draw in range(len(case.values)))
    return Reply(rank=process, outcome="answered", answers=answers, at_s=1.0 + process)


def _right_answer(case: Case, draw: int, rank: int) -> Answer:
    tensors, flags = {}, {}
    for name, expected in expect(case, draw).tensors.items():
        value = expected.value.to(DTYPES[expected.dtype]) if expected.bits is None else expected.bits
        shape = tuple(value.shape)
        local = slice_local(value, expected.layout, case.mesh_shape, rank, padding=float("nan"))
        tensors[name] = Placed(local, expected.layout, shape)
        flags[name] = bool(expected.requires_grad)
    again = tensors if case.repeats and draw == 0 else {}
    return Answer(tensors, flags, again=again, collectives=expected_collectives(case, rank) if case.records else None)


def change_answer(
    replies: Sequence[Reply], rank: int, change: Callable[[Answer], Answer], draw: int = 0
) -> list[Reply]:
    changed = list(replies)
    answers = list(replies[rank].answers)
    answers[draw] = change(answers[draw])
    changed[rank] = replace(replies[rank], answers=tuple(answers))
    return changed


def set_tensor(replies: Sequence[Reply], rank: int, name: str, **fields: object) -> list[Reply]:
    """The replies, some fields of one rank's `Placed` replaced."""

    def change(answer: Answer) -> Answer:
        return replace(answer, tensors={**answer.tensors, name: replace(answer.tensors[name], **fields)})

    return change_answer(replies, rank, change)


def set_element(replies: Sequence[Reply], rank: int, name: str, index: tuple[int, ...], value: float) -> list[Reply]:
    """The replies, one local element of one rank's tensor replaced."""
    local = replies[rank].answers[0].tensors[name].local.clone()
    local[index] = value
    return set_tensor(replies, rank, name, local=local)


def drop_tensor(replies: Sequence[Reply], rank: int, name: str) -> list[Reply]:
    def change(answer: Answer) -> Answer:
        return replace(answer, tensors={other: placed for other, placed in answer.tensors.items() if other != name})

    return change_answer(replies, rank, change)


def on_all_ranks(case: Case, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> list[Reply]:
    """Returns correct replies, except for `change` of every rank's local tensor."""
    replies = right_replies(case)
    for process in (process for group in case.groups for process in group):
        replies = set_tensor(replies, process, name, local=change(replies[process].answers[0].tensors[name].local))
    return replies


def answers_of(replies: Sequence[Reply]) -> dict[int, Answer]:
    """rank -> its answer to the first draw, as claims take them."""
    return {reply.rank: reply.answers[0] for reply in replies if reply.answers}


def raised(rank: int, error_type: str = "ValueError", text: str = "no", *, at_s: float = 1.0) -> Reply:
    return Reply(
        rank=rank,
        outcome="raised",
        error_type=error_type,
        error_text=text,
        detail=f"Traceback of rank {rank}\n{error_type}: {text}",
        at_s=at_s,
    )


class StubPool:
    """A pool without processes: `answer` makes the replies; `seen` lists the cases in order.

    Attributes:
        limits_s: limit_s of each single run.
        searched_s, watched_s: limit_s of the last search, and of the last watched visit.
        renewed: World sizes whose ranks had to be replaced, in order.
    """

    def __init__(self, answer: Callable[[Case], list[Reply]] = right_replies) -> None:
        self.backend = Backend()
        self.answer = answer
        self.seen: list[Case] = []
        self.limits_s: list[float | None] = []
        self.searched_s: float | None = None
        self.watched_s: float | None = None
        self.renewed: list[int] = []

    def run(
        self,
        subject: str,
        case: Case,
        *,
        limit_s: float | None = None,
        may_raise: bool = False,
    ) -> list[Reply]:
        self.seen.append(case)
        self.limits_s.append(limit_s)
        return self.answer(case)

    def visit_limit_s(self, limit_s: float, world_size: int) -> float:
        return limits.on_many_ranks(limit_s, world_size)

    def watch(self, subject: str, case: Case, folder: str, limit_s: float) -> list[Reply]:
        self.watched_s = limit_s
        return self.answer(case)

    def faults_of(self, case: Case) -> list[Finding]:
        return []

    def renew(self, world_size: int) -> None:
        self.renewed.append(world_size)

    def run_all(
        self, subject: str, cases: Iterable[Case], *, limit_s: float | None = None
    ) -> Iterator[tuple[Case, list[Reply]]]:
        self.searched_s = limit_s
        for case in cases:
            self.seen.append(case)
            yield case, self.answer(case)
