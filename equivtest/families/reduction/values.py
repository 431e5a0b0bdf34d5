"""Values of a reduction."""

from __future__ import annotations

import torch

from equivtest.cases.values import draw
from equivtest.cases.values.integers import generator, hash_of, odd_floor, odd_integers, signs
from equivtest.cases.values.real import nearly_normal, without_subnormals
from equivtest.families.reduction.case import ReductionCase
from equivtest.tensors import DTYPES, SIGNIFICAND_BITS

_LARGEST = (1, 15, 63)  # odd integers of dense values: of the first, half are the largest of them
_SCALES = {"x": (1.0, 0.25, 3.0), "cotangent": (1.0, 0.1, 3.0)}
_OFFSETS = (1.0, 2.0, 0.5)  # of the terms of a sum or mean, in scales: they rather add up than cancel


@draw.register
def draw_reduction(case: ReductionCase, index: int) -> dict[str, torch.Tensor]:
    """Draws global x, all operands of it if it is partial, and the cotangent.

    Terms of a sum or mean lie on one side of zero more often than on the other if they are rounded;
    operands of a partial one never round.  A result far smaller than its terms would conclude nothing.

    Modes:
            dense: Odd integers times a power of two, so small that every sum of them is exact if
                there are no more terms than the dtype has integers; one time in three of so few
                magnitudes that the largest occurs several times.  The terms of a mean, unless it is partial,
                have one sign.
        real: Nearly normal numbers of several scales.
    """
    mode, seed = case.values[index]
    side = int(signs((), generator(mode, seed, "side")))
    given = {}
    for name, scales in _SCALES.items():
        shape, source = case.shapes()[name], generator(mode, seed, name)
        adds = name == "x" and case.op in ("sum", "mean") and not case.is_partial
        if mode == "dense":
            value = _draw_dense(case, name, seed % 3, source, side if adds and case.op == "mean" else 0)
        else:
            pick = hash_of(mode, seed, f"{name} scale")
            offset = side * _OFFSETS[pick // len(scales) % len(_OFFSETS)] if adds else 0.0
            value = without_subnormals((nearly_normal(shape, source) + offset) * scales[pick % len(scales)])
        given[name] = value.to(DTYPES[case.dtype])
    return given


def _draw_dense(case: ReductionCase, name: str, which: int, source: torch.Generator, side: int) -> torch.Tensor:
    """Draws odd integers of either sign; of the sign of `side` and up to twice as large if that is not 0."""
    num_added = case.num_terms * (case.world_size if case.is_partial else 1) if name == "x" else 1
    most = 2 ** SIGNIFICAND_BITS[case.dtype] // num_added
    largest = odd_floor(max(1, min(_LARGEST[which], most if side == 0 else (most - 1) // 2)))
    value = odd_integers(case.shapes()[name], 1, largest, source) + side * (largest + 1)
    return value / (4 if largest < 63 else 32)
