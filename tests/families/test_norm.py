"""Norms under sequence parallelism: the case, its values, and the bounds beside torch's own kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from equivtest.cases.values import draw
from equivtest.families.norm.case import NORMS, NormCase
from equivtest.families.norm.known import num_frozen, num_trained
from equivtest.families.norm.oracle.norms import norm, norm_grad_weight, norm_grad_x
from equivtest.layout import Layout, Replicate, Shard
from equivtest.oracle import expect
from equivtest.oracle.rounding import TORCH_CPU
from equivtest.tensors import DTYPES
from equivtest.verdicts.elements import is_too_wide
from tests.drawing import SPACE, STRATEGIES, drawn
from tests.families.refusing import refuses

each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_norm = pytest.mark.parametrize("kind", NORMS)
SHAPES = ((1, 2), (2, 3), (5, 8), (9, 17), (33, 33), (64, 128))  # tokens, features


def case_of(**fields: Any) -> NormCase:
    """A sequence of 5 on three ranks: 2, 2 and 1 tokens in each of two rows."""
    base = {"world_size": 3, "norm": "layer_norm", "leading": (2, 5), "sequence_dim": 1, "features": 8}
    return NormCase(**{**base, "parameters": ("weight",), "x_is_dtensor": True, **fields})


test_error_for_an_invalid_norm_case_names_the_invalid_field = refuses(
    case_of,
    ({"leading": ()}, r"leading must have 1 to 3 dims of at least 1, got \(\)"),
    ({"leading": (0, 5)}, r"leading must have 1 to 3 dims of at least 1, got \(0, 5\)"),
    ({"sequence_dim": 2}, "sequence_dim must be one of the 2 leading dims, got 2"),
    ({"features": 0}, r"features must be in 1\.\.4096, got 0"),
    (
        {"parameters": ("bias",)},
        "parameters of layer_norm must begin with the first of weight, bias and skip none, got",
    ),
    (
        {"norm": "rms_norm", "parameters": ("weight", "bias")},
        "parameters of rms_norm must begin with the first of weig",
    ),
    ({"requires_grad": ("weight", "x")}, "requires_grad must list some of x, weight in this order"),
    ({"eps": 0.0}, "eps must be above 0 and at most 1, got 0.0"),
    ({"x_is_dtensor": False}, "uneven shards of dim 1 on 3 ranks: set x_is_dtensor=True"),
)


def test_layouts_of_a_norm_shard_activations_and_replicate_parameters() -> None:
    case = case_of(parameters=("weight", "bias"), requires_grad=("x", "bias"))
    sequence, whole = Layout((Shard(1),)), Layout((Replicate(),))

    assert case.answer_names() == ("output", "param.weight", "param.bias", "grad.x", "grad.bias")
    assert [case.layouts()[name] for name in case.answer_names()] == [sequence, whole, whole, sequence, whole]
    assert case.shapes()["grad.bias"] == (8,) and case.shapes()["grad.x"] == (2, 5, 8)
    assert (num_trained(case), num_frozen(case), case.sequence_length) == (1, 1, 5)


@each_dtype
def test_drawn_x_of_norms_has_no_zero_and_sometimes_a_large_mean(dtype: str) -> None:
    means = []
    for seed in range(12):
        given = draw(case_of(dtype=dtype, values=(("real", seed),)), 0)
        assert all(bool(((tensor != 0) & tensor.isfinite()).all()) for tensor in given.values())
        means.append(float(given["x"].double().mean() / given["x"].double().std()))

    assert max(means) > 0.3 and min(means) < -0.6 and min(map(abs, means)) < 0.2


@each_norm
def test_few_verdicts_on_norms_are_inconclusive(kind: str) -> None:
    """Also with one feature, and with sums kept in 16 bits; fewer than one draw in fifty."""
    cases = drawn(STRATEGIES[f"sequence_{kind}"](SPACE), 150)
    draws = [expect(case, index).tensors for case in cases for index in range(len(case.values))]
    open_ = [tensors for tensors in draws if any(map(is_too_wide, tensors.values()))]

    assert len(draws) > 300 and len(open_) <= len(draws) // 50
    assert kind == "rms_norm" or all(case.features > 1 for case in cases if isinstance(case, NormCase))


# ------------------------------------------------------------------------------------------------
# The bounds


def real_case(kind: str, dtype: str, seed: int) -> NormCase:
    tokens, features = SHAPES[seed % len(SHAPES)]
    names = ("weight", "bias") if kind == "layer_norm" else ("weight",)
    return NormCase(
        world_size=1, norm=kind, dtype=dtype, leading=(tokens,), features=features, parameters=names,
        requires_grad=("x", *names), values=(("real", seed),), eps=(1e-5, 0.01)[seed % 2],
    )  # fmt: skip


@each_norm
@each_dtype
def test_norm_with_eps_added_outside_of_the_root_is_beyond_the_bound(kind: str, dtype: str) -> None:
    """0.01 added to the root instead: one percent and more of x's scale of 0.1."""
    x = (draw(real_case(kind, dtype, 4), 0)["x"].double() / 10).to(DTYPES[dtype])
    ones, zeros, centered = torch.ones(33), torch.zeros(33), kind == "layer_norm"
    right = norm(x, ones, zeros, TORCH_CPU[dtype], eps=0.01, centered=centered)
    apart = x.double() - (x.double().mean(1, keepdim=True) if centered else 0)
    wrong = apart / ((apart**2).mean(1, keepdim=True).sqrt() + 0.01)

    assert bool(((wrong - right.value).abs() > right.allowed).any())


@each_dtype
def test_norm_gradient_without_centering_or_with_missing_tokens_is_rejected(dtype: str) -> None:
    given, arithmetic = draw(real_case("layer_norm", dtype, 2), 0), TORCH_CPU[dtype]
    x, weight, cotangent = given["x"], given["weight"], given["cotangent"]
    right = norm_grad_x(x, weight, cotangent, arithmetic, eps=1e-5, centered=True)
    wrong = norm_grad_x(x, weight, cotangent, arithmetic, eps=1e-5, centered=False)
    rank_of = torch.arange(len(x)) // 3
    whole = norm_grad_weight(x, cotangent, arithmetic, rank_of=rank_of, eps=1e-5, centered=True)
    own = norm_grad_weight(x[:3], cotangent[:3], arithmetic, rank_of=rank_of[:3], eps=1e-5, centered=True)

    assert bool(((wrong.value - right.value).abs() > right.allowed).any())
    assert bool(((own.value - whole.value).abs() > whole.allowed).any())


def test_norm_whose_variance_may_vanish_has_an_infinite_bound() -> None:
    x = torch.full((1, 1), 1000.0)
    found = norm(x, torch.ones(1), torch.zeros(1), TORCH_CPU["float32"], eps=1e-6, centered=True)

    assert found.value.item() == 0 and found.allowed.item() == torch.inf


def test_features_of_x_and_of_the_cotangent_are_orthogonal() -> None:
    """So that no gradient of x is what is left of a cotangent that is a multiple of x - mean."""
    given = draw(case_of(leading=(400, 1), sequence_dim=0, values=(("real", 0),)), 0)
    centered = (given[name].flatten(0, -2).double().mean(0) for name in ("x", "cotangent"))
    of_x, of_g = ((mean - mean.mean()).sign() for mean in centered)

    assert of_x.sum() == of_g.sum() == (of_x * of_g).sum() == 0
