"""Predicates on chains, for the conditions `where` in known_failures.toml."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equivtest.families.operators.chains.case import WRITE

if TYPE_CHECKING:
    from equivtest.families.operators.chains.case import ChainCase


def writes_to_divided_rows(case: ChainCase) -> bool:
    """True if some step writes to some rows of an operand that is sharded along the dim of its rows."""
    rows = [(sources[0], dict(how)) for name, sources, how in case.steps if name == WRITE and "dim" in dict(how)]
    return any(
        source.startswith("x") and f"shard({how['dim']})" in case.placements[int(source[1:])] for source, how in rows
    )
