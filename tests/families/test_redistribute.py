"""Redistribution: the case and its layouts, its values, and the oracle beside operands reduced by hand."""

from __future__ import annotations

import functools
import math
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch

from equivtest.base import limits
from equivtest.cases.operands import stacked
from equivtest.cases.values import draw
from equivtest.families.redistribute.case import ROADS, RedistributeCase
from equivtest.families.redistribute.case_refused import RefusedRedistributeCase
from equivtest.families.redistribute.known import (
    gathers_nested_shards_flat,
    gradient_gathers_nested_shards_flat,
    mixes_reductions,
)
from equivtest.families.redistribute.oracle import reduce_operands
from equivtest.families.redistribute.strategy import moves_of
from equivtest.layout import Layout, Partial, Replicate, Shard, local_shape
from equivtest.oracle import expect
from equivtest.oracle.collectives import expected_collectives
from equivtest.oracle.exact import InexactData
from equivtest.property import Space
from equivtest.ranks.pool import Pool
from equivtest.tensors import DTYPES
from equivtest.verdicts.claims import equals_unsharded
from equivtest.verdicts.judging import judge
from tests.drawing import STRATEGIES, drawn
from tests.families.refusing import refuses
from tests.unsharded import errors_beside

each_dtype = pytest.mark.parametrize("dtype", DTYPES)
EXACT = (("dense", 0), ("index", 1), ("special", 2))


def case_of(**fields: Any) -> RedistributeCase:
    """Three ranks share the 5 columns of (4, 5), as 2, 2 and 1."""
    return RedistributeCase(**{"world_size": 3, "shape": (4, 5), "source": ("shard(1)",), **fields})


def on_two_axes(**fields: Any) -> RedistributeCase:
    """2 x 2 ranks; operands on the first axis, rows divided on the second."""
    base = {"world_size": 4, "mesh": (2, 2), "shape": (3, 4), "source": ("partial(sum)", "shard(0)")}
    return RedistributeCase(**{**base, "target": ("replicate", "replicate"), **fields})


@cache
def drawn_cases(world_size: int) -> tuple[RedistributeCase, ...]:
    return tuple(drawn(STRATEGIES["redistribute"](Space((world_size,), limits.DTYPES)), 150))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------
# The case


test_error_for_an_invalid_redistribution_names_the_invalid_field = refuses(
    case_of,
    ({"mesh": (1, 1, 3)}, r"mesh must have at most 2 dims of at least 1, got \(1, 1, 3\)"),
    ({"mesh": (2, 2)}, r"mesh must have 3 ranks, got \(2, 2\)"),
    ({"flattened": True}, r"flattened is for two axes, got mesh \(\)"),
    ({"shape": (1, 1, 1, 1, 1)}, r"shape must have at most 4 dims of at least 0, got \(1, 1, 1, 1, 1\)"),
    ({"requires_grad": ("weight",)}, r"requires_grad must be one of \(\), \('x',\), got \('weight',\)"),
    ({"source": ("replicate", "replicate")}, r"source must have one placement per mesh axis: 1, got"),
    ({"target": ("flat(6)",)}, r"target: the placement flat is not for DTensors, got \('flat\(6\)',\)"),
    ({"target": ("partial(sum)",)}, r"target may be partial only on axes with the same partial source, got"),
    ({"road": "full_tensor", "target": ("shard(0)",)}, r"with road='full_tensor' the target must be replicate, got"),
    ({"road": "full_tensor", "async_op": True}, "full_tensor always waits: set async_op=False"),
    ({"checks": True, "road": "distribute"}, "run_check is for from_local: set checks=False"),
    ({"checks": True, "records": True}, "collectives of run_check are not documented: set records=False"),
    ({"checks": True, "members": (0, 1, 3)}, "run_check waits for all ranks of the world: omit members"),
    ({"road": "distribute", "source": ("partial(sum)",)}, "with road='distribute' the source must not be partial, got"),
    ({"road": "local", "cotangent": ("shard(0)",)}, "the cotangent of a plain tensor must have its local shape"),
    ({"states_shape": False}, r"set states_shape=True for \(4, 5\) under \('shard\(1\)',\)"),
    ({"source": ("shard(2)",)}, "x: "),
)


