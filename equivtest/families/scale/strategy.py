"""Scaled tensors of one to four dims, divided on any of them."""

from __future__ import annotations

from equivtest.cases.picks import LARGE_DIMS, Cases, Draw, modulo, pick, pick_gradients, pick_run, pick_shape
from equivtest.families.scale.case import FACTORS, ScaleCase
from equivtest.property import Space

SCALE_MODES = (("dense",), *[("dense", "real", "dense")] * 9)
NUM_DIMS = (1, 2, 2, 3, 4)


@Cases
def scale_cases(draw: Draw, space: Space) -> ScaleCase:
    """Shrinks to one draw of values, one element, one rank."""
    world_size = pick(draw, "world_size", space.world_sizes)
    dtype = pick(draw, "dtype", space.dtypes)
    shape = pick_shape(draw, "shape", world_size, NUM_DIMS)
    return ScaleCase(
        world_size=world_size,
        dtype=dtype,
        shape=shape,
        dim=pick(draw, "dim", LARGE_DIMS, modulo(len(shape))) % len(shape),
        factor=pick(draw, "factor", FACTORS),
        **pick_gradients(draw, ("x",)),
        **pick_run(draw, world_size, SCALE_MODES, records=()),
    )
