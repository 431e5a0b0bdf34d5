"""Defines a decoder, two ways to make it parallel, and four defects, each in one submodule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

VOCAB, FEATURES, HEADS, HIDDEN, LAYERS, LONGEST = 48, 32, 8, 48, 4, 16
HEAD_FEATURES = FEATURES // HEADS


class Attention(nn.Module):
    """Causal attention with rotary positions.  Its projections determine the number of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:-1], -1, HEAD_FEATURES)
        query, key, value = (part(x).view(shape).transpose(1, 2) for part in (self.query, self.key, self.value))
        query, key = rotated(query, angles), rotated(key, angles)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: torch.Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return output


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotates pairs of features by the angles of their positions.  Source: Su et al., RoFormer (2021), equation 34."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class GatedLinear(nn.Module):
    """Computes W3 (silu(W1 x) * W2 x)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(FEATURES, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, FEATURES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return output


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(FEATURES, eps=1e-5), Attention()
        self.mlp_norm, self.mlp = nn.RMSNorm(FEATURES, eps=1e-5), GatedLinear()

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        output: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return output


class Decoder(nn.Module):
    angles: torch.Tensor

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, FEATURES)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.norm = nn.RMSNorm(FEATURES, eps=1e-5)
        self.head = nn.Linear(FEATURES, VOCAB, bias=False)
        frequencies = 100.0 ** -(torch.arange(HEAD_FEATURES // 2) / (HEAD_FEATURES // 2))
        self.register_buffer("angles", torch.outer(torch.arange(LONGEST), frequencies), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x, self.angles[: ids.shape[1]])
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def decoder() -> nn.Module:
    return Decoder(LAYERS)


def deep() -> nn.Module:
    return Decoder(3 * LAYERS)


def far() -> nn.Module:
    """Builds a decoder that takes far more memory than one of its layers."""
    return Decoder(12 * LAYERS)


def tensor_parallel(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan: Any = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    plan |= {f"mlp.{name}": ColwiseParallel() for name in ("gate", "up")}
    plan |= {"attention.out": RowwiseParallel(), "mlp.down": RowwiseParallel()}
    for layer in module.get_submodule("layers").children():
        parallelize_module(layer, mesh, plan)
    return parallelize_module(module, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})


def fsdp2(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in module.get_submodule("layers").children():
        fully_shard(layer, mesh=mesh)
    sharded: nn.Module = fully_shard(module, mesh=mesh)  # type: ignore[assignment]  # of both classes
    return sharded


class _Doubled(torch.autograd.Function):
    """Returns x unchanged and doubles its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 2 * gradient


Spoil = Callable[[torch.Tensor, DeviceMesh], torch.Tensor]

SPOILS: dict[str, tuple[str, Spoil]] = {
    "average": ("layers.1.mlp.down", lambda given, mesh: given / mesh.size()),
    "zeros": ("layers.3.mlp_norm", lambda given, mesh: given * (mesh.get_local_rank() != 1)),
    "doubled": ("layers.2.attention.key", lambda given, mesh: _Doubled.apply(given)),  # type: ignore[no-any-return]
    "slightly": ("layers.0.attention.out", lambda given, mesh: given * (1 + 2.0**-3)),
}
"""Name of a defect -> (name of the spoiled submodule, function that changes its output)."""


def spoiled(module: nn.Module, mesh: DeviceMesh, name: str) -> nn.Module:
    part, spoil = SPOILS[name]
    hook: Any = lambda _, __, given: spoil(given, mesh)  # noqa: E731
    module.get_submodule(part).register_forward_hook(hook)
    return module


def _planted(name: str) -> Callable[[nn.Module, DeviceMesh], nn.Module]:
    return lambda module, mesh: spoiled(tensor_parallel(module, mesh), mesh, name)


average, zeros, doubled, slightly = map(_planted, SPOILS)
