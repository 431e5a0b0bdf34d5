"""A block whose layers compute in bfloat16 and whose residual keeps the dtype of x, with the casts of FSDP2."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

NARROW = torch.bfloat16
WIDE = torch.float64
RATIO = 2.0**-8
"""The change is this small beside the residual, so the roundings of bfloat16 in the change are small too."""


class NarrowLayer(nn.Module):
    """Returns the number of outputs, the gate, and b + W (P x * gate * sign), computed in bfloat16.

    So a layer has two products, and a number before the tensors that it takes and returns. The permutation P is an
    input of integers, which no layer casts.

    Attributes:
        casts: Whether the layer casts its inputs and parameters. If not, they must be in bfloat16.
    """

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_outputs, num_inputs))
        self.bias = nn.Parameter(torch.zeros(num_outputs))
        self.casts = True

    def forward(
        self, sign: float, x: torch.Tensor, order: torch.Tensor, *, gate: torch.Tensor
    ) -> tuple[int, torch.Tensor, torch.Tensor]:
        tensors: Any = (x[..., order], gate, self.weight, self.bias)
        x, gate, weight, bias = (each.to(NARROW) for each in tensors) if self.casts else tensors
        return len(bias), gate, functional.linear(x * gate * sign, weight, bias)


class NarrowBlock(nn.Module):
    """The block y = x + f(x) / 256. Two layers compute f(x). The first feature of x is the gate of both layers.

    Attributes:
        widens: Whether the block casts y to float64, which changes no value.
    """

    def __init__(self, *, widens: bool = False) -> None:
        super().__init__()
        self.widens = widens
        self.first = NarrowLayer(2, 5)
        self.second = NarrowLayer(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = torch.arange(4, -1, -1, device=x.device)
        _, gate, hidden = self.first(-1.0, x, order[-2:], gate=x[..., :1])
        _, _, change = self.second(-1.0, hidden, order, gate=gate)
        output: torch.Tensor = x + change.to(x.dtype) * RATIO
        return output.to(WIDE) if self.widens else output


narrow_block = NarrowBlock
