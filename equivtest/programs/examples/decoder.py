"""A decoder of some layers, too deep for a bound of the whole module.

Source: Touvron et al., LLaMA (2023), section 2.2, for the layer, without rotary embeddings.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

FEATURES, HEADS, HIDDEN = 24, 12, 24
"""With 1, 2, 3 or 4 ranks, all ranks have equally many heads, of two features, and equally many hidden features."""


class Attention(nn.Module):
    """Causal attention in B sequences of T tokens each. The input x has the shape (B, T, FEATURES).

    The shapes of the projections determine the number of heads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:-1], -1, FEATURES // HEADS)
        query, key, value = (part(x).view(shape).transpose(1, 2) for part in (self.query, self.key, self.value))
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: torch.Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return output


class GatedLinear(nn.Module):
    """The gated linear unit W3 (silu(W1 x) * W2 x)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(FEATURES, HIDDEN, bias=False)
        self.up = nn.Linear(FEATURES, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, FEATURES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return output


class Layer(nn.Module):
    """The layer y = x + attention(norm(x)), then y + gated(norm(y))."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(FEATURES, eps=1e-5), Attention()
        self.mlp_norm, self.mlp = nn.RMSNorm(FEATURES, eps=1e-5), GatedLinear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        output: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return output


class Decoder(nn.Module):
    """A stack of layers, followed by a norm."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.norm = nn.RMSNorm(FEATURES, eps=1e-5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        output: torch.Tensor = self.norm(x)
        return output


def decoder() -> nn.Module:
    return Decoder(2)
