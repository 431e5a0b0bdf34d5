"""Cross entropies of DTensors without loss_parallel: the case, and the bounds beside torch's own kernels."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from equivtest.base.collective import Collective
from equivtest.cases.values import draw
from equivtest.families.cross_entropy.gathered.case import GatheredCrossEntropyCase, RefusedGatheredCrossEntropyCase
from equivtest.families.cross_entropy.gathered.known import may_count_unequally
from equivtest.layout import Layout, Replicate, Shard
from equivtest.oracle import expect
from equivtest.oracle.collectives import expected_collectives
from equivtest.tensors import DTYPES
from equivtest.verdicts.elements import is_too_wide
from tests.drawing import run_of
from tests.families.refusing import refuses

each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def case_of(**fields: Any) -> GatheredCrossEntropyCase:
    """Seven classes on three ranks: 3, 3 and 1."""
    return GatheredCrossEntropyCase(**{"world_size": 3, "positions": (8,), "num_classes": 7, **fields})


test_error_for_an_invalid_case_names_the_invalid_field = refuses(
    case_of,
    ({"label_smoothing": 1.5}, r"label_smoothing must be in 0\.\.1, got 1\.5"),
    ({"shares": "positions", "positions": ()}, "shares='positions' needs a dim of positions"),
    ({"shares": "positions", "records": True}, "only the collectives of gathered classes are documented"),
    (
        {"shares": "positions", "reduction": "mean"},
        r"a mean needs equally many positions on each rank, got \(8,\)",
    ),
    ({"target_is_dtensor": False}, "a DTensor's target is a DTensor too"),
    ({"weighted": True}, "the weight must be a DTensor too: set weight_is_dtensor if weighted"),
)


test_error_for_an_invalid_refused_case_names_the_invalid_field = refuses(
    functools.partial(RefusedGatheredCrossEntropyCase, world_size=2),
    ({"misfit": "plain_target"}, "misfit plain_target requires target_is_dtensor=False and weight_is_dtensor=False"),
    (
        {"misfit": "plain_target", "target_is_dtensor": False},
        "a plain target of one position would be accepted as a number",
    ),
    ({"misfit": "plain_weight"}, "misfit plain_weight needs the weights of two classes or more"),
    (
        {"misfit": "batch_mean", "reduction": "mean"},
        "misfit batch_mean, and no other, needs a mean of unev",
    ),
)


def test_case_that_must_be_refused_has_one_target_outside_of_the_classes() -> None:
    for misfit, wrong in (("above", 7), ("below", -1)):
        case = RefusedGatheredCrossEntropyCase(world_size=2, positions=(8,), num_classes=7, misfit=misfit)
        assert draw(case, 0)["target"].eq(wrong).sum() == 1 and case.refusal


def test_logits_are_sharded_by_classes_or_by_positions() -> None:
    by_class, by_position = case_of(), case_of(shares="positions")

    assert by_class.layouts()["grad.x"] == Layout((Shard(1),)) and by_position.layouts()["x"] == Layout((Shard(0),))
    assert by_position.layouts()["output"] == by_position.layouts()["target"] == Layout((Replicate(),))
    assert not may_count_unequally(by_class) and may_count_unequally(case_of(ignore_index=3))


def test_gathered_cross_entropy_documents_one_all_gather_of_padded_classes() -> None:
    assert expected_collectives(case_of(), 2) == (Collective("all_gather", 96, "forward"),)
    assert expected_collectives(case_of(world_size=1), 0) == ()


def test_at_least_three_quarters_of_gathered_cross_entropy_bounds_are_conclusive() -> None:
    cases = run_of("dtensor_cross_entropy")
    tensors = [tensor for case in cases for tensor in expect(case, 0).tensors.values()]

    assert sum(map(is_too_wide, tensors)) < len(tensors) / 4


def test_label_smoothing_moves_an_equal_share_to_every_class() -> None:
    case = case_of(num_classes=2, label_smoothing=0.5, positions=(1,))
    given = draw(case, 0)
    losses = -given["x"].double().log_softmax(1)[0]
    expected = expect(case, 0).tensors["output"].value

    assert torch.allclose(expected, 0.5 * losses[given["target"]] + 0.25 * losses.sum())


def test_ignored_position_has_no_loss_and_no_gradient() -> None:
    expected = expect(case_of(ignored="all", label_smoothing=0.1), 0).tensors

    assert all(
        not each.value.any() and each.allowed is not None and not each.allowed.any() for each in expected.values()
    )