test_error_for_an_invalid_redistribution_on_two_axes_names_the_invalid_field = refuses(
    on_two_axes,
    ({"records": True}, r"collectives are documented for a mesh of one axis, got \(2, 2\): set records=False"),
    ({"source": ("partial(sum)", "partial(max)")}, "source must have at most one kind of partial placement, got"),
    ({"members": (3, 2, 1, 0)}, r"members need a mesh of one axis, got \(2, 2\)"),
)


test_error_for_an_invalid_refused_redistribution_names_the_invalid_field = refuses(
    functools.partial(RefusedRedistributeCase, world_size=2),
    ({"road": "local"}, "a refused redistribution must have road='dtensor', got 'local'"),
    ({"source": ("partial(sum)",)}, "the source of a refused redistribution must not be partial, got"),
)


def test_operands_of_a_partial_tensor_are_stacked_in_a_leading_dim() -> None:
    case = on_two_axes(cotangent=("partial(sum)", "partial(sum)"))
    shapes, layouts = case.shapes(), case.layouts()

    assert shapes == {"x": (2, 3, 4), "cotangent": (2, 2, 3, 4), "output": (3, 4), "grad.x": (3, 4)}
    assert layouts["x"] == Layout((Shard(0), Shard(1)))
    assert layouts["cotangent"] == stacked(Layout((Partial(), Partial()))) == Layout((Shard(0), Shard(1)))
    assert [local_shape(shapes["x"], layouts["x"], (2, 2), rank) for rank in range(4)] == [(1, 2, 4), (1, 1, 4)] * 2


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (Replicate(), Shard(0))),
        ({"cotangent": ("partial(sum)", "replicate")}, (Partial(), Shard(0))),
        ({"road": "local", "cotangent": ("partial(sum)", "replicate")}, (Replicate(), Shard(0))),
        ({"target": ("partial(sum)", "shard(1)")}, (Partial(), Shard(0))),
        ({"source": ("shard(0)", "shard(0)"), "cotangent": ("partial(sum)",) * 2}, (Shard(0), Shard(0))),
    ],
)
def test_gradient_of_a_partial_source_is_replicated_unless_the_cotangent_is_partial(
    fields: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    assert on_two_axes(**fields).gradient_layout == Layout(expected)


def test_cotangent_of_a_partial_plain_tensor_is_replicated() -> None:
    fields = {"target": ("partial(sum)", "shard(1)")}

    assert on_two_axes(**fields).cotangent_layout == Layout((Partial(), Shard(1)))
    assert on_two_axes(**fields, road="local").cotangent_layout == Layout((Replicate(), Shard(1)))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"source": ("partial(avg)", "shard(0)")}, True),
        ({"source": ("shard(0)", "partial(avg)")}, False),
        ({"source": ("partial(avg)", "shard(0)"), "mesh": (1, 4)}, False),
    ],
)
def test_predicate_mixes_reductions_is_true_only_for_an_axis_of_several_ranks(
    fields: dict[str, Any], *, expected: bool
) -> None:
    assert mixes_reductions(on_two_axes(cotangent=("partial(sum)", "replicate"), **fields)) is expected


@pytest.mark.parametrize(
    ("size", "target", "expected"),
    [
        (5, ("replicate", "replicate"), True),
        (5, ("replicate", "shard(0)"), True),
        (5, ("shard(0)", "replicate"), False),
        (5, ("replicate", "shard(1)"), False),
        (7, ("replicate", "replicate"), False),
    ],
)
def test_predicate_of_flat_gathers_is_true_only_if_flat_and_nested_shards_differ(
    size: int, target: tuple[str, ...], *, expected: bool
) -> None:
    """5 over 2 x 2 ranks is 2, 1, 1, 1 and over four 2, 2, 1, 0; 7 is 2, 2, 2, 1 either way."""
    nested, shape = ("shard(0)", "shard(0)"), (size, 2)
    there = on_two_axes(flattened=True, shape=shape, source=nested, target=target)
    back = on_two_axes(flattened=True, shape=shape, source=target, target=nested)
    apart = on_two_axes(shape=shape, source=nested, target=target)

    assert gathers_nested_shards_flat(there) is gradient_gathers_nested_shards_flat(back) is expected
    assert not gradient_gathers_nested_shards_flat(there) and not gathers_nested_shards_flat(back)
    assert not gathers_nested_shards_flat(apart)


