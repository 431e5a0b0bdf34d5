"""Judges the messages between two ranks, and the barriers, of a watched visit, in which ranks note all calls.

A message is wrong if the received values differ from the sent values. A barrier is wrong if it opened before all ranks
had called it.

Source: the docstrings of send, recv and barrier in torch/distributed/distributed_c10d.py (2.13.0): a tag matches
messages between two ranks, and messages with the same tag arrive in the order of sending.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

from equivtest.diagnose.watched import Event, Group
from equivtest.oracle.single_collective import Inconsistent, Right, Unjudged
from equivtest.ranks.observe.moves import BARRIERS, FROM_ANY, flat_tensors
from equivtest.tensors import dtype_name, same_bits

MESSAGES = ("send", "recv")

Events = Sequence[Sequence[Event]]
Way = tuple[Group, int, int, int]
"""(group, sender, receiver, tag) of messages.  Sender and receiver are ranks within the group."""


def messages(events: Events) -> Iterator[tuple[Event | None, Event]]:
    """Yields (send, receive) for each received message. The send is None if the sender is unknown."""
    sent: dict[Way, list[Event]] = defaultdict(list)
    received: dict[Way, list[Event]] = defaultdict(list)
    of_anybody = set()
    for event in itertools.chain(*events):
        if event.kind not in MESSAGES:
            continue
        group, numbers = event.group, event.begun.options["numbers"]
        own = event.begun.group.index(event.rank)
        if event.begun.name == FROM_ANY:
            of_anybody.add((group, own, numbers[-1]))
        elif event.kind == "send":
            sent[group, own, numbers[0], numbers[-1]].append(event)
        else:
            received[group, numbers[0], own, numbers[-1]].append(event)
    for (group, source, own, tag), receptions in received.items():
        sendings = [] if (group, own, tag) in of_anybody else sent[group, source, own, tag]
        yield from itertools.zip_longest(sendings[: len(receptions)], receptions)


def right_message(sending: Event | None) -> list[Right]:
    """Returns the values that must arrive for a sent message.  Raises Unjudged if the sent values are unknown."""
    if sending is None:
        raise Unjudged("the sender of a received message is unknown")
    if sending.end is None:
        raise Unjudged("the program did not wait for a sent message")
    given = flat_tensors(sending.given)
    if sending.raised or not all(map(same_bits, given, flat_tensors(sending.got))):
        raise Unjudged("the program changed its operand before it had ended")
    return [Right(tensor.reshape(-1), is_moved=True) for tensor in given]


def require_fit(sending: Event, reception: Event) -> None:
    held = [_in_words(flat_tensors(event.given)) for event in (sending, reception)]
    if held[0] != held[1]:
        raise Inconsistent(f"rank {sending.rank} sends {held[0]}, rank {reception.rank} receives {held[1]}")


def _in_words(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{tensor.numel()} elements of {dtype_name(tensor.dtype)}" for tensor in tensors)


def barriers(events: Events) -> Iterator[Sequence[Event]]:
    """Yields, for each barrier that all ranks of a group have called, the calls of these ranks."""
    called: dict[Group, dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in itertools.chain(*events):
        if event.kind in BARRIERS:
            called[event.group][event.rank].append(event)
    for (group, _), by_rank in called.items():
        yield from zip(*(by_rank[rank] for rank in group), strict=False)


def opened_early(found: Sequence[Event]) -> tuple[Event, str] | None:
    """Returns the call for which a barrier opened before all ranks had called it, and a text that names the late rank.

    Each rank noted the time before it called the barrier and the time after the barrier opened.  So a reported early
    barrier really opened early.

    Raises:
        Unjudged: the ranks have different clocks.
    """
    if len({event.begun.options.get("clock") for event in found}) > 1:
        raise Unjudged("the ranks of the barrier have clocks of several hosts")
    through = [event for event in found if event.has_results]
    if not through:
        return None
    first = min(through, key=lambda event: event.ended_s)
    last = max(found, key=lambda event: event.begun.at_s)
    if first.ended_s >= last.begun.at_s:
        return None
    early_ms = 1e3 * (last.begun.at_s - first.ended_s)
    return first, f"the barrier opened for rank {first.rank} {early_ms:.1f} ms before rank {last.rank} called it"
