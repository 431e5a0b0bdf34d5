"""Converts the notes on a rank's calls in one visit to operands, results and descriptions of the calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from equivtest.oracle.single_collective import Inconsistent
from equivtest.ranks.observe.moves import BARRIERS, CALLS, REDUCING, flat_tensors
from equivtest.ranks.observe.notes import BEGUN, COLLECTIVE, ENDED, Note, Part, file_of, read_notes, unpacked
from equivtest.tensors import dtype_name

MOST_OPERANDS = 3


Group = tuple[tuple[int, ...], str]
"""(ranks of a process group, name of the group).  The name is equal on all these ranks."""


@dataclass(frozen=True)
class Event:
    """One call of a collective, an operation or an operator on one rank.

    Attributes:
        end: The note of the call's end. None if the call did not end.
        ordinal: Number of the call among the calls of the same name in its phase on this rank, from 1.
    """

    rank: int
    begun: Note
    end: Note | None
    ordinal: int

    @property
    def kind(self) -> str:
        """Kind of the collective, such as 'all_reduce', or the name of any other call."""
        name = self.begun.name
        return CALLS[name].kind if self.begun.kind == COLLECTIVE and name not in BARRIERS else name

    @property
    def group(self) -> Group:
        """The group of the call.  Two groups of the same ranks differ if their names differ."""
        return self.begun.group, str(self.begun.options.get("group_name", ""))

    @property
    def op(self) -> str:
        """Reduction of a collective, such as 'sum', or ''."""
        return str(self.begun.options.get("op", "")) if self.kind in REDUCING else ""

    @property
    def in_short(self) -> str:
        return f"{self.kind} ({self.op})" if self.op else self.kind

    @property
    def has_results(self) -> bool:
        """True if the call ended and no other code changed its operands meanwhile."""
        return self.end is not None and self.end.moment == ENDED and not self.end.was_changed

    @property
    def raised(self) -> str:
        return self.end.error if self.end is not None else ""

    @property
    def ended_s(self) -> float:
        """Time at which a barrier ended, by the clock of the rank's host."""
        assert self.end is not None
        return self.end.at_s

    @property
    def given(self) -> Any:
        return unpacked(self.begun.given)

    @property
    def got(self) -> Any:
        assert self.end is not None
        return unpacked(self.end.got)


def read_events(folder: Path, rank: int) -> list[Event]:
    """Reads a rank's calls, in the order in which they began."""
    notes = list(read_notes(file_of(folder, rank)))
    ends = {note.number: note for note in notes if note.moment != BEGUN}
    counts: Counter[tuple[str, str]] = Counter()
    events = []
    for note in notes:
        if note.moment == BEGUN:
            call = (note.name, note.options["phase"])
            counts[call] += 1
            events.append(Event(rank, note, ends.get(note.number), counts[call]))
    return events


def describe(event: Event) -> str:
    tensors = [each for each in tree_leaves(event.given) if isinstance(each, torch.Tensor | Part)]
    of = ", ".join(map(in_words, tensors[:MOST_OPERANDS]))
    what = f"{event.in_short} of {of}" if of else event.in_short
    on = f" on ranks {', '.join(map(str, event.begun.group))}" if event.begun.group else ""
    more = ", ..." if len(tensors) > MOST_OPERANDS else ""
    return f"{what}{more}, call {event.ordinal} of it in the {event.begun.options['phase']}{on}"


def in_words(tensor: torch.Tensor | Part) -> str:
    if isinstance(tensor, Part):
        return f"{dtype_name(tensor.local.dtype)} {tensor.shape} [{tensor.layout}]"
    return f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"


def items_of(event: Event) -> list[list[torch.Tensor]]:
    """Returns a collective's operand as lists of flat tensors, in the form of `equivtest.oracle.single_collective`.

    A coalesced call has one list for each of its collectives.  A list has one tensor, or one tensor for each rank if
    the collective sends a different tensor to each rank.
    """
    given, size = event.given, len(event.begun.group)
    tensors = [given] if isinstance(given, torch.Tensor) else given
    if event.kind == "all_to_all":
        sizes = event.begun.options["numbers"]
        parts = _split(tensors[0], sizes[1] if len(sizes) > 1 else [], size) if _is_one(given) else tensors
        return [[part.reshape(-1) for part in parts]]
    if event.kind == "reduce_scatter" and not any(isinstance(item, list) for item in tensors):
        return [[part.reshape(-1) for part in _split(item, [], size)] for item in tensors]
    return [[part.reshape(-1) for part in (item if isinstance(item, list) else [item])] for item in tensors]


def _is_one(given: Any) -> bool:
    return isinstance(given, torch.Tensor)


def _split(whole: torch.Tensor, sizes: Sequence[int], num: int) -> list[torch.Tensor]:
    """Splits dim 0 into parts of `sizes`, or into `num` equal parts.  Raises Inconsistent if the sizes do not fit."""
    if not sizes:
        flat = whole.reshape(-1)
        if len(flat) % num:
            raise Inconsistent(f"{len(flat)} elements cannot be divided evenly among {num} ranks")
        return list(flat.reshape(num, len(flat) // num).unbind())
    if sum(sizes) != len(whole) or len(sizes) != num:
        raise Inconsistent(f"splits of {sizes} do not fit {len(whole)} rows and {num} ranks")
    return list(torch.split(whole, list(sizes)))


def results_of(event: Event) -> list[torch.Tensor]:
    """Returns a collective's results as flat tensors. A coalesced call has one tensor for each of its collectives."""
    got = event.got
    if event.kind == "all_to_all":
        return [torch.cat([part.reshape(-1) for part in flat_tensors(got)])]
    if event.begun.name == "allgather_coalesced":  # a list for each rank
        got = [list(parts) for parts in zip(*got, strict=True)]
    items = [got] if isinstance(got, torch.Tensor) else got
    return [torch.cat([part.reshape(-1) for part in flat_tensors(item)]) for item in items]
