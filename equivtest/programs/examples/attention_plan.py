"""Divides the heads of an attention block among the ranks by hand.

Source: Vaswani et al., Attention Is All You Need (2017), section 3.2, with the norm first, as in Xiong et al., On Layer
Normalization in the Transformer Architecture (2020). For the division, with one sum over the ranks in the forward and
one in the backward: Shoeybi et al., Megatron-LM (2019), section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from equivtest.programs.examples.attention import HEAD_FEATURES, AttentionBlock

Group = dist.ProcessGroup


class DividedBlock(AttentionBlock):
    """An attention block that computes some heads on each rank.  Parameters stay whole on every rank."""

    group: Group
    features: slice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = self.share(sum_gradients(self.norm(x), self.group))
        output: torch.Tensor = x + sum_over(share, self.group) + self.out.bias
        return output

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the share of the output that comes from this rank's heads, without the bias."""
        return functional.linear(self.attend(x, self.features), self.out.weight[:, self.features])


def heads_divided(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Makes each rank compute some of the heads. Hooks sum the gradients of tensors that a rank uses only in part."""
    assert isinstance(block, AttentionBlock)
    divide(block, mesh)
    block.__class__ = DividedBlock
    return block


def divide(block: AttentionBlock, mesh: DeviceMesh) -> None:
    group, num_features = mesh.get_group(), block.out.in_features
    each = -(-num_features // HEAD_FEATURES // mesh.size()) * HEAD_FEATURES
    start = min(each * mesh.get_local_rank(), num_features)
    block.features = slice(start, min(start + each, num_features))  # type: ignore[assignment]
    block.group = group  # type: ignore[assignment]
    used_in_part = [block.out.weight, *block.query.parameters(), *block.key.parameters(), *block.value.parameters()]
    for parameter in used_in_part:
        parameter.register_hook(lambda gradient: reduced(gradient, group))  # type: ignore[no-untyped-call]


def reduced(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    summed = tensor.contiguous().clone()
    dist.all_reduce(summed, group=group)
    return summed


class _SumOver(torch.autograd.Function):
    """Sums over the ranks in the forward. In the backward, each term gets the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        return reduced(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _SumGradients(torch.autograd.Function):
    """Passes the tensor on unchanged in the forward. In the backward, sums the ranks' shares of the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return reduced(gradients[0], ctx.group), None


def sum_over(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    summed: torch.Tensor = _SumOver.apply(tensor, group)  # type: ignore[no-untyped-call]
    return summed


def sum_gradients(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    handed: torch.Tensor = _SumGradients.apply(tensor, group)  # type: ignore[no-untyped-call]
    return handed
