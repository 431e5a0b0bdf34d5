"""What known failures ask of cases of this family, by name, in `where`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equivtest.families.operators.chains.case import WRITE

if TYPE_CHECKING:
    from equivtest.families.operators.chains.case import ChainCase


def writes_to_divided_rows(case: ChainCase) -> bool:
    """Whether one row of an operand is written to along a dim that is divided."""
    rows = [(sources[0], dict(how)) for name, sources, how in case.steps if name == WRITE and "index" in dict(how)]
    return any(
        source.startswith("x") and f"shard({how['dim']})" in case.placements[int(source[1:])] for source, how in rows
    )


def scatters_no_sum(case: ChainCase) -> bool:
    """Whether an operand is partial by another reduction than the sum, and it or what it meets is divided."""
    reductions = {case.reduction(number)[0] for number in range(len(case.operands))}
    return case.world_size > 1 and bool(reductions - {"", "sum"}) and "shard" in str((case.placements, case.steps))


def stacks_for_gradient(case: ChainCase) -> bool:
    """Whether operands are stacked, and a gradient goes back to one."""
    stacked = {source for name, sources, _ in case.steps if name == "stack" for source in sources}
    return any(f"x{number}" in stacked for number in case.requires_grad)


def stacks_from_the_end(case: ChainCase) -> bool:
    """Whether something is stacked along a dim counted from the end, and something is divided."""
    dims = [dict(how).get("dim", 0) for name, _, how in case.steps if name == "stack"]
    return any(isinstance(dim, int) and dim < 0 for dim in dims) and "shard" in str((case.placements, case.steps))
