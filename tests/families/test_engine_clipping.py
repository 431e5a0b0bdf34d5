"""Clipped gradients: the bound compared with DeepSpeed's own steps in float32, and values beyond it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from equivtest.families.training.deepspeed.oracle import clipped
from equivtest.oracle.rounding import TORCH_CPU, Bounded, Operand

FLOAT32 = TORCH_CPU["float32"]
RANKS = 3
LIMITS = (2.0**-10, 0.3, 1.0)


def gradients_of(seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Draws gradients of four parameters, float32, with a norm around 20 times `scale`."""
    source = torch.Generator().manual_seed(seed)
    shapes = {"in_proj.weight": (33, 7), "in_proj.bias": (33,), "out_proj.weight": (5, 33), "out_proj.bias": (5,)}
    return {name: scale * torch.randn(shape, generator=source) for name, shape in shapes.items()}


def as_deepspeed_does(
    gradients: dict[str, torch.Tensor], limit: float, groups: Sequence[Sequence[str]]
) -> torch.Tensor:
    """Returns DeepSpeed's factor for each gradient: norms of each rank's parts, of each group, of all; float32."""
    norms = []
    for names in groups:
        of_ranks = torch.stack(
            [
                torch.stack([part_of(gradients[name], rank).double().norm() for name in names]).pow(2.0).sum().float()
                for rank in range(RANKS)
            ]
        )
        total = of_ranks[0]
        for added in of_ranks[1:]:
            total = total + added
        norms.append(total.pow(0.5))
    norm = torch.linalg.vector_norm(torch.stack(norms), ord=2)
    return 1.0 / torch.clamp((norm + 1e-6) / limit, min=1.0)


def part_of(gradient: torch.Tensor, rank: int) -> torch.Tensor:
    """The rank's part of a flat gradient; nothing of it for later ranks of a small one."""
    size = -(-gradient.numel() // RANKS)
    return gradient.reshape(-1)[rank * size : (rank + 1) * size]


def ratios(found: dict[str, Operand], actual: dict[str, torch.Tensor]) -> list[float]:
    """Largest error over its allowance, of each gradient."""
    seen = []
    for name, right in found.items():
        assert isinstance(right, Bounded)
        seen.append(float(((actual[name].double() - right.value).abs() / right.allowed).max()))
    return seen


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("grouped", [True, False])
def test_clipping_by_the_operations_of_deepspeed_is_within_the_bound(limit: float, *, grouped: bool) -> None:
    for seed in range(50):
        gradients = gradients_of(seed)
        factor = as_deepspeed_does(gradients, limit, [[name] for name in gradients] if grouped else [[*gradients]])
        found = clipped({**gradients}, limit, RANKS, FLOAT32)

        assert max(ratios(found, {name: gradient * factor for name, gradient in gradients.items()})) <= 1, seed


@pytest.mark.parametrize("wrong", ["a rank's norm", "one parameter missing", "largest element", "twice the limit"])
def test_gradients_clipped_by_a_wrong_norm_are_beyond_the_bound(wrong: str) -> None:
    gradients = gradients_of(1)
    others = {
        "a rank's norm": torch.cat([part_of(gradient, 0) for gradient in gradients.values()]).norm(),
        "one parameter missing": torch.cat([g.reshape(-1) for g in list(gradients.values())[:-1]]).norm(),
        "largest element": torch.stack([gradient.abs().max() for gradient in gradients.values()]).max(),
        "twice the limit": torch.cat([gradient.reshape(-1) for gradient in gradients.values()]).norm() / 2,
    }
    found = clipped({**gradients}, 1.0, RANKS, FLOAT32)

    assert min(ratios(found, {name: gradient / others[wrong] for name, gradient in gradients.items()})) > 100


def test_gradients_below_the_limit_are_not_clipped() -> None:
    gradients = gradients_of(2)
    found = clipped({**gradients}, 2.0**12, RANKS, FLOAT32)

    assert all(found[name] is gradient for name, gradient in gradients.items())


def test_zero_gradients_are_not_clipped() -> None:
    gradients = gradients_of(3, scale=0.0)

    assert clipped({**gradients}, 2.0**-4, RANKS, FLOAT32) == gradients


def test_bound_allows_clipping_or_not_if_the_norm_equals_the_limit() -> None:
    """A norm as large as the limit: whether 1e-6 more passes it is a matter of rounding."""
    gradients = {"weight": torch.full((4,), 2.0**20)}
    found = clipped({**gradients}, 2.0**21, RANKS, FLOAT32)

    assert max(ratios(found, gradients)) <= 1
