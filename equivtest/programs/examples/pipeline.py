"""A chain of layers that a pipeline divides into stages."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

NUM_LAYERS, NUM_FEATURES = 8, 2


class ResidualLayer(nn.Linear):
    """The layer y = x + W relu(W x + b) + b, which uses its parameters twice."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input + super().forward(functional.relu(super().forward(input)))


class Chain(nn.Module):
    """Residual layers one after the other, with the loss of a batch of inputs x and weights, both of shape (N, ..., F).

    The bias of the last layer but one is frozen.

    Attributes:
        takes_mean: True if the loss is the mean over the N rows, and False if it is the sum.
        adds_weights: True if the weights are added to the input of each layer.
    """

    def __init__(self, *, takes_mean: bool, adds_weights: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ResidualLayer(NUM_FEATURES, NUM_FEATURES) for _ in range(NUM_LAYERS))
        self.layers[-2].bias.requires_grad = False
        self.takes_mean, self.adds_weights = takes_mean, adds_weights

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x + weights if self.adds_weights else x)
        return {"loss": self.loss(x, weights), "output": x.detach()}

    def loss(self, output: torch.Tensor, weights: torch.Tensor, num_rows: int = 0) -> torch.Tensor:
        """Returns the loss of some rows. A mean divides by `num_rows`, or by the number of these rows if it is 0."""
        total = (output * weights).sum()
        return total / (num_rows or len(output)) if self.takes_mean else total


def chain(*, takes_mean: bool) -> nn.Module:
    return Chain(takes_mean=takes_mean)


def mean_chain(*, adds_weights: bool = False) -> nn.Module:
    return Chain(takes_mean=True, adds_weights=adds_weights)
