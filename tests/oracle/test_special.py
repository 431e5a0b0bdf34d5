"""Special values: every kind is there, in every dtype, bit for bit."""

from __future__ import annotations

import struct

import pytest
import torch

from equivtest.cases.values import draw
from equivtest.cases.values.special import NUM_PATTERNS, NUM_SPECIAL, special_patterns
from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.oracle import expect
from equivtest.tensors import DTYPES, as_bits, same_bits

each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def special(dtype: str, number: int, *, numel: int = 1) -> torch.Tensor:
    case = FetchCase(world_size=2, dtype=dtype, parameters=((numel,),), values=(("special", number),))
    return draw(case, 0)["param.0"]


def all_special(dtype: str) -> torch.Tensor:
    return torch.cat([special(dtype, number) for number in range(NUM_SPECIAL)])


@each_dtype
def test_every_kind_of_special_value_is_drawn_for_some_seed(dtype: str) -> None:
    """Among them the extremes of torch.finfo, each with both signs."""
    values, info = all_special(dtype), torch.finfo(DTYPES[dtype])

    assert values[:2].tolist() == [0, 0] and values[:2].signbit().tolist() == [True, False]
    assert values[2:4].tolist() == [float("inf"), -float("inf")]
    assert bool(values[4:10].isnan().all()) and bool(values[10:].isfinite().all())
    finite = [info.smallest_normal * info.eps, info.smallest_normal * (1 - info.eps), info.tiny, info.max]
    assert values[10:18].double().tolist() == [sign * x for x in finite for sign in (1, -1)]
    assert values[18:].double().tolist() == [1, -1, 1 + info.eps, -1 - info.eps]


@each_dtype
def test_each_special_value_has_a_different_bit_pattern(dtype: str) -> None:
    assert len(set(as_bits(all_special(dtype)).tolist())) == len(set(special_patterns(dtype))) == NUM_SPECIAL


def test_two_nans_of_float32_are_signalling() -> None:
    """Their first stored bit is 0; as C writes them: 0x7f800001, 0xffbfffff."""
    patterns = special_patterns("float32")

    assert patterns[8:10] == (0x7F800001, 0xFFBFFFFF)
    assert struct.pack("<I", patterns[4]) == struct.pack("<f", float("nan"))


@each_dtype
def test_tensor_with_a_special_value_also_has_negative_zeros_and_odd_integers(dtype: str) -> None:
    values = special(dtype, 2, numel=300)
    zeros, infinite = values == 0, values == float("inf")

    assert bool(infinite[0]) and bool(values[zeros].signbit().all())
    assert min(int(zeros.sum()), int(infinite.sum()), int((~zeros & ~infinite).sum())) > 60
    assert bool((values[~zeros & ~infinite].double() % 2 == 1).all())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_bit_pattern_is_drawn(dtype: str) -> None:
    shapes = ((5,), (256, 256))
    case = FetchCase(
        world_size=2, dtype=dtype, parameters=shapes, requires_grad=(True, True), values=(("every-bit-pattern", 3),)
    )
    first, second = draw(case, 0).values()

    assert as_bits(first).tolist() == [3, 4, 5, 6, 7] and as_bits(second).reshape(-1)[0] == 8
    assert len(set(as_bits(second).reshape(-1).tolist())) == NUM_PATTERNS


@each_dtype
def test_oracle_keeps_every_bit_of_special_values(dtype: str) -> None:
    """Also for signalling NaN, which float64 would make quiet."""
    case = FetchCase(world_size=2, dtype=dtype, values=tuple(("special", number) for number in range(NUM_SPECIAL)))
    bits = [expect(case, index).tensors["param.0"].bits for index in range(NUM_SPECIAL)]

    assert all(tensor is not None for tensor in bits)
    assert same_bits(torch.cat([tensor for tensor in bits if tensor is not None]), all_special(dtype))
