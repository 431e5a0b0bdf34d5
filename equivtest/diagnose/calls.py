"""Judges each collective and each local operation of a watched visit, in which ranks note all calls and operands."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from equivtest.diagnose.pairs import MESSAGES, barriers, messages, opened_early, require_fit, right_message
from equivtest.diagnose.watched import Event, Group, describe, items_of, results_of
from equivtest.oracle.declared import declared_of
from equivtest.oracle.single_collective import Inconsistent, Items, Right, Unjudged, premultiplied, right_results
from equivtest.oracle.single_operation import as_pairs, raised_on_cpu, right_of_operation
from equivtest.ranks.first_cause import LOST_ITS_PEER
from equivtest.ranks.observe.moves import BARRIERS, REDUCING, flat_tensors
from equivtest.ranks.observe.notes import COLLECTIVE, OPERATION
from equivtest.ranks.reply import Reply
from equivtest.tensors import as_bits, dtype_name, same_bits


@dataclass(frozen=True)
class Blame:
    """A call with wrong results, or a call in which the ranks differ.

    Attributes:
        layer: 'collective', 'kernel', 'operator' or 'parallelization'.
        order: Number of the call on its rank. Earlier calls have smaller numbers.
    """

    layer: str
    text: str
    order: int


@dataclass(frozen=True)
class Judged:
    """The conclusions on all calls of one kind: collectives, operations or operators.

    Attributes:
        num_right: Number of calls whose results are right for their operands. A collective or an operation counts once
            on each rank. An operator counts once for all ranks of its mesh together.
        unjudged: Reason why calls were not judged -> number of calls.
    """

    blames: tuple[Blame, ...]
    num_right: int
    unjudged: Mapping[str, int]


def judge_collectives(events: Sequence[Sequence[Event]], replies: Sequence[Reply]) -> Judged:
    """Judges all collectives, each together with the calls of the other ranks of its group.

    The first calls of a group's ranks belong together, then the second calls, and so on.  Messages between two ranks,
    and barriers, are judged separately.
    """
    called: dict[Group, dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in itertools.chain(*events):
        if event.begun.kind == COLLECTIVE and event.kind not in (*MESSAGES, *BARRIERS):
            called[event.group][event.rank].append(event)
    running = _Collectives(replies, {own[-1].rank: own[-1] for own in events if own})
    for (group, _), by_rank in called.items():
        for place in range(max(map(len, by_rank.values()))):
            if not running.judge([by_rank[rank][place] if place < len(by_rank[rank]) else None for rank in group]):
                break  # the ranks call different collectives: later calls do not match either
    for event in itertools.chain(*events):
        if event.kind == "send":
            running.judge_end(event)
    for sending, reception in messages(events):
        running.judge_message(sending, reception)
    for found in barriers(events):
        running.judge_barrier(found)
    return Judged(tuple(running.blames), running.num_right, running.unjudged)


class _Collectives:
    def __init__(self, replies: Sequence[Reply], last: Mapping[int, Event]) -> None:
        self._replies, self._last = replies, last
        self._results: dict[tuple[Any, ...], list[list[torch.Tensor]]] = {}
        self.blames: list[Blame] = []
        self.num_right = 0
        self.unjudged: Counter[str] = Counter()

    def judge(self, found: Sequence[Event | None]) -> bool:
        """Judges one collective from the calls of all its ranks, or returns False if the calls do not match."""
        events = [event for event in found if event is not None]
        first, problem, num_blames = events[0], _difference(found), len(self.blames)
        try:
            if problem:
                raise Inconsistent(problem)
            operands = [_operand_of(event) for event in events]
            _require_sizes(events, operands)
            op = "sum" if first.op == "premul" else first.op
            for rank, event in enumerate(events):
                root = first.begun.options.get("root")
                self._judge_one(event, right_results(first.kind, op, operands, rank, root))
        except Inconsistent as reason:
            self._blame("parallelization", first, str(reason))
            return False
        except Unjudged as reason:
            self.unjudged[str(reason)] += len(events)
        if len(self.blames) == num_blames and all(event.has_results for event in events):
            self._judge_bits(events)
        return True

    def judge_end(self, event: Event) -> None:
        self._judge_one(event, None)

    def judge_message(self, sending: Event | None, reception: Event) -> None:
        try:
            right = right_message(sending)
            assert sending is not None
            require_fit(sending, reception)
            self._judge_one(reception, right)
        except Inconsistent as reason:
            self._blame("parallelization", reception, str(reason))
        except Unjudged as reason:
            self.unjudged[str(reason)] += 1

    def judge_barrier(self, events: Sequence[Event]) -> None:
        """Records a barrier as wrong if it raised, hung, or opened on some rank before all ranks had called it."""
        for event in events:
            self.judge_end(event)
        try:
            early = opened_early(events)
        except Unjudged as reason:
            self.unjudged[str(reason)] += len(events)
            return
        self.num_right += len(events) if early is None and all(event.has_results for event in events) else 0
        if early is not None:
            self._blame("collective", *early)

    def _judge_one(self, event: Event, right: Sequence[Right] | None) -> None:
        if event.raised:
            if not any(words in event.raised.lower() for words in LOST_ITS_PEER):
                self._blame("collective", event, f"rank {event.rank}: it raised {event.raised}")
        elif event.end is None:
            self._judge_unended(event)
        elif event.end.was_changed:
            self.unjudged["the program changed its operand before it had ended"] += 1
        elif right is not None:
            wrong = first_wrong(results_of(event), right)
            self.num_right += not wrong
            if wrong:
                self._blame("collective", event, f"rank {event.rank} got {wrong}")

    def _judge_unended(self, event: Event) -> None:
        """Records a call that never ended as wrong if the rank died or hung in it.

        If the rank answered later, the program did not wait for the call.  Then the call is not judged.
        """
        outcome = self._replies[event.rank].outcome
        if event is self._last[event.rank] and outcome in ("lost", "timed_out"):
            what = "the process of the rank ended during it" if outcome == "lost" else "it did not end"
            self._blame("collective", event, f"rank {event.rank}: {what}")
        elif outcome == "answered":
            self.unjudged["the program did not wait for it"] += 1

    def _judge_bits(self, events: Sequence[Event]) -> None:
        """Records a collective as wrong if its results differ in bits between two ranks or two calls.

        The first rule concerns all_reduce.  The second concerns any reduction: an earlier call with equal operands gave
        other bits on some rank.  It does not count if the backend declares that its order of summation varies.
        """
        first, results = events[0], [flat_tensors(event.got) for event in events]
        if first.kind == "all_reduce":
            for event, other in zip(events, results, strict=True):
                if not all(map(same_bits, results[0], other)):
                    self._blame("collective", first, f"ranks {first.rank} and {event.rank} got different bits")
                    return
        call = (first.kind, first.op, first.begun.group, repr([event.begun.given for event in events]))
        earlier = self._results.setdefault(call, results)
        if first.kind in REDUCING and not _may_vary(results):
            for event, now, before in zip(events, results, earlier, strict=True):
                if not all(map(same_bits, now, before)):
                    text = f"rank {event.rank} got different bits from an earlier call with the same operands"
                    self._blame("collective", event, text)
                    return

    def _blame(self, layer: str, event: Event, text: str) -> None:
        self.blames.append(Blame(layer, f"{describe(event)}: {text}", event.begun.number))


def _require_sizes(events: Sequence[Event], operands: Sequence[Items]) -> None:
    """Raises Inconsistent unless the operands of all ranks have the sizes and dtypes that the collective requires.

    Ranks may gather operands of different sizes if each rank has room for all operands.  Source: the docstring of
    torch.distributed.all_gather (2.13.0): "Complex and uneven sized tensors are supported."
    """
    kind, room = events[0].kind, [sum(event.begun.options["room"]) for event in events]
    sizes = [tuple(len(part) for item in items for part in item) for items in operands]
    dtypes = [tuple(dtype_name(part.dtype) for item in items for part in item) for items in operands]
    given, totals = _given(kind, operands), list(map(sum, sizes))
    if kind not in ("scatter", "all_to_all") and len(set(sizes)) > 1 and given != room:
        said = _each(totals) if len(set(totals)) > 1 else _each(sizes)
        raise Inconsistent(f"the ranks pass {said} elements to one {kind}")
    if kind not in ("scatter", "all_to_all") and len(set(dtypes)) > 1:
        raise Inconsistent(f"the ranks pass {_each(', '.join(each) for each in dtypes)} to one {kind}")
    for event, size, total in zip(events, room, given, strict=False):
        if size != total:
            raise Inconsistent(
                f"the ranks send {total} elements to rank {event.rank}, whose output has room for {size}"
            )


def _given(kind: str, operands: Sequence[Items]) -> list[int]:
    """Returns the number of elements that each rank receives in an all_gather, scatter or all_to_all, otherwise []."""
    if kind in ("scatter", "all_to_all"):
        return [sum(len(item[place]) for items in operands for item in items) for place in range(len(operands))]
    whole = sum(len(part) for items in operands for item in items for part in item)
    return [whole] * len(operands) if kind == "all_gather" else []


def _each(values: Iterable[object]) -> str:
    return " and ".join(map(str, dict.fromkeys(values)))


def _operand_of(event: Event) -> Items:
    """Returns a rank's operand of the collective, multiplied by the factor of a PREMUL_SUM."""
    items = items_of(event)
    return premultiplied(items, event.begun.options["factor"]) if event.op == "premul" else items


