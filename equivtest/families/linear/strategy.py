"""Cases of one linear layer, within the contract and outside of it."""

from __future__ import annotations

from equivtest.cases.picks import (
    NUM_LEADING_DIMS,
    REFUSED_MODES,
    Cases,
    Draw,
    edge_sizes,
    pick,
    pick_gradients,
    pick_run,
    pick_shape,
    pick_values,
    pick_x_is_dtensor,
    residues,
)
from equivtest.families.linear.case import LINEAR_MODES as EXACT_MODES
from equivtest.families.linear.case import REAL_MODES, REFUSALS, LinearCase, RefusedLinearCase
from equivtest.property import Space

LINEAR_MODES = (
    *((mode,) for mode in EXACT_MODES + REAL_MODES),
    *[(*EXACT_MODES, *REAL_MODES * 2)] * 40,
)
"""Half of a full case's draws are real, so that of a whole run, with its fetches, well over three in ten are."""


@Cases
def linear_cases(draw: Draw, space: Space, *, style: str) -> LinearCase:
    """Cases of one linear layer; `style` is 'colwise' or 'rowwise'.

    Shrinks to one draw of dense values, one token, one feature, no bias, everything replicated.
    """
    world_size = pick(draw, "world_size", space.world_sizes)
    dtype = pick(draw, "dtype", space.dtypes)
    leading = pick_shape(draw, "leading", world_size, NUM_LEADING_DIMS)
    in_features = pick(draw, "in_features", edge_sizes(world_size), residues(world_size))
    out_features = pick(draw, "out_features", edge_sizes(world_size), residues(world_size))
    bias = pick(draw, "bias", (False, True, True, True))
    shards = tuple(f"shard({dim})" for dim in range(len(leading) + 1))
    whole = ("replicate",) * 2 + (*shards, shards[-1])
    by_features = ("replicate", *shards, shards[-1], shards[-1])
    input_layout = pick(draw, "input_layout", whole if style == "colwise" else by_features)
    output_layout = pick(draw, "output_layout", by_features if style == "colwise" else whole)
    return LinearCase(
        style=style,
        world_size=world_size,
        dtype=dtype,
        leading=leading,
        in_features=in_features,
        out_features=out_features,
        bias=bias,
        input_layout=input_layout,
        output_layout=output_layout,
        x_is_dtensor=pick_x_is_dtensor(draw, (*leading, in_features), input_layout, world_size),
        use_local_output=pick(draw, "use_local_output", (True, False)),
        **pick_gradients(draw, ("x", "weight", "bias") if bias else ("x", "weight")),
        **pick_run(draw, world_size, LINEAR_MODES),
    )


@Cases
def refused_linear_cases(draw: Draw, space: Space, *, style: str) -> RefusedLinearCase:
    """Cases whose x does not fit the weight, which every rank can tell from what it holds."""
    world_size = pick(draw, "world_size", space.world_sizes)
    dtype = pick(draw, "dtype", space.dtypes)
    misfit = pick(draw, "misfit", REFUSALS)
    leading = (pick(draw, "leading", edge_sizes(world_size), residues(world_size)),)
    in_features = pick(draw, "in_features", edge_sizes(world_size), residues(world_size))
    # Where x has a feature too many, its shards along them would fit the weight's on some ranks,
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
