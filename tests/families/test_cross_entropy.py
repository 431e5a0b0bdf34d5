"""Cross entropies over divided classes: the case, its values, the bounds, and the class that defects are made from."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from equivtest.errors import Misuse
from equivtest.families.cross_entropy.case import CrossEntropyCase, RefusedCrossEntropyCase
from equivtest.families.cross_entropy.values import draw_target
from equivtest.layout import Layout, Replicate, Shard
from equivtest.oracle import expect
from equivtest.oracle.losses import log_softmax
from equivtest.oracle.rounding import TORCH_CPU
from equivtest.ranks.pool import Pool
from equivtest.tensors import DTYPES
from equivtest.verdicts.elements import is_too_wide
from equivtest.verdicts.judging import judge, one_thread
from tests.families.refusing import refuses

each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def case_of(**fields: Any) -> CrossEntropyCase:
    """Seven classes on three ranks: 3, 3 and 1."""
    return CrossEntropyCase(**{"world_size": 3, "positions": (8,), "num_classes": 7, **fields})


TWO_AXES = {"world_size": 4, "row_ranks": 2, "positions": (2,), "target_is_dtensor": True}

test_error_for_an_invalid_cross_entropy_case_names_the_invalid_field = refuses(
    case_of,
    ({"positions": (1,) * 5}, r"positions must have at most 4 dims of at least 1, got \(1, 1, 1, 1, 1\)"),
    ({"positions": (0,)}, r"positions must have .* of at least 1, got \(0,\)"),
    ({"num_classes": 0}, r"num_classes must be in 1\.\.4096, got 0"),
    ({"requires_grad": ("weight",)}, r"requires_grad must be one of \(\), \('x',\), got \('weight',\)"),
    ({"weight_is_dtensor": True}, "weight_is_dtensor needs weights: set weighted=True"),
    ({**TWO_AXES, "world_size": 3}, "row_ranks must divide 3 ranks, got 2"),
    ({**TWO_AXES, "positions": ()}, "row_ranks divides positions: give positions a dim, or set row_ranks=1"),
    ({**TWO_AXES, "reduction": "mean"}, "loss_parallel refuses a mean on two axes: choose 'sum' or 'none'"),
    ({**TWO_AXES, "target_is_dtensor": False}, "a target with shards must be a DTensor: set target_is_dtensor=True"),
    ({**TWO_AXES, "records": True}, "collectives are documented for a mesh of one axis: set records=False"),
)


def test_probability_targets_have_several_classes() -> None:
    with pytest.raises(Misuse, match="probabilities need several classes"):
        RefusedCrossEntropyCase(world_size=1, misfit="probabilities")


@pytest.mark.parametrize(
    ("positions", "shape", "dim"), [((), (7,), 0), ((8,), (8, 7), 1), ((2, 3, 4), (2, 7, 3, 4), 1)]
)
def test_classes_are_dim_1_of_batched_logits_and_dim_0_of_unbatched_logits(
    positions: tuple[int, ...], shape: tuple[int, ...], dim: int
) -> None:
    case = case_of(positions=positions)

    assert case.shapes()["x"] == shape and case.layouts()["grad.x"] == Layout((Shard(dim),))
    assert case.layouts()["output"] == Layout((Replicate(),)) and case.shapes()["output"] == positions


def test_targets_include_the_classes_on_each_side_of_every_shard_boundary() -> None:
    plain = draw_target(case_of(), "real", 0)
    some = draw_target(case_of(ignored="some", ignore_index=-1), "real", 0)

    assert {0, 2, 3, 5, 6} <= set(plain.tolist()) <= set(range(7))
    assert some[1::2].eq(-1).all() and torch.equal(some[::2], plain[::2])
    assert draw_target(case_of(ignored="all"), "real", 0).eq(-100).all()


@each_dtype
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_loss_of_peaked_logits_must_be_exact_except_for_underflow_and_a_mean(reduction: str, dtype: str) -> None:
    case = case_of(dtype=dtype, reduction=reduction, weighted=True, values=(("peaked", 0),))
    output, gradient = (expect(case, 0).tensors[name] for name in ("output", "grad.x"))
    assert output.allowed is not None and gradient.allowed is not None

    assert not output.allowed.any() or reduction == "mean"
    assert gradient.value.abs().max() >= 1 and gradient.allowed.max() < 22 * torch.finfo(DTYPES[dtype]).tiny


@each_dtype
def test_some_gradient_of_peaked_logits_is_not_zero(dtype: str) -> None:
    case = case_of(dtype=dtype, positions=(), values=tuple(("peaked", seed) for seed in range(20)))

    assert all(expect(case, index).tensors["grad.x"].value.abs().max() >= 0.5 for index in range(20))


# ------------------------------------------------------------------------------------------------
# The bounds


def softmax_by_parts(x: torch.Tensor, dtype: str, ranks: int) -> torch.Tensor:
    """Computes like loss_parallel: sums of each part, added in order, in the accumulator's dtype."""
    wide = x.to(DTYPES[TORCH_CPU[dtype].accumulate])
    apart = wide - wide.amax(1, keepdim=True)
    total = torch.stack([part.exp().sum(1, keepdim=True) for part in apart.chunk(ranks, 1)]).sum(0)
    return (apart - total.log()).to(DTYPES[dtype])


