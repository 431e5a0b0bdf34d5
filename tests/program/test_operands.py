"""Inputs of functions within a part: the reference continues from right recorded values, and may choose among ties."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from equivtest.oracle.rounding import TORCH_CPU, Bounded
from equivtest.oracle.running import RunningError
from equivtest.programs.boundaries import Capture
from equivtest.programs.oracle.apart import TakesApart
from equivtest.programs.oracle.forced import Forced
from equivtest.programs.oracle.held import held_by_one

Tensors = dict[str, torch.Tensor]


class Inner(nn.Module):
    """A part that computes a given function."""

    def __init__(self, compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(x)


def held_of(compute: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Tensors:
    x = x.clone().requires_grad_()
    with Capture(module := nn.Sequential(Inner(compute))) as capture:
        module(x).sum().backward()
    return capture.named()


def forced(
    compute: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, held: Tensors
) -> tuple[Forced, RunningError, Bounded]:
    """Returns the reference that continues from the recorded values, and its output."""
    counted = RunningError(TORCH_CPU[str(x.dtype).removeprefix("torch.")], 2)
    given = counted.exactly(x).requires_grad_()
    module = nn.Sequential(Inner(compute))
    run = Forced(module, counted, held_by_one(held))
    with counted, TakesApart(), run:
        output = module(given)
        output.sum().backward()
    return run, counted, counted.bounded(output)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Attention behind roundings that are its part's own."""
    q, k, v = (x * each for each in (0.7, 1.3, 0.9))
    for angle in (0.3, 0.5, 0.7):
        q, k = (each * angle + each.flip(-1) * (1 - angle) for each in (q, k))
    return functional.scaled_dot_product_attention(q, k, v)


def scaled_before(x: torch.Tensor) -> torch.Tensor:
    """Some other way to it."""
    q, k, v = (x * each for each in (0.7, 1.3, 0.9))
    return functional.scaled_dot_product_attention(2 * q, k, v, scale=0.25)


X = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0)).bfloat16()


def width(found: Bounded) -> float:
    return float(found.allowed.median() / found.value.square().mean().sqrt())


def test_output_of_attention_is_judged_from_recorded_query_key_and_value() -> None:
    run, _, _ = forced(rotated, X, held_of(rotated, X))
    few = {name: each for name, each in held_of(rotated, X).items() if "attention" not in name}
    names = [f"{grad}boundary.0:attention[{place}]" for grad in ("", "grad.") for place in range(3)]

    assert set(names) <= run.found.keys()
    assert width(run.found["boundary.0"]) < 0.5 * width(forced(rotated, X, few)[0].found["boundary.0"])


def test_oracle_ignores_recorded_operands_of_a_different_computation() -> None:
    def plain(x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x * each for each in (0.7, 1.3, 0.9))
        return functional.scaled_dot_product_attention(q, k, v)

    held = held_of(scaled_before, X)
    run, _, _ = forced(plain, X, held)
    error = (held["boundary.0"].double() - run.found["boundary.0"].value).abs()

    assert "boundary.0:attention[0]" in held and "boundary.0:attention[0]" not in run.found
    assert bool((error <= run.found["boundary.0"].allowed).all())


def test_wrong_output_of_recorded_attention_is_beyond_its_bound() -> None:
    held = held_of(rotated, X)
    wrong = held | {name: held[name] * 2 for name in ("boundary.0", "boundary.0:attention:output")}
    run, _, _ = forced(rotated, X, wrong)
    right = run.found["boundary.0"]

    assert "boundary.0:attention:output" not in run.found
    assert bool(((wrong["boundary.0"].double() - right.value).abs() > right.allowed).any())


WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0])


def routed(x: torch.Tensor) -> torch.Tensor:
    """Returns the weight of the chosen one of four scores; two of them are the largest."""
    scores = torch.cat([x, 2 * x, x, 2 * x], -1)
    taken = scores.topk(1)
    return taken.values * WEIGHTS[taken.indices]


ROW = torch.tensor([[0.5], [1.0]])


@pytest.mark.parametrize(
    ("indices", "is_followed"),
    [
        ([[3], [1]], True),
        ([[1], [3]], True),
        ([[0], [1]], False),
        ([[4], [1]], False),
        ([[-1], [1]], False),
    ],
)
def test_oracle_follows_the_experts_that_ranks_chose_among_equal_scores(
    indices: list[list[int]], *, is_followed: bool
) -> None:
    held = held_of(routed, ROW) | {"boundary.0:topk:chosen": torch.tensor(indices)}
    _, counted, output = forced(routed, ROW, {name: each for name, each in held.items() if "topk" in name})
    expected = 2 * ROW * WEIGHTS[torch.tensor(indices).clamp(0, 3)]

    assert bool(counted.undecided) != is_followed
    assert output.value.equal(expected.double()) or not is_followed


def test_choosing_one_expert_twice_makes_the_case_undecided() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x, x / 2], -1).topk(2).values.sum(-1)

    held = held_of(twice, ROW) | {"boundary.0:topk:chosen": torch.tensor([[0, 0], [1, 0]])}
    _, counted, _ = forced(twice, ROW, held)

    assert counted.undecided.startswith("undecided: topk")


def test_equal_scores_without_a_recorded_choice_make_the_case_undecided() -> None:
    held = {name: each for name, each in held_of(routed, ROW).items() if "chosen" not in name}

    assert forced(routed, ROW, held)[1].undecided.startswith("undecided: topk")
