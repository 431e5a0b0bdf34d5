"""Draws cases of one norm under sequence parallelism."""

from __future__ import annotations

from equivtest.cases.picks import (
    LARGE_DIMS,
    NUM_SEQUENCE_DIMS,
    Cases,
    Draw,
    free,
    modulo,
    pick,
    pick_gradients,
    pick_run,
    pick_shape,
)
from equivtest.families.norm.case import PARAMETERS, NormCase
from equivtest.property import Space

NORM_MODES = (("real",), *[("real", "real", "real")] * 9)
NORM_FEATURES = (*(*range(4, 10), 3, 12, *range(15, 18), *range(31, 34)) * 4, 2, 1)
"""Numbers of features. One and two are rare, because a norm of them leaves little but signs.

layer_norm has at least two, because it leaves nothing of one feature.
"""
MAX_TOKENS_IN_16_BITS = 7
"""Largest number of tokens in 16 bits.

Gradients of parameters are summed in 16 bits, so with more tokens the bounds are too wide for a conclusion.
"""
EPSILONS = (1e-5, 1e-5, 1e-6, 0.01)
EPSILONS_OF_FEW = (1.0, 0.5, 0.25)
"""Values of eps for up to three features.

With a small eps, x would be scaled by its own size alone, and its gradient would cancel.
"""


@Cases
def norm_cases(draw: Draw, space: Space, *, norm: str) -> NormCase:
    """Shrinks to one draw of values for one token, with few features and without parameters."""
    world_size = pick(draw, "world_size", space.world_sizes)
    dtype = pick(draw, "dtype", space.dtypes)
    leading = pick_shape(draw, "leading", world_size, NUM_SEQUENCE_DIMS)
    sequence_dim = pick(draw, "sequence_dim", LARGE_DIMS, modulo(len(leading))) % len(leading)
    if dtype in ("bfloat16", "float16"):
        leading = tuple(
            min(size, MAX_TOKENS_IN_16_BITS) if dim == sequence_dim else 1 for dim, size in enumerate(leading)
        )
    num_parameters = pick(draw, "num_parameters", (0, 1, 2, 2, 2))
    parameters = PARAMETERS[: min(num_parameters, 2 if norm == "layer_norm" else 1)]
    x_is_dtensor = pick(draw, "x_is_dtensor", (False, True))
    features = max(pick(draw, "features", NORM_FEATURES, free), 2 if norm == "layer_norm" else 1)
    eps, eps_of_few = pick(draw, "eps", EPSILONS), pick(draw, "eps of few", EPSILONS_OF_FEW, free)
    return NormCase(
        norm=norm,
        world_size=world_size,
        dtype=dtype,
        leading=leading,
        sequence_dim=sequence_dim,
        features=features,
        parameters=parameters,
        eps=eps_of_few if features <= 3 else eps,
        x_is_dtensor=x_is_dtensor or leading[sequence_dim] % world_size != 0,
        use_local_output=pick(draw, "use_local_output", (False, True)),
        **pick_gradients(draw, ("x", *parameters)),
        **pick_run(draw, world_size, NORM_MODES),
    )