# ------------------------------------------------------------------------------------------------
# Drawn values


def test_redistributions_use_every_function_on_one_and_two_axes() -> None:
    seen = Counter((case.road, case.num_axes) for world_size in limits.WORLD_SIZES for case in drawn_cases(world_size))

    assert seen.keys() == {(road, num_axes) for road in ROADS for num_axes in (1, 2)}, seen


@pytest.mark.parametrize(
    "placements",
    [
        ("shard", "replicate"),
        ("shard", "shard"),
        ("partial", "replicate"),
        ("partial", "shard"),
        ("replicate", "shard"),
    ],
)
def test_redistributions_on_one_axis_have_every_pair_of_placements(placements: tuple[str, str]) -> None:
    cases = [case for world_size in (2, 3, 4) for case in drawn_cases(world_size) if case.num_axes == 1]
    made = [
        case.shard_kind
        for case in cases
        if (case.source[0][: len(placements[0])], case.target[0][: len(placements[1])]) == placements
        and case.source != case.target
    ]

    assert len(made) > len(cases) / 40
    assert set(made) == {"even", "uneven", "empty"} or "shard" not in placements, Counter(made)


def test_a_fifth_of_redistributions_on_2_x_2_ranks_shard_one_dim_twice() -> None:
    cases = [case for case in drawn_cases(4) if case.mesh == (2, 2)]
    twice = [case for case in cases if "shard" in case.source[0] + case.target[0]
             and (len(set(case.source)) == 1 or len(set(case.target)) == 1)]  # fmt: skip

    assert len(cases) > 20 and len(twice) > len(cases) / 5


def test_each_reduction_and_a_tensor_without_elements_or_dims_is_drawn() -> None:
    cases = [case for world_size in limits.WORLD_SIZES for case in drawn_cases(world_size)]

    assert {case.reduction("x")[0] for case in cases} == {"", "sum", "avg", "max", "min"}
    assert any(case.shape == () for case in cases) and any(0 in case.shape for case in cases)


# ------------------------------------------------------------------------------------------------
# Values


@each_dtype
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("mode", ["dense", "index"])
def test_operands_of_a_redistribution_use_nearly_all_bits_and_have_both_signs(mode: str, op: str, dtype: str) -> None:
    """On three ranks: magnitudes up to a third of 2**p, and multiples of three for averages."""
    case = case_of(dtype=dtype, source=(f"partial({op})",), shape=(64, 8), values=((mode, 3),))
    operands = draw(case, 0)["x"].double()
    limit = 2 ** {"float64": 53, "float32": 24, "bfloat16": 8, "float16": 11}[dtype] / 3
    step = 3 if op == "avg" else 1

    assert operands.shape == (3, 64, 8) and bool((operands % step == 0).all())
    assert not torch.equal(operands[0].abs(), operands[1].abs())
    assert {float(sign) for sign in operands.sign().flatten()} == {-1.0, 1.0}
    assert operands.abs().max() <= limit and (mode == "index" or operands.abs().max() > 0.9 * limit)


def test_infinities_and_nans_are_drawn_only_for_tensors_that_are_copied() -> None:
    """The value of number 2 is an infinity."""
    case = case_of(source=("partial(sum)",), values=(("special", 2),), requires_grad=("x",))
    given = draw(case, 0)

    assert given["x"].isfinite().all() and given["cotangent"].isinf().any()


# ------------------------------------------------------------------------------------------------
# The oracle


@each_dtype
def test_reduction_with_a_missing_doubled_or_unaveraged_operand_is_rejected(dtype: str) -> None:
    case = case_of(dtype=dtype, source=("partial(sum)",), shape=(6, 6), values=(("real", 5),))
    operands = draw(case, 0)["x"]
    right = reduce_operands(case, "x", operands, 0)
    assert right.allowed is not None

    for weights in ((0, 1, 1), (2, 1, 1), (1 / 3, 1 / 3, 1 / 3)):
        wrong = (operands.double() * torch.tensor(weights, dtype=torch.float64)[:, None, None]).sum(0)
        assert bool(((wrong - right.value).abs() > right.allowed).any())


