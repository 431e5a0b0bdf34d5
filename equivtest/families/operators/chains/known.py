"""Predicates on chains, for the conditions `where` in known_failures.toml."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equivtest.families.operators.chains.case import WRITE
from equivtest.layout import Shard

if TYPE_CHECKING:
    from equivtest.families.operators.chains.case import ChainCase


def writes_to_divided_rows(case: ChainCase) -> bool:
    """True if some step writes to some rows of an operand that is sharded along the dim of its rows."""
    rows = [(sources[0], dict(how)) for name, sources, how in case.steps if name == WRITE and "dim" in dict(how)]
    return any(
        source.startswith("x") and f"shard({how['dim']})" in case.placements[int(source[1:])] for source, how in rows
    )


def expands_a_shard(case: ChainCase) -> bool:
    """True if some step keeps the dims that it reduces, and a later cotangent is sharded along a dim of one element."""
    kept = [number for number, (_, _, how) in enumerate(case.steps) if dict(how).get("keepdim") is True]
    if not kept or not case.graded():
        return False
    later = [(case.results[number].shape, case.cotangent_layout(number)) for number in range(kept[0], len(case.steps))]
    return any(
        isinstance(each, Shard) and shape[each.dim] == 1 for shape, layout in later for each in layout.placements
    )
