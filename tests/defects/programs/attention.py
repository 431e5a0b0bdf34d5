"""Blocks of attention that are wrong in one way each, their heads divided among the ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from equivtest.cases.subject import Answers, Given
from equivtest.programs.case import ModuleCase
from equivtest.programs.examples.attention import HEAD_FEATURES, AttentionBlock
from equivtest.programs.examples.attention_plan import DividedBlock, divide, sum_gradients, sum_over
from equivtest.programs.run.module import run_module
from tests.defects.defect import Replacing, run_with

wrong = Replacing("module")

_ATTENTION = ModuleCase(
    world_size=2,
    dtype="float64",
    build="equivtest.programs.examples.attention:attention_block",
    parallelize="equivtest.programs.examples.attention_plan:heads_divided",
    x_shape=(1, 6),
    values=(("real", 0),),
)
_WHY = "one rank has the whole sum; the sizes of the module are its own"


def _run_as(case: ModuleCase, mesh: DeviceMesh, given: Given, kind: type[DividedBlock]) -> Answers:
    """Runs the block with its heads divided, as a block of another kind."""

    def parallelize(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
        assert isinstance(block, AttentionBlock)
        divide(block, mesh)
        block.__class__ = kind
        return block

    return run_module(case, mesh, given, parallelize)


class _BiasOfEveryShare(DividedBlock):
    """Each rank adds the output's bias to its share, before the shares are summed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = self.share(sum_gradients(self.norm(x), self.group)) + self.out.bias
        return x + sum_over(share, self.group)


bias_of_every_share = wrong("a term added on every rank", _ATTENTION, _WHY)(run_with(_run_as, _BiasOfEveryShare))


class _GradientOfOwnHeads(DividedBlock):
    """The gradient of the norm, and of x, comes from the rank's own heads alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum_over(self.share(self.norm(x)), self.group) + self.out.bias


gradient_of_own_heads = wrong(
    "a reduction missing in the backward",
    _ATTENTION,
    "of one token a head gathers its value, whose gradient the norm gets; one rank has all heads",
    claim="gradients_equal_unsharded",
)(run_with(_run_as, _GradientOfOwnHeads))


class _ScaledByAllFeatures(DividedBlock):
    """Scores are scaled by the rank's features, not by a head's features: wrong unless the rank has one head."""

    def gather(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        scale = (query.shape[-3] * HEAD_FEATURES) ** -0.5
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)


scaled_by_all_features = wrong(
    "wrong divisor or wrong group",
    _ATTENTION.but(world_size=1, x_shape=(2, 6)),
    "a softmax of one token is 1 whatever the scale; one rank has all features",
)(run_with(_run_as, _ScaledByAllFeatures))


class _NormOfOwnFeatures(DividedBlock):
    """The moments of a token come from the features of the rank's own heads alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = x[..., self.features] if self.features.start < self.features.stop else x
        variance, mean = torch.var_mean(own, dim=-1, correction=0, keepdim=True)
        normed = (x - mean) * torch.rsqrt(variance + self.norm.eps) * self.norm.weight + self.norm.bias
        return x + sum_over(self.share(sum_gradients(normed, self.group)), self.group) + self.out.bias


norm_of_own_features = wrong("a partial value taken for the whole", _ATTENTION, _WHY)(
    run_with(_run_as, _NormOfOwnFeatures)
)
