"""Functions that raise as a newcomer's do."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh


def without_package() -> nn.Module:
    import nosuchpackage  # noqa: F401  # type: ignore[import-not-found]

    return nn.Linear(3, 2)


def without_device() -> nn.Module:
    raise AssertionError("Torch not compiled with CUDA enabled")  # the text of torch


def without_reason() -> nn.Module:
    return nn.Linear(3, {}["out"])


class Heads(nn.Module):
    """Three heads of two features."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.view(*x.shape[:-1], 3, 2)
        return y.flatten(-2)


def as_it_is(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return module


def with_odd_heads() -> None:
    Heads()(torch.ones(2, 3))
