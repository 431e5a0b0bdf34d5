"""Judges each operator on DTensors in a watched visit, in which ranks note all calls and operands.

The operator runs once more on whole operands, on the CPU (`equivtest.oracle.single_operation`).  Each rank's part of
the result is compared with the rank's slice of the whole result.  A call is not judged if the replicas of an operand
differ, or if no layout says how the ranks' parts make up the operand.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from equivtest.diagnose.calls import Blame, Judged, allowed_at, wrong_places
from equivtest.diagnose.watched import Event, describe, in_words
from equivtest.diagnose.wholes import shares_of, whole_arguments
from equivtest.layout import Partial, local_box
from equivtest.oracle.single_collective import Right, Unjudged
from equivtest.oracle.single_operation import as_pairs, right_of_operation
from equivtest.ranks.observe.notes import OPERATOR, Part
from equivtest.tensors import slice_local

UNFOLLOWED = (RuntimeError, TypeError, ValueError, AssertionError, AttributeError, LookupError, ArithmeticError)
"""Exceptions that an operator, or its analysis, may raise on whole operands.  The call is then not judged."""


def judge_operators(events: Sequence[Sequence[Event]]) -> Judged:
    """Judges all operators on DTensors, each together with the calls of the other ranks of its mesh.

    The first calls of a mesh's ranks belong together, then the second calls, and so on.
    """
    called: dict[tuple[int, ...], dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in itertools.chain(*events):
        if event.begun.kind == OPERATOR:
            called[event.begun.group][event.rank].append(event)
    blames: list[Blame] = []
    unjudged: Counter[str] = Counter()
    num_right = 0
    for ranks, by_rank in called.items():
        for calls in zip(*(by_rank[rank] for rank in ranks), strict=False):
            if len({call.begun.name for call in calls}) > 1:
                unjudged["the ranks call different operators"] += 1
                break  # later calls do not match either
            try:
                text = _wrong_call(calls)
            except (Unjudged, *UNFOLLOWED) as reason:
                unjudged[str(reason)] += 1
                continue
            num_right += not text
            if text:
                blames.append(Blame("operator", f"{describe(calls[0])} gives {text}", _order_of(calls)))
    return Judged(tuple(blames), num_right, unjudged)


def _order_of(calls: Sequence[Event]) -> int:
    """Returns a number by which wrong calls are sorted, so that an inner wrong call comes before its outer call."""
    return max(int(call.end.options["order"]) for call in calls if call.end is not None)


def _wrong_call(calls: Sequence[Event]) -> str:
    """Describes the first error in an operator's results, or returns ''.  Raises Unjudged if that is unknown."""
    if not all(call.has_results for call in calls):
        raise Unjudged("it raised, or did not end")
    args, kwargs = whole_arguments([call.given for call in calls])
    rights = right_of_operation(calls[0].kind, args, dict(kwargs), len(calls))
    results = [[leaf for leaf in tree_leaves(call.got) if isinstance(leaf, torch.Tensor | Part)] for call in calls]
    if any(len(each) != len(rights) for each in results):
        raise Unjudged("it returns another number of results for unsharded operands")
    return next(filter(None, map(_wrong_result, zip(*results, strict=True), rights)), "")


def _wrong_result(parts: Sequence[Any], right: Right) -> str:
    first = parts[0]
    if not isinstance(first, Part):
        raise Unjudged("its results are not DTensors")
    shape = tuple(right.value.shape[: right.value.dim() - first.local.is_complex()])
    if first.shape != shape:
        return f"{in_words(first)} instead of {shape} unsharded"
    if any(isinstance(placement, Partial) for placement in first.layout.placements):
        return _wrong_reduction(parts, right)
    return next(
        filter(None, itertools.starmap(_wrong_part, ((rank, part, right) for rank, part in enumerate(parts)))), ""
    )


def _wrong_part(rank: int, part: Part, right: Right) -> str:
    def own(whole: torch.Tensor) -> torch.Tensor:
        return slice_local(whole, part.layout, part.mesh_shape, rank)

    slice_ = Right(own(right.value), None if right.allowed is None else own(right.allowed))
    local, who = as_pairs(part.local), f"{in_words(part)}: rank {part.ranks[rank]} holds"
    if local.shape != slice_.value.shape:
        return f"{who} a shard of shape {tuple(part.local.shape)}, but its layout gives it {tuple(slice_.value.shape)}"
    places = wrong_places(local, slice_)
    if not len(places):
        return ""
    place = tuple(places[0].tolist())
    starts = [start for start, _ in local_box(part.shape, part.layout, part.mesh_shape, rank)]
    global_place = tuple(index + start for index, start in zip(place, starts, strict=False))
    return (
        f"{who} {local[place].item()} at local {place}, global {global_place}, instead of {slice_.value[place].item()} "
        f"unsharded{allowed_at(slice_, place)}; {len(places)} of its {local.numel()} elements are wrong"
    )


def _wrong_reduction(parts: Sequence[Part], right: Right) -> str:
    """Describes the first wrong element of the sum, or other reduction, of the parts, or returns ''."""
    shares, op = shares_of(parts)
    if shares.is_complex() or (shares.is_floating_point() and right.allowed is None):
        raise Unjudged("the right operands of the reduction are unknown")
    wide = shares.double() if shares.is_floating_point() else shares
    whole = {"max": wide.amax, "min": wide.amin}.get(op, wide.sum)(0)
    whole = whole / len(shares) if op == "avg" else whole
    places = wrong_places(whole, right)
    if not len(places):
        return ""
    place = tuple(places[0].tolist())
    held = " and ".join(str(share[place].item()) for share in shares)
    return (
        f"{in_words(parts[0])}: the ranks hold {held} at global {place}, together {whole[place].item()}, instead of "
        f"{right.value[place].item()} unsharded{allowed_at(right, place)}; "
        f"{len(places)} of {whole.numel()} elements are wrong"
    )
