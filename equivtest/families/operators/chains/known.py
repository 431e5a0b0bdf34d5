"""What known failures ask of cases of this family, by name, in `where`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equivtest.families.operators.chains.case import MODULE, WRITE

if TYPE_CHECKING:
    from equivtest.families.operators.chains.case import ChainCase


def writes_to_divided_rows(case: ChainCase) -> bool:
    """Whether one row of an operand is written to along a dim that is divided."""
    rows = [(sources[0], dict(how)) for name, sources, how in case.steps if name == WRITE and "index" in dict(how)]
    return any(
        source.startswith("x") and f"shard({how['dim']})" in case.placements[int(source[1:])] for source, how in rows
    )


def scatters_no_sum(case: ChainCase) -> bool:
    """Whether an operand that is partial by another reduction than the sum is divided on its way into a module."""
    divided = [sources[0] for name, sources, how in case.steps if name == MODULE and "shard" in str(dict(how))]
    return case.world_size > 1 and any(
        source.startswith("x") and case.reduction(int(source[1:]))[0] not in ("", "sum") for source in divided
    )


def stacks_what_is_not_divided(case: ChainCase) -> bool:
    """Whether operands are stacked of which none is divided, and a gradient goes back to them."""
    stacked = [source for name, sources, _ in case.steps if name == "stack" for source in sources]
    numbers = [int(source[1:]) for source in stacked if source.startswith("x")]
    is_divided = any("shard" in text for number in numbers for text in case.placements[number])
    return bool(numbers) and not is_divided and any(number in case.requires_grad for number in numbers)
