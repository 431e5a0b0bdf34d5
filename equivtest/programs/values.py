"""Draws the values of your module."""

from __future__ import annotations

import math

import torch

from equivtest.cases.case import Shape, in_one_step
from equivtest.cases.values import draw
from equivtest.cases.values.integers import generator, odd_integers
from equivtest.cases.values.real import nearly_normal
from equivtest.programs.case import PARTS_OF_WHOLE, REAL_MODE, ModuleCase
from equivtest.programs.inputs import REAL, make_whole_numbers
from equivtest.tensors import DTYPES

VARIANTS = 3


@draw.register
def draw_module(case: ModuleCase, index: int) -> dict[str, torch.Tensor]:
    """Draws the inputs, parameters and cotangents of a case, in the mode and with the seed of `case.values[index]`.

    Modes:
        dense: Odd integers of random sign with magnitudes up to `largest`. Each element of the cotangent is +1 or -1.
        real: Nearly normal numbers.  A parameter with two or more dims is divided by the square root of the number of
            terms in its sums, as in the initialisation of layers. A parameter with one dim may be a scale, so its
            magnitudes are from 0.5 to 1.5.

    In mode dense, the cotangent and all parameters with one dim are multiplied by the world size, so that a division by
    the world size is exact. A parameter with one dim may be a bias. Ids, masks and similar inputs determine how many
    terms are added up. So in mode dense these inputs come from one of VARIANTS fixed draws, and the oracle proves for
    each of these draws that no sum is rounded.

    Source: Partial._partition_value in torch.distributed.tensor.placement_types (2.13.0): a replicated tensor is
    divided by the number of ranks before it is added to a partial tensor. Data parallelism divides gradients by the
    number of ranks.
    """
    (mode, seed), shapes, kinds = case.values[index], case.shapes(), case.kinds()
    tensors = {}
    for name in case.given_names():
        source = generator(mode, seed, name)
        if (kind := kinds.get(in_one_step(name), REAL)) != REAL:
            source = source if mode == REAL_MODE else generator(mode, seed % VARIANTS, name)
            rows_per_rank = 0 if case.batch == PARTS_OF_WHOLE else case.rows[0]
            num_ranks = case.num_parts if case.has_own_rows and case.num_parts > 1 else case.world_size
            tensors[name] = make_whole_numbers(kind, shapes[name], rows_per_rank, source, num_ranks)
            continue
        if mode == REAL_MODE:
            value = _draw_real(shapes[name], source, is_parameter=name in case.parameter_names())
        else:
            largest, factor = bounds_of(case, name)
            value = odd_integers(shapes[name], 1, largest, source) * factor
        tensors[name] = value.to(DTYPES[case.dtype])
    return tensors


def _draw_real(shape: Shape, source: torch.Generator, *, is_parameter: bool) -> torch.Tensor:
    value = nearly_normal(shape, source)
    if not is_parameter:
        return value
    if len(shape) >= 2:
        return value / math.sqrt(max(1, math.prod(shape[1:])))
    return value.sign() + value / 6  # nearly_normal is at most 3


def bounds_of(case: ModuleCase, name: str) -> tuple[int, int]:
    """Returns the largest integer drawn for a tensor, and the factor by which all its integers are multiplied."""
    is_cotangent = name.partition(".")[0] == "cotangent" and name not in case.parameter_names()
    divisible = is_cotangent or (len(case.shapes()[name]) == 1 and name in case.parameter_names())
    return 1 if is_cotangent else case.arguments.largest, case.world_size if divisible else 1
