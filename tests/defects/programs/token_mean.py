"""Steps of training that are wrong in one way each, their batch divided among ranks and micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from equivtest.programs.case import PARTS_OF_WHOLE, ModuleCase
from equivtest.programs.examples.token_mean import MAX_NORM, TokenMean
from tests.defects.defect import Replacing, run_with
from tests.defects.programs.steps import run_step, step_named

wrong = Replacing("module")

_STEP = "equivtest.programs.examples.token_mean:"
_ONE_RANK = ModuleCase(
    world_size=1,
    build="equivtest.programs.examples.next_token:next_token",
    parallelize="equivtest.programs.examples.plans:fully_sharded",
    inputs=(("ids", "ids(7)", ("batch", "seq")), ("targets", "targets(7, -100)", ("batch", "seq"))),
    sizes=(("batch", 2), ("seq", 2)),
    batch=PARTS_OF_WHOLE,
    optimizer=f"{_STEP}adamw",
    step=f"{_STEP}token_mean",
    steps=2,
    micro_batches=2,
    max_norm=MAX_NORM,
    values=(("real", 0),),
)
_TWO_RANKS = replace(_ONE_RANK, world_size=2)


class MeanOfMeans(TokenMean):
    """Each micro-batch goes backward from the mean over its own tokens; these means are averaged."""

    def scaled(self, number: int, loss: torch.Tensor) -> torch.Tensor:
        return loss / self.own[number].clamp(min=1) / len(self.own)


class FirstReduced(TokenMean):
    """Gradients are reduced after the first micro-batch, and no more."""

    def reduces(self, number: int) -> bool:
        return number == 0


class GradientsKept(TokenMean):
    """Adds to the gradients of the previous step."""

    def begin(self) -> None:
        pass


class OwnReported(TokenMean):
    """Reports the loss of the rank's own tokens."""

    def reported(self) -> torch.Tensor:
        return torch.stack(self.losses).sum() / self.own.sum().clamp(min=1)


class OwnNorm(TokenMean):
    """Each rank clips its shards of the gradients by their norm."""

    def clipped(self) -> torch.Tensor:
        gradients = [each.grad.to_local() for each in self.module.parameters()]
        norm = torch.nn.utils.get_total_norm(gradients)
        for gradient in gradients:
            gradient.mul_((MAX_NORM / (norm + 1e-6)).clamp(max=1.0))
        return norm


def __getattr__(name: str) -> Any:
    return step_named(name, globals())


_TWO_ROWS = "two micro-batches need two rows; the sizes of the module are its own"
_TWO_RANKS_WITH_A_ROW = "one rank has all there is, and each of two must have a row"

mean_of_token_means = wrong(
    "mean of means", replace(_ONE_RANK, values=(("real", 2),)), _TWO_ROWS, claim="gradients_equal_unsharded"
)(run_with(run_step, MeanOfMeans))

last_micro_batch_not_reduced = wrong("a reduction missing", _ONE_RANK, _TWO_ROWS, claim="gradients_equal_unsharded")(
    run_with(run_step, FirstReduced)
)

gradients_kept = wrong(
    "state across steps",
    _ONE_RANK,
    "the first step has nothing to keep; the property's batches have two rows at least",
    claim="trains_like_unsharded",
)(run_with(run_step, GradientsKept))

loss_of_own_tokens = wrong("a reduction missing", _TWO_RANKS, _TWO_RANKS_WITH_A_ROW)(run_with(run_step, OwnReported))

norm_of_own_shards = wrong(
    "wrong divisor or wrong group", _TWO_RANKS, _TWO_RANKS_WITH_A_ROW, claim="gradients_equal_unsharded"
)(run_with(run_step, OwnNorm))