def test_operands_that_an_average_would_round_are_refused() -> None:
    case = case_of(source=("partial(avg)",), shape=(1,))

    with pytest.raises(InexactData, match="x: operands are no multiples of 3, so their average is rounded"):
        reduce_operands(case, "x", torch.tensor([[3.0], [6.0], [1.0]]), 0)


def test_average_over_seven_ranks_in_float32_is_judged_within_a_bound() -> None:
    """fl(1 / 7) is too far from 1 / 7 for a product with it to be exact."""
    fields = {"world_size": 7, "source": ("partial(avg)",), "requires_grad": ()}

    assert expect(case_of(**fields), 0).tensors["output"].allowed is not None
    assert expect(case_of(**fields, dtype="float64"), 0).tensors["output"].allowed is None


# ------------------------------------------------------------------------------------------------
# The collectives


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ["forward all_gather of 32"]),
        ({"target": ("shard(0)",)}, ["forward all_to_all of 48", "backward all_to_all of 48"]),
        ({"source": ("partial(sum)",)}, ["forward all_reduce of 80"]),
        ({"source": ("partial(avg)",), "target": ("shard(0)",)},
         ["forward reduce_scatter of 120", "backward all_gather of 40"]),
        ({"source": ("replicate",), "target": ("shard(0)",)}, ["backward all_gather of 40"]),
        ({"cotangent": ("partial(sum)",)}, ["forward all_gather of 32", "backward reduce_scatter of 96"]),
        ({"source": ("partial(sum)",), "cotangent": ("partial(sum)",)}, ["forward all_reduce of 80"]),
        ({"source": ("partial(sum)",), "cotangent": ("partial(sum)",), "road": "local"},
         ["forward all_reduce of 80", "backward all_reduce of 80"]),
        ({"road": "distribute", "requires_grad": ()}, ["forward scatter of 0", "forward all_gather of 32"]),
        ({"road": "distribute", "source": ("replicate",)}, ["forward broadcast of 80"]),
    ],
)  # fmt: skip
def test_each_redistribution_has_its_documented_collective(fields: dict[str, Any], expected: list[str]) -> None:
    """For (4, 5) in float32 on the second of three ranks, padded to 6 rows or columns if these are divided."""
    calls = [str(call) for call in expected_collectives(case_of(**fields), 1)]

    assert calls == [f"{text} bytes" for text in expected]


def test_documented_scatter_sends_all_shards_from_the_first_rank() -> None:
    call, *_ = expected_collectives(case_of(road="distribute", requires_grad=()), 0)

    assert call.size_bytes == math.prod((4, 6)) * 4


def test_gate_run_redistributes_between_all_placements_of_a_dim_that_two_axes_may_divide() -> None:
    cases = moves_of(Space((4,), ("float32",)), 1, 0)
    moves = {(case.source, case.target) for case in cases}

    assert {case.mesh for case in cases} == {(2, 2)} and {case.shape[0] % 4 for case in cases} == {0, 1}
    assert (("shard(0)", "shard(0)"), ("replicate", "shard(0)")) in moves and len(cases) == 2 * len(moves) == 64


@pytest.mark.ranks
def test_gate_run_rejects_an_outer_axis_that_is_redistributed_by_itself(pool: Pool) -> None:
    cases = moves_of(Space((4,), ("float32",)), 1, 0)

    def fails(subject: str) -> bool:
        return any(each.failed for case in cases for each in judge(subject, case, pool, (equals_unsharded,)))

    assert fails("tests.planted.subjects:outer_axis_by_itself__redistribute")
    assert not fails("redistribute")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sum_of_a_gradient_that_is_converted_back_is_within_its_bound(dtype: str) -> None:
    case = RedistributeCase(world_size=3, dtype=dtype, shape=(5, 2), cotangent=("partial(sum)",),
                            backward_dtype="float64", values=(("real", 1),))  # fmt: skip

    assert 0 < errors_beside(case, 0)["grad.x"] <= 1


def test_integers_that_are_converted_to_float16_stay_finite() -> None:
    case = RedistributeCase(world_size=2, shape=(50,), forward_dtype="float16")

    assert len(draw(case, 0)["x"].half().unique()) > 20
