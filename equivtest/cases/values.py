"""The values that a case's seeds stand for: the same tensors on every rank and in the parent.

A package with a case class of its own registers how its values are drawn:

    @draw.register
    def draw_mine(case: MyCase, index: int) -> dict[str, torch.Tensor]: ...
"""

from __future__ import annotations

import functools
import math

import torch

from equivtest.cases.base import Case
from equivtest.cases.collective_calls import CollectivesCase
from equivtest.cases.collective_values import draw_collectives
from equivtest.cases.cross_entropy import CrossEntropyCase, RefusedCrossEntropyCase
from equivtest.cases.cross_entropy_values import draw_cross_entropy, draw_refused_cross_entropy
from equivtest.cases.dropout import DropoutCase, draw_dropout
from equivtest.cases.embedding import EmbeddingCase, RefusedEmbeddingCase
from equivtest.cases.embedding_values import draw_embedding, draw_refused_embedding
from equivtest.cases.exact_linear import draw_linear
from equivtest.cases.exact_mlp import draw_mlp
from equivtest.cases.fetch import FetchCase, RefusedFetchCase
from equivtest.cases.gathered_cross_entropy import RefusedGatheredCrossEntropyCase, draw_refused_gathered
from equivtest.cases.integers import SIGNIFICAND_BITS, generator, odd_integers, signs
from equivtest.cases.lifecycle import LifecycleCase
from equivtest.cases.lifecycle_values import draw_lifecycle
from equivtest.cases.linear import REAL_MODES, LinearCase, RefusedLinearCase
from equivtest.cases.module import ModuleCase, draw_module
from equivtest.cases.norm import NormCase, draw_norm
from equivtest.cases.perceptron import PerceptronCase
from equivtest.cases.real_linear import draw_real_linear
from equivtest.cases.real_mlp import draw_real_mlp
from equivtest.cases.redistribute import RedistributeCase
from equivtest.cases.redistribute_values import draw_redistribute
from equivtest.cases.reduction import ReductionCase, draw_reduction
from equivtest.cases.special import INTEGERS, draw_patterns, draw_special
from equivtest.errors import Misuse
from equivtest.tensors import DTYPES


@functools.singledispatch
def draw(case: Case, index: int) -> dict[str, torch.Tensor]:
    """The global tensors that the harness gives for one draw of a case.

    Depends on the draw's (mode, seed), on the name of each tensor and on the fields of the case
    that fix shapes, dtype and limits; never on torch's global generator.

    Args:
        index: Which of case.values.

    Returns:
        name -> global tensor, contiguous, on the CPU, of the case's dtype (a refused case says
        where it differs), for every one of case.given_names().

    Raises:
        Misuse: nobody registered how to draw values of this class.
        IndexError: the case has no such draw.
    """
    raise Misuse(
        f"no values are known for {type(case).__name__}: decorate the function that draws them with "
        "equivtest.cases.values.draw.register, in the module that defines the class"
    )


@draw.register
def draw_linear_case(case: LinearCase, index: int) -> dict[str, torch.Tensor]:
    """Exact or real values of one linear layer, as the draw's mode says."""
    return (draw_real_linear if case.values[index][0] in REAL_MODES else draw_linear)(case, index)


@draw.register
def draw_mlp_case(case: PerceptronCase, index: int) -> dict[str, torch.Tensor]:
    """Exact or real values of a perceptron of two layers, as the draw's mode says."""
    return (draw_real_mlp if case.values[index][0] == "real" else draw_mlp)(case, index)


draw.register(CollectivesCase, draw_collectives)
draw.register(CrossEntropyCase, draw_cross_entropy)
draw.register(RefusedCrossEntropyCase, draw_refused_cross_entropy)
draw.register(RefusedGatheredCrossEntropyCase, draw_refused_gathered)
draw.register(DropoutCase, draw_dropout)
draw.register(EmbeddingCase, draw_embedding)
draw.register(ModuleCase, draw_module)
draw.register(LifecycleCase, draw_lifecycle)
draw.register(NormCase, draw_norm)
draw.register(ReductionCase, draw_reduction)
draw.register(RedistributeCase, draw_redistribute)
draw.register(RefusedEmbeddingCase, draw_refused_embedding)


