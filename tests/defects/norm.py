"""Norms under sequence parallelism that are wrong in one way each."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from equivtest.cases.subject import Answers, Given
from equivtest.families.norm.case import NormCase
from equivtest.families.norm.subject import run_norm, sequence_layer_norm
from equivtest.layout import Layout, Replicate
from equivtest.tensors import Placed
from tests.defects.defect import Replacing

wrong_layer_norm = Replacing("sequence_layer_norm")
wrong_rms_norm = Replacing("sequence_rms_norm")


@wrong_layer_norm(
    "a reduction missing in the backward",
    NormCase(world_size=2, norm="layer_norm", leading=(2,), parameters=("weight", "bias"), requires_grad=("bias",)),
    "two ranks need one token each, since torch gathers a shorter sequence",
    claim="gradients_equal_unsharded",
)
def gradient_of_own_tokens(case: NormCase, mesh: DeviceMesh, given: Given) -> Answers:
    """layer_norm: each rank's share of the gradients of weight and bias counts as the whole."""
    answers = sequence_layer_norm(case, mesh, given)
    for name in case.parameters:
        gradient = answers.get(f"grad.{name}")
        if isinstance(gradient, DTensor):
            answers[f"grad.{name}"] = Placed(gradient.to_local(), Layout((Replicate(),)))
    return answers


@wrong_rms_norm(
    "eps at another place",
    NormCase(world_size=1, norm="rms_norm", requires_grad=(), values=(("real", 1),)),
    "the relative error is eps / sqrt(q) for a mean square q, a right one has eps / 2 q: the same at a quarter",
)
def eps_outside_the_root(case: NormCase, mesh: DeviceMesh, given: Given) -> Answers:
    """rms_norm: eps is added to the root of the mean square, not to the mean square."""
    return run_norm(case, mesh, given, _EpsOutside(case.features, case.eps, bool(case.parameters), device="meta"))


class _EpsOutside(nn.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.eps is not None
        normed = x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)
        return normed if self.weight is None else normed * self.weight


@wrong_rms_norm(
    "another dim",
    NormCase(world_size=1, norm="rms_norm", requires_grad=()),
    "of a single token each feature would become a sign",
)
def moments_of_a_feature(case: NormCase, mesh: DeviceMesh, given: Given) -> Answers:
    """rms_norm: the mean square is taken over the first dim of the activation, not over the features."""
    return run_norm(case, mesh, given, _OverFirstDim(case.features, case.eps, bool(case.parameters), device="meta"))


class _OverFirstDim(nn.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.eps is not None
        normed = x / (x.pow(2).mean(0, keepdim=True) + self.eps).sqrt()
        return normed if self.weight is None else normed * self.weight
