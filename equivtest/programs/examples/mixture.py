"""A module with parameters of many shapes.

The gradient of each parameter is a slice of x, so each parameter affects the total norm.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

MAX_NORM = 0.5
AXES = ("dp", "tp")

SHAPES = {
    "whole": (3,), "scalar": (), "data": (7, 2), "tensor": (2, 7), "both": (7, 7), "nested": (16, 1),
    "frozen": (7, 1), "unused": (7, 2),
}  # fmt: skip
"""Shapes of the parameters; a size of 7 is uneven on two, three and four ranks, and leaves no rank empty."""
SHORT = {"short": (1, 2), "long": (5, 1)}
"""Shapes that leave a rank without elements: `short` one of two ranks or more, `long` one of four ranks."""
PLAIN = {"experts": (5, 2), "first_stage": (2,), "last_stage": (3, 1)}
DIVIDED_FIRST = {"both": SHAPES["both"], **SHAPES}


class Mixture(nn.Module):
    """The sum of the elementwise products of each parameter with its slice of x.

    Attributes:
        adam: How Adam trains the module: 'foreach' or 'fused'. If '', SGD trains the module.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], adam: str = "") -> None:
        super().__init__()
        self.adam = adam
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape), requires_grad=name != "frozen"))
        self.sizes = {name: torch.Size(shape) for name, shape in shapes.items() if name != "unused"}

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        pieces = torch.split(x, [size.numel() for size in self.sizes.values()])
        terms = [
            self.term(name, piece.reshape(size)) for (name, size), piece in zip(self.sizes.items(), pieces, strict=True)
        ]
        return {"loss": torch.stack(terms).sum()}

    def term(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        return (self.get_parameter(name) * piece).sum()


def mixture() -> Mixture:
    return Mixture(SHAPES)


def divided_first(*, adam: str = "") -> Mixture:
    """Makes a module that shows finding 74.

    In this finding, torch's GradScaler reduces only over the axes that divide the first gradient.
    """
    return Mixture(DIVIDED_FIRST, adam)


def with_empty_shards() -> Mixture:
    """Makes a module with empty shards that shows finding 23.

    In this finding, torch hangs while it computes the norm of type math.inf, the largest magnitude.
    """
    return Mixture(SHAPES | SHORT)


def grouped() -> Mixture:
    return Mixture(SHAPES | PLAIN)


def grouped_with_empty_shards() -> Mixture:
    return Mixture(SHAPES | SHORT | PLAIN)


SIZES = {
    build.__name__: sum(size.numel() for size in build().sizes.values())
    for build in (mixture, divided_first, with_empty_shards, grouped, grouped_with_empty_shards)
}
"""Number of elements of x, by the function that makes the module."""


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """Makes the optimizer SGD. Its updates are in proportion to the gradients, unlike the updates of Adam.

    The optimizer updates one tensor after the other. With `foreach=True`, which is the default on devices other than
    the CPU, torch refuses DTensors among plain tensors (2.13.0).
    """
    return torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.5, foreach=False)


def sgd_or_adam(module: Mixture) -> torch.optim.Optimizer:
    """Makes the optimizer that the module names. Unlike SGD, Adam counts its updates."""
    if not module.adam:
        return sgd(module)
    return torch.optim.Adam(module.parameters(), lr=0.5, eps=0.125, **{module.adam: True})  # type: ignore[arg-type]
