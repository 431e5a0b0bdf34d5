"""Assembles whole tensors from the ranks' parts of DTensors, by their placements and without a collective."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from equivtest.layout import Partial, Replicate, coordinate_of
from equivtest.oracle.single_collective import Unjudged
from equivtest.oracle.single_operation import Shares
from equivtest.ranks.observe.notes import Part
from equivtest.tensors import assemble, same_bits


def whole_arguments(given: Sequence[Any]) -> Any:
    """Returns an operator's arguments with whole tensors in place of the ranks' `Part`s of DTensors."""
    flat = [tree_flatten(each) for each in given]
    if any(how != flat[0][1] for _, how in flat):
        raise Unjudged("the ranks pass different arguments")
    leaves = zip(*(leaves for leaves, _ in flat), strict=True)
    return tree_unflatten([_whole(each) for each in leaves], flat[0][1])


def _whole(held: Sequence[Any]) -> Any:
    first = held[0]
    if isinstance(first, Part):
        shares, op = shares_of(held)
        return Shares(shares, op) if op else shares[0]
    if not all(same_bits(first, each) if isinstance(first, torch.Tensor) else first == each for each in held):
        raise Unjudged("the ranks pass different arguments")
    return first


def shares_of(parts: Sequence[Part]) -> tuple[torch.Tensor, str]:
    """Returns the whole operands of a partial DTensor in one stacked tensor, and the name of their reduction.

    A DTensor without `Partial` has one operand, its whole tensor, and the name is ''.  DTensor calls the reduction of
    bools a sum, but does not add them (torch 2.13.0).  So such tensors are not judged.

    Raises:
        Unjudged: the parts do not make up whole tensors, or the replicas of a part differ.
    """
    first = parts[0]
    ops = {placement.op for placement in first.layout.placements if isinstance(placement, Partial)}
    is_sum_of_bools = first.local.dtype is torch.bool and not ops <= {"max", "min"}
    if len(ops) > 1 or is_sum_of_bools or any(_place_of(part) != _place_of(first) for part in parts):
        raise Unjudged("no layout says how the parts of an operand make up a whole")
    unreduced = [Replicate() if isinstance(each, Partial) else each for each in first.layout.placements]
    layout = replace(first.layout, placements=tuple(unreduced))
    wholes = []
    for ranks in _ranks_of_shares(first):
        try:
            whole = assemble(
                {place: parts[rank].local for place, rank in enumerate(ranks)}, first.shape, layout, first.mesh_shape
            )
        except ValueError as error:  # a part of another shape than its layout gives it
            raise Unjudged(str(error)) from error
        if whole.disagreeing:
            raise Unjudged("the replicas of an operand differ")
        wholes.append(whole.tensor)
    return torch.stack(wholes), next(iter(ops), "")


def _place_of(part: Part) -> tuple[Any, ...]:
    return part.layout, part.shape, part.mesh_shape, part.ranks, part.local.dtype


def _ranks_of_shares(part: Part) -> Iterator[list[int]]:
    """Yields, for each operand of a partial DTensor, the ranks with the operand's parts, by position in the mesh."""
    size = part.mesh_shape
    partial = [isinstance(placement, Partial) for placement in part.layout.placements]
    places = [coordinate_of(rank, size) for rank in range(len(part.ranks))]
    for chosen in itertools.product(*(range(num if is_one else 1) for num, is_one in zip(size, partial, strict=True))):
        yield [
            places.index(tuple(c if is_one else own for own, c, is_one in zip(place, chosen, partial, strict=True)))
            for place in places
        ]
