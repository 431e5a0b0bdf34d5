"""A gated block, the simplest module of the shipped properties.

Source: Shazeer, GLU Variants Improve Transformer (2020), equation 6, with ReLU.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class GatedBlock(nn.Module):
    """The block y = x + W3 (relu(W1 x) * (W2 x)) + b."""

    def __init__(self, num_features: int, num_hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(num_features, num_hidden, bias=False)
        self.up: nn.Module = nn.Linear(num_features, num_hidden, bias=False)
        self.down = nn.Linear(num_hidden, num_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = x + self.change(x)
        return output

    def change(self, x: torch.Tensor) -> Any:
        return self.down(functional.relu(self.gate(x)) * self.up(x))


class TwoOutputBlock(GatedBlock):
    """The block (W3 relu(W1 x) + b, W2 x). No parameter takes part in both outputs."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(functional.relu(self.gate(x))), self.up(x)


class RepeatedBlock(GatedBlock):
    """The block y = x + W3 (relu(W1 x) * (W2 x)) + W3 relu(W1 x) + 2 b. Two of its layers run twice in a forward."""

    def change(self, x: torch.Tensor) -> Any:
        return super().change(x) + self.down(functional.relu(self.gate(x)))


@dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor


class FormedBlock(TwoOutputBlock):
    """The outputs of a TwoOutputBlock in another form, and a parameter that takes part in no output.

    Args:
        form: 'tuple', 'dict', 'dataclass', or 'nested' for a dict of a list and of a tuple with a dict.
    """

    def __init__(self, num_features: int, num_hidden: int, form: str) -> None:
        super().__init__(num_features, num_hidden)
        self.unused = nn.Parameter(torch.ones(num_features))
        self.form = form

    def forward(self, x: torch.Tensor) -> Any:
        first, second = super().forward(x)
        match self.form:
            case "dict":
                return {"first": first, "second": second}
            case "dataclass":
                return Pair(first, second)
            case "nested":
                return {"first": [first], "others": ({"second": second},)}
        return first, second


class Difference(nn.Module):
    """The layer (W1 - W2) x, whose weight has the shape (num_outputs, 2, num_inputs)."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_outputs, 2, num_inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight[:, 0] - self.weight[:, 1])


class DeepBlock(GatedBlock):
    """The block y = x + W3 (relu(W1 x) * (W2 - W4) x) + b. The weights W2 and W4 are one parameter of three dims."""

    def __init__(self, num_features: int, num_hidden: int) -> None:
        super().__init__(num_features, num_hidden)
        self.up = Difference(num_features, num_hidden)


class BufferedBlock(GatedBlock):
    """The block y = x + f (W3 (relu(W1 x) * (W2 x)) + b), where f is a buffer and b is frozen."""

    factor: torch.Tensor

    def __init__(self, num_features: int, num_hidden: int) -> None:
        super().__init__(num_features, num_hidden)
        self.down.bias.requires_grad = False
        self.register_buffer("factor", torch.tensor(-1.0))

    def change(self, x: torch.Tensor) -> Any:
        return super().change(x) * self.factor


class SignedBlock(BufferedBlock):
    """A buffered block whose change has other signs, which a buffer with one dim keeps."""

    signs: torch.Tensor

    def __init__(self, num_features: int, num_hidden: int) -> None:
        super().__init__(num_features, num_hidden)
        self.register_buffer("signs", torch.ones(num_features).index_fill(0, torch.tensor(0), -1.0))

    def change(self, x: torch.Tensor) -> Any:
        return super().change(x) * self.signs


class Scale(nn.Module):
    """Multiplies each feature by a weight and adds a bias, as a norm does last."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.bias


class ScaledBlock(GatedBlock):
    """The block x + W3 (relu(W1 z) * (W2 z)) + b with z = w * x + c."""

    def __init__(self, num_features: int, num_hidden: int) -> None:
        super().__init__(num_features, num_hidden)
        self.scale = Scale(num_features)

    def change(self, x: torch.Tensor) -> Any:
        return super().change(self.scale(x))


class TwoBlocks(nn.Module):
    """The pair (f(x), g(x)) of two blocks f and g with the same shapes. In each, another weight is frozen."""

    def __init__(self, num_features: int, num_hidden: int) -> None:
        super().__init__()
        self.first = GatedBlock(num_features, num_hidden)
        self.second = GatedBlock(num_features, num_hidden)
        for layer in (self.first.gate, self.second.down):
            layer.weight.requires_grad = False

    def forward(self, x: torch.Tensor) -> Any:
        return self.first(x), self.second(x)


class Each(nn.Module):
    """The pair (x + f relu(x), m relu(m)) and a number s.

    m and s are passed by keyword, and the numbers f and s are no tensors.
    """

    def forward(
        self, factor: float, x: torch.Tensor, *, sign: float, memory: torch.Tensor
    ) -> tuple[torch.Tensor, float, torch.Tensor]:
        return x + factor * functional.relu(x), sign, memory * functional.relu(memory)


class ScaledPair(nn.Module):
    """The pair (z + 2 relu(z), -m relu(m)) with z = w * x + c."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.scale = Scale(num_features)
        self.each = Each()

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> Any:
        first, sign, second = self.each(2.0, self.scale(x), sign=-1.0, memory=memory)
        return first, sign * second


def gated_block() -> nn.Module:
    """Makes a block with five hidden features, which ranks divide unevenly. One of four ranks has no feature."""
    return GatedBlock(2, 5)


def buffered_block() -> nn.Module:
    return BufferedBlock(2, 5)


def signed_block() -> nn.Module:
    return SignedBlock(2, 5)


def two_output_block() -> nn.Module:
    return TwoOutputBlock(2, 5)


def deep_block() -> nn.Module:
    return DeepBlock(2, 5)


def repeated_block() -> nn.Module:
    return RepeatedBlock(2, 5)


def formed_block(form: str) -> nn.Module:
    return FormedBlock(2, 5, form)


def two_blocks() -> nn.Module:
    return TwoBlocks(2, 5)


def scaled_block() -> nn.Module:
    """Makes a block with seven hidden features, so that each of four ranks has one."""
    return ScaledBlock(2, 7)


def scaled_pair() -> nn.Module:
    return ScaledPair(2)


def even_block() -> nn.Module:
    """Makes a block with four hidden features, which all ranks divide evenly."""
    return ScaledBlock(2, 4)


@torch.no_grad()
def spoil(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.fill_(torch.nan)
