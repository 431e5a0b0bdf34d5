"""Draws cases of one linear layer, within the contract and outside of it."""

from __future__ import annotations

from equivtest.cases.picks import (
    REFUSED_MODES,
    Cases,
    Draw,
    cases_of,
    edge_sizes,
    pick,
    pick_values,
    pick_x_is_dtensor,
    residues,
)
from equivtest.families.linear.case import REFUSALS, LinearCase, RefusedLinearCase
from equivtest.property import Space

linear_cases = cases_of(LinearCase, dangerous=("in_features", "input_layout", "bias"))


@Cases
def refused_linear_cases(draw: Draw, space: Space, *, style: str) -> RefusedLinearCase:
    """Draws cases whose x does not fit the weight. Every rank sees the misfit from its own tensors."""
    world_size = pick(draw, "world_size", space.world_sizes)
    dtype = pick(draw, "dtype", space.dtypes)
    misfit = pick(draw, "misfit", REFUSALS)
    leading = (pick(draw, "leading", edge_sizes(world_size), residues(world_size)),)
    in_features = pick(draw, "in_features", edge_sizes(world_size), residues(world_size))
    # If x has one feature too many, its shards of the features would fit the weight's on some ranks,
    # and a DTensor would state the shape that x should have.
    any_layout = misfit == "dtype"
    input_layout = pick(draw, "input_layout", ("replicate", "shard(1)" if style == "rowwise" else "replicate"))
    input_layout = input_layout if any_layout else "replicate"
    x_is_dtensor = pick_x_is_dtensor(draw, (*leading, in_features), input_layout, world_size)
    return RefusedLinearCase(
        misfit=misfit,
        style=style,
        world_size=world_size,
        dtype=dtype,
        leading=leading,
        in_features=in_features,
        out_features=pick(draw, "out_features", edge_sizes(world_size), residues(world_size)),
        bias=pick(draw, "bias", (False, True)),
        input_layout=input_layout,
        output_layout=pick(draw, "output_layout", ("replicate", "shard(1)")),
        x_is_dtensor=x_is_dtensor and any_layout,
        values=pick_values(draw, REFUSED_MODES),
    )
