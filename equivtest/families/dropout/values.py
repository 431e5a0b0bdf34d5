"""Draws the values of a dropout."""

from __future__ import annotations

import torch

from equivtest.cases.values import draw
from equivtest.cases.values.integers import generator, hash_of, odd_integers
from equivtest.cases.values.real import nearly_normal, without_subnormals
from equivtest.cases.values.special import draw_special
from equivtest.families.dropout.case import DropoutCase
from equivtest.tensors import DTYPES

_SCALES = {"x": (1.0, 0.25, 3.0), "cotangent": (1.0, 0.1, 3.0)}


@draw.register
def draw_dropout(case: DropoutCase, index: int) -> dict[str, torch.Tensor]:
    """Draws the global x and cotangent, and an int64 tensor with the seed of each rank's generator.

    In the modes 'dense' and 'real' no value is zero, so that dropped elements show.

    Modes:
        dense: Odd integers of random sign up to 63, divided by 4.
        real: Nearly normal numbers of several scales.
        special: A third of the elements have one special value, a third are -0.0, and the others are odd integers. See
            `equivtest.cases.values.special`.
    """
    mode, seed = case.values[index]
    given = {}
    for name, scales in _SCALES.items():
        source = generator(mode, seed, name)
        if mode == "special":
            given[name] = draw_special(case.dtype, seed, case.shape, source)
        elif mode == "dense":
            given[name] = (odd_integers(case.shape, 1, 63, source) / 4).to(DTYPES[case.dtype])
        else:
            scale = scales[hash_of(mode, seed, f"{name} scale") % len(scales)]
            given[name] = without_subnormals(nearly_normal(case.shape, source) * scale).to(DTYPES[case.dtype])
    ranks = range(case.world_size) if case.is_sharded and case.seeding == "by_shard" else [0] * case.world_size
    given["seeds"] = torch.tensor([hash_of(mode, seed, f"rank {rank}") for rank in ranks], device="cpu")
    return given