def _may_vary(results: Any) -> bool:
    records = (declared_of(dtype_name(result.dtype)) for result in flat_tensors(results))
    return any(record is not None and record.order_varies for record in records)


def _difference(found: Sequence[Event | None]) -> str:
    """Describes how the calls of a group's ranks differ, or returns ''."""
    events = [event for event in found if event is not None]
    calls = {(event.kind, event.op, event.begun.options.get("root")): event for event in events}
    if len(calls) > 1:
        return " and ".join(f"rank {event.rank} calls {event.in_short}" for event in calls.values())
    absent = [rank for rank, event in zip(events[0].begun.group, found, strict=True) if event is None]
    return f"rank {absent[0]} does not call it" if absent else ""


def judge_operations(events: Sequence[Sequence[Event]]) -> Judged:
    blames: list[Blame] = []
    unjudged: Counter[str] = Counter()
    num_right = 0
    for event in itertools.chain(*events):
        if event.begun.kind != OPERATION or event.end is None:
            continue
        try:
            text = _wrong_operation(event)
        except (Unjudged, ValueError) as reason:
            unjudged[str(reason)] += 1
            continue
        num_right += not text
        if text:
            blames.append(Blame("kernel", f"{describe(event)}: rank {event.rank} {text}", event.begun.number))
    return Judged(tuple(blames), num_right, unjudged)


