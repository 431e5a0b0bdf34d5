"""A model of the next token, whose loss is a mean over all targets that are not ignored."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

VOCAB, FEATURES, IGNORED = 7, 6, -100


class NextToken(nn.Module):
    """Predicts each token from the previous token, with the cross entropy of the targets that are not ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, FEATURES)
        self.norm = nn.LayerNorm(FEATURES)
        self.head = nn.Linear(FEATURES, VOCAB)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> dict[str, torch.Tensor]:
        logits = self.logits(ids).flatten(0, -2)
        loss = functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction=reduction)
        return {"loss": loss}

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(torch.tanh(self.norm(self.embedding(ids))))
        return logits


class ScaledNextToken(NextToken):
    """Multiplies the logits by a buffer."""

    factor: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(0.5))

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        return super().logits(ids) * self.factor


def next_token(*, ties: bool = False) -> nn.Module:
    """Makes a model whose embedding and head share their weight if `ties` is True."""
    model = NextToken()
    if ties:
        model.head.weight = model.embedding.weight
    return model


def scaled_next_token() -> nn.Module:
    return ScaledNextToken()