@each_dtype
def test_errors_of_a_log_softmax_come_near_their_bound_but_stay_within_it(dtype: str) -> None:
    """In 16 bits, where storage dominates, within a tenth of it."""
    source, largest = torch.Generator().manual_seed(0), 0.0
    with one_thread():
        for num in (2, 3, 17, 300):
            for scale in (0.1, 1.0, 30.0):
                x = (torch.randn(64, num, generator=source, dtype=torch.float64) * scale).to(DTYPES[dtype])
                bound = log_softmax(x, TORCH_CPU[dtype], ranks=3)
                error = (softmax_by_parts(x, dtype, 3).double() - bound.value).abs()
                largest = max(largest, float(torch.where(error == 0, 0.0, error / bound.allowed).max()))

    assert (0.9 if dtype in ("bfloat16", "float16") else 0.005) < largest <= 1


@each_dtype
def test_bound_of_a_language_models_loss_is_conclusive(dtype: str) -> None:
    for reduction in ("none", "sum", "mean"):
        case = case_of(dtype=dtype, positions=(64,), num_classes=1000, reduction=reduction)
        assert not any(is_too_wide(tensor) for tensor in expect(case, 0).tensors.values())


def test_mean_loss_without_targets_is_nan_and_its_gradient_zero() -> None:
    expected = expect(case_of(reduction="mean", ignored="all"), 0).tensors

    assert math.isnan(expected["output"].value.item()) and expected["grad.x"].allowed is not None
    assert not expected["grad.x"].value.any() and not expected["grad.x"].allowed.any()


# ------------------------------------------------------------------------------------------------
# On ranks


@pytest.mark.ranks
@pytest.mark.parametrize(
    "case",
    [
        case_of(world_size=4, num_classes=5, reduction="mean", values=(("real", 0), ("peaked", 1))),
        case_of(world_size=2, positions=(2, 2, 3), weighted=True, ignored="some", values=(("real", 0), ("peaked", 1))),
        case_of(world_size=2, dtype="bfloat16", num_classes=1, reduction="sum"),
        case_of(world_size=1, positions=(), dtype="float16", values=(("real", 1), ("peaked", 1))),
    ],
    ids=["an empty part", "an image", "fewer classes than ranks", "a single row"],
)
def test_cross_entropy_that_the_defects_modify_is_right(case: CrossEntropyCase, pool: Pool) -> None:
    """Also in cases in which torch's own is wrong."""
    verdicts = judge("tests.defects.cross_entropy:own_cross_entropy", case, pool)

    assert {verdict.kind for verdict in verdicts} == {"holds"}
