"""Draws cases of one module whose input, output or both are redistributed."""

from __future__ import annotations

from equivtest.cases.picks import Cases, Draw, edge_sizes, pick, pick_gradients, pick_run, residues
from equivtest.families.redistribute.prepared.case import STYLES, PreparedCase
from equivtest.layout import Shard, parse_placement
from equivtest.property import Space

PREPARED_MODES = (("dense",), ("special",), *[("special", "dense", "index")] * 12)
NUM_DIMS = (1, 2, 2, 2, 3)
MAX_SIZES = {1: 33, 2: 17, 3: 9}


@Cases
def prepared_cases(draw: Draw, space: Space) -> PreparedCase:
    """Shrinks to one dense element that is replicated and stays replicated."""
    world_size = pick(draw, "world_size", space.world_sizes)
    num_dims = pick(draw, "dims", NUM_DIMS)
    sizes = [size for size in edge_sizes(world_size) if size <= max(MAX_SIZES[num_dims], world_size + 1)]
    shape = tuple([pick(draw, f"dim {dim}", sizes, residues(world_size)) for dim in range(max(NUM_DIMS))][:num_dims])
    shards = tuple(f"shard({dim})" for dim in range(num_dims))
    source = pick(draw, "source", ("replicate", "partial(sum)", *shards * 4))
    target = pick(draw, "target", ("replicate", "replicate", *shards))
    style = pick(draw, "style", STYLES)
    middle = pick(draw, "middle", ("replicate", *shards * 2)) if style == "input_output" else "replicate"
    use_local_input, as_kwarg = pick(draw, "use_local_input", (False, True)), pick(draw, "as_kwarg", (False, True))
    return PreparedCase(
        world_size=world_size,
        dtype=pick(draw, "dtype", space.dtypes),
        shape=shape,
        source=(source,),
        target=(target,),
        style=style,
        middle=middle,
        x_is_dtensor=pick(draw, "x_is_dtensor", (False, True)) or not _is_even(shape, source, world_size),
        use_local_input=use_local_input and style == "input_output" and _is_even(shape, middle, world_size),
        use_local_output=pick(draw, "use_local_output", (False, True)),
        as_kwarg=as_kwarg and style != "output",
        **pick_gradients(draw, ("x",)),
        **pick_run(draw, world_size, PREPARED_MODES),
    )


def _is_even(shape: tuple[int, ...], text: str, world_size: int) -> bool:
    placement = parse_placement(text)
    return not isinstance(placement, Shard) or shape[placement.dim] % world_size == 0
