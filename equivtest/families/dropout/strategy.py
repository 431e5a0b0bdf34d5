"""Draws cases of one dropout."""

from __future__ import annotations

from equivtest.cases.picks import (
    LARGE_DIMS,
    NUM_SEQUENCE_DIMS,
    Cases,
    Draw,
    is_several,
    modulo,
    pick,
    pick_gradients,
    pick_run,
    pick_shape,
)
from equivtest.families.dropout.case import DropoutCase
from equivtest.layout import Layout, parse_placement, shard_kind
from equivtest.property import Space

RANDOM_MODES = (("dense",), *[("dense", "real", "dense", "real")] * 9)
IDENTITY_MODES = (("dense",), *[("dense", "special", "real", "special")] * 9)
PROBABILITIES = (0.5, 0.5, 0.25, 0.75, 0.5, 0.1, 0.3, 0.9, 0.0, 1.0)
FEATURES = (1, 56, 56, *(64, 96, 128, 192) * 4)
"""Numbers of features, most of them large: two random masks of 56 elements are equal once in 2**56."""


def kind_of_probability(p: float) -> float:
    """Returns the class of a probability. A covering array has each class, not each probability."""
    return p if p in (0.0, 1.0) else 0.5


@Cases
def dropout_cases(draw: Draw, space: Space) -> DropoutCase:
    """Shrinks to one draw of values, one replicated element, dropped with probability 1/2."""
    world_size = pick(draw, "world_size", space.world_sizes)
    leading = pick_shape(draw, "leading", world_size, NUM_SEQUENCE_DIMS)
    dim = pick(draw, "dim", LARGE_DIMS, modulo(len(leading))) % len(leading)
    style = pick(draw, "style", ("dtensor", "sequence_parallel", "sequence_parallel"))
    divided = pick(draw, "divided", (False, True, True)) or style == "sequence_parallel"
    layout = f"shard({dim})" if divided else "replicate"
    plain_will_do = shard_kind(leading, Layout((parse_placement(layout),)), (world_size,)) == "even"
    p, training = (
        pick(draw, "p", PROBABILITIES, kind_of_probability),
        pick(draw, "training", (True, True, True, True, False)),
    )
    x_is_dtensor = pick(draw, "x_is_dtensor", (True, False))
    recomputed, gradients = pick(draw, "recomputed", ("", "again", "reentrant")), pick_gradients(draw, ("x",))
    return DropoutCase(
        world_size=world_size,
        dtype=pick(draw, "dtype", space.dtypes),
        style=style,
        shape=_with_features(leading, pick(draw, "features", FEATURES, is_several)),
        layout=layout,
        p=p,
        training=training,
        seeding=pick(draw, "seeding", ("by_shard", "by_shard", "same")),
        x_is_dtensor=x_is_dtensor or style == "dtensor" or not plain_will_do,
        use_local_output=pick(draw, "use_local_output", (False, True)) and style == "sequence_parallel",
        recomputed=bool(recomputed),
        reentrant=recomputed == "reentrant" and bool(gradients["requires_grad"]),
        **gradients,
        **pick_run(draw, world_size, RANDOM_MODES if training and p > 0 else IDENTITY_MODES),
    )


def _with_features(leading: tuple[int, ...], features: int) -> tuple[int, ...]:
    return leading if features == 1 else (*leading, features)