def _wrong_operation(event: Event) -> str:
    """Describes the first error in an operation's results, or returns ''.

    Raises:
        Unjudged: the operation's right result is unknown.
        ValueError: an argument of the operation is no plain data.
    """
    args, kwargs = event.given
    if event.raised:
        return (
            ""
            if raised_on_cpu(event.kind, args, dict(kwargs))
            else f"it raised {event.raised}, but does not raise on the CPU"
        )
    if not event.has_results:
        raise Unjudged("the program changed its operand before it had ended")
    found = [as_pairs(each) for each in tree_leaves(event.got) if isinstance(each, torch.Tensor)]
    wrong = first_wrong(found, right_of_operation(event.kind, args, dict(kwargs)))
    return f"got {wrong}" if wrong else ""


def first_wrong(found: Sequence[torch.Tensor], right: Sequence[Right]) -> str:
    """Describes the first wrong element of a call's results, or returns ''."""
    if len(found) != len(right):
        return f"{len(found)} results instead of {len(right)}"
    return next(filter(None, map(_wrong, found, right)), "")


def _wrong(found: torch.Tensor, right: Right) -> str:
    value = right.value
    if found.shape != value.shape or (right.allowed is None and found.dtype != value.dtype):
        shapes = [f"{dtype_name(each.dtype)} of {tuple(each.shape)}" for each in (found, value)]
        return f"{shapes[0]} instead of {shapes[1]}"
    places = wrong_places(found, right)
    if not len(places):
        return ""
    place = tuple(places[0].tolist())
    values = f"{found[place].item()} instead of {value[place].item()}"
    return f"{values}{allowed_at(right, place)} at {place}; {len(places)} of {found.numel()} elements are wrong"


def wrong_places(found: torch.Tensor, right: Right) -> torch.Tensor:
    value = right.value
    if right.is_moved:
        is_wrong = as_bits(found) != as_bits(value)
    elif right.allowed is None or not found.is_floating_point():
        is_wrong = (found != value) & ~(found.isnan() & value.isnan())
    else:
        wide = found.double()
        is_alike = (wide == value) | (wide.isnan() & value.isnan()) | right.allowed.isinf()
        is_wrong = ~(is_alike | ((wide - value).abs() <= right.allowed))
    return is_wrong.nonzero()


def allowed_at(right: Right, place: tuple[int, ...]) -> str:
    return "" if right.allowed is None or not right.allowed[place] else f", {right.allowed[place]:.2g} allowed"