@draw.register
def draw_refused_linear(case: RefusedLinearCase, index: int) -> dict[str, torch.Tensor]:
    """As of a LinearCase, but x is (*leading, in_features + 1), or of another dtype."""
    given = draw_linear_case(case, index)
    if case.misfit == "in_features":
        given["x"] = torch.cat([given["x"], given["x"][..., :1]], dim=-1)
    else:
        given["x"] = given["x"].to(_other_dtype(case.dtype))
    return given


@draw.register
def draw_fetch(case: FetchCase, index: int) -> dict[str, torch.Tensor]:
    """Global parameters `param.i`.

    Modes, the first three without zeros:
        dense: Odd integers of random sign, below 2**p in magnitude; p significand bits.
        index: 1, 2, 3, ... through all parameters, again from 1 after 2**p - 1: a wrong value
            tells where it came from.
        wide: All significand bits and all normal exponents of the dtype.
        special: One of signed zeros, infinities, NaN, subnormals and extremes, the one that has the
            number `seed`, between -0.0 and odd integers; see `equivtest.cases.special`.
        every-bit-pattern: All patterns of 16 bits in turn, through all parameters, from `seed` on.
    """
    mode, seed = case.values[index]
    largest = 2 ** SIGNIFICAND_BITS[case.dtype] - 1
    dtype = DTYPES[case.dtype]
    given = {}
    num_before = 0
    for name, shape in zip(case.given_names(), case.parameters, strict=True):
        source = generator(mode, seed, name)
        if mode == "index":
            running = torch.arange(num_before, num_before + math.prod(shape), device="cpu")
            given[name] = (running % largest + 1).to(dtype).view(shape)
        elif mode == "dense":
            given[name] = odd_integers(shape, 1, largest, source).to(dtype)
        elif mode == "special":
            given[name] = draw_special(case.dtype, seed, shape, source)
        elif mode == "every-bit-pattern":
            given[name] = draw_patterns(case.dtype, seed + num_before, shape)
        else:
            given[name] = _draw_all_exponents(shape, dtype, SIGNIFICAND_BITS[case.dtype], source)
        num_before += math.prod(shape)
    return given


@draw.register
def draw_refused_fetch(case: RefusedFetchCase, index: int) -> dict[str, torch.Tensor]:
    """As of a FetchCase, but with misfit 'dtype' the last parameter has another dtype."""
    given = draw_fetch(case, index)
    if case.misfit == "dtype":
        last = case.given_names()[-1]
        given[last] = given[last].to(_other_dtype(case.dtype))
    return given


def _draw_all_exponents(
    shape: tuple[int, ...], dtype: torch.dtype, significand_bits: int, source: torch.Generator
) -> torch.Tensor:
    """Normal numbers of random sign and exponent whose last significand bit is set; global.

    Source: IEEE 754-2019 section 3.4: sign, biased exponent (0 and all ones are not normal
    numbers), then significand_bits - 1 stored bits.
    """
    stored_bits = significand_bits - 1
    exponent_bits = dtype.itemsize * 8 - significand_bits
    exponents = torch.randint(1, 2**exponent_bits - 1, shape, generator=source, device="cpu")
    fractions = torch.randint(0, 2**stored_bits, shape, generator=source, device="cpu") | 1
    bits = (exponents << stored_bits) | fractions
    return bits.to(INTEGERS[dtype.itemsize]).view(dtype) * signs(shape, source).to(dtype)


def _other_dtype(name: str) -> torch.dtype:
    return torch.float32 if name == "float64" else torch.float64
