"""An attention block, whose norm and softmax round."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

HEAD_FEATURES = 2


class AttentionBlock(nn.Module):
    """The causal block y = x + W attention(norm(x)) + b, in which each head has two features.

    W and b are the weight and the bias of `out`. The input x has the shape (..., T, F), with T tokens of F features.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        features = num_heads * HEAD_FEATURES
        self.norm = nn.LayerNorm(features)
        self.query = nn.Linear(features, features)
        self.key = nn.Linear(features, features)
        self.value = nn.Linear(features, features)
        self.out = nn.Linear(features, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended = self.attend(self.norm(x), slice(None))
        output: torch.Tensor = x + self.out(attended)
        return output

    def attend(self, x: torch.Tensor, features: slice) -> torch.Tensor:
        """Returns the output of the heads with these features. Its shape is (..., T tokens, number of features)."""
        projected = [
            functional.linear(x, layer.weight[features], layer.bias[features])
            for layer in (self.query, self.key, self.value)
        ]
        shape = (*x.shape[:-1], projected[0].shape[-1] // HEAD_FEATURES, HEAD_FEATURES)
        query, key, value = (each.view(shape).transpose(-2, -3) for each in projected)  # (..., H, T, HEAD_FEATURES)
        if not query.numel():  # an empty result, so that every parameter still gets a gradient, which the ranks sum
            return (query + key + value).transpose(-2, -3).flatten(-2)
        return self.gather(query, key, value).transpose(-2, -3).flatten(-2)

    def gather(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Computes the attention of each head separately. All tensors have the shape (..., H, T, HEAD_FEATURES)."""
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def attention_block() -> nn.Module:
    """Makes a block of three heads, which ranks divide unevenly. One of four ranks has no head."""
    return AttentionBlock(3)
