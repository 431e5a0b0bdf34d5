"""Models that DeepSpeed's engine trains: layers used twice, never, in some steps alone, recomputed; and in bfloat16."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Tensors = dict[str, torch.Tensor]

NARROW = torch.bfloat16


class TwiceNextToken(nn.Module):
    """Logits of a token from the token before, one layer used twice and one never.

    Args:
        reentrant: How the layer that is used twice is recomputed in the backward, as torch's checkpoint names it; None:
            it is not.
    """

    def __init__(self, *, reentrant: bool | None = None) -> None:
        super().__init__()
        self.embedding, self.hidden, self.head = nn.Embedding(8, 6), nn.Linear(6, 6), nn.Linear(6, 8)
        self.unused = nn.Linear(3, 5)
        self.reentrant = reentrant

    def layer(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.hidden(x))

    def recomputed(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return self.layer(x)
        found: torch.Tensor = checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return found

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, reduction: str = "mean") -> Tensors:
        hidden = self.recomputed(self.recomputed(self.embedding(input_ids)))
        logits = self.head(hidden).flatten(0, -2)
        return {"loss": functional.cross_entropy(logits, labels.flatten(), reduction=reduction)}


class SittingOut(nn.Module):
    """The same with a layer that only those rows pass for which `passes` is 1; None: it sits out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden, self.head = nn.Embedding(8, 6), nn.Linear(6, 6), nn.Linear(6, 8)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, passes: torch.Tensor | None, reduction: str = "mean"
    ) -> Tensors:
        hidden = self.embedding(input_ids)
        if passes is not None:
            hidden = torch.where(passes.bool()[:, None, None], torch.tanh(self.hidden(hidden)), hidden)
        logits = self.head(hidden).flatten(0, -2)
        return {"loss": functional.cross_entropy(logits, labels.flatten(), reduction=reduction)}


class NarrowLinear(nn.Linear):
    """A linear layer of parameters in bfloat16, whatever they are of, whose sums are of float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(NARROW).float()
        return functional.linear(x.float(), self.weight.to(NARROW).float(), bias)


class NarrowSums(nn.Module):
    """Integers times parameters in bfloat16, one layer used twice and one never; the sum over the batch.

    With 8 rows, each gradient is a sum of 16 products of magnitude 2 at most, which bfloat16 adds in any
    order without rounding, even four times as many.  The loss shows from which parameters it was computed.
    Every parameter has a multiple of 12 elements: others cannot be set in stage 3 (finding 101).
    """

    def __init__(self) -> None:
        super().__init__()
        self.once, self.twice, self.unused = NarrowLinear(4, 12, bias=False), NarrowLinear(4, 12), NarrowLinear(1, 12)

    def forward(self, x: torch.Tensor, factors: torch.Tensor, reduction: str = "sum") -> Tensors:
        x, factors = x.to(NARROW), factors.float()
        given = torch.stack([self.once(x), self.twice(x), self.twice(x.flip(1))])
        return {"loss": (given * factors).sum()}


def twice() -> nn.Module:
    return TwiceNextToken()


def twice_reentrant() -> nn.Module:
    return TwiceNextToken(reentrant=True)


def twice_recomputed() -> nn.Module:
    return TwiceNextToken(reentrant=False)


def sitting_out() -> nn.Module:
    return SittingOut()


def narrow() -> nn.Module:
    return NarrowSums()
