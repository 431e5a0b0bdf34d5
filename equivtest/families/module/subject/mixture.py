"""Parameters of which each is held in another way: by all ranks, divided along one axis or both, by some, by one.

Every parameter's gradient is a piece of x, so that each counts in a norm of all, and none is like another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

AXES = ("dp", "tp")
WHOLE, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)

SHAPES = {
    "whole": (3,), "scalar": (), "data": (7, 2), "tensor": (2, 7), "both": (7, 7), "nested": (16, 1),
    "frozen": (7, 1), "unused": (7, 2),
}  # fmt: skip
"""Sizes of 7 leave none of four ranks without elements, and are even for one rank alone."""
SHORT = {"short": (1, 2), "long": (5, 1)}
"""Some of two or more ranks have none of the first, one of four has none of the second."""
PLAIN = {"experts": (5, 2), "first_stage": (2,), "last_stage": (3, 1)}
DIVIDED_FIRST = {"both": SHAPES["both"], **SHAPES}

PLACED: Mapping[str, tuple[Placement, Placement]] = {
    "whole": (WHOLE, WHOLE), "scalar": (WHOLE, WHOLE), "data": (ROWS, WHOLE), "tensor": (WHOLE, COLUMNS),
    "both": (ROWS, COLUMNS), "nested": (ROWS, ROWS), "frozen": (ROWS, WHOLE), "unused": (ROWS, WHOLE),
    "short": (ROWS, WHOLE), "long": (WHOLE, ROWS),
}  # fmt: skip


class Mixture(nn.Module):
    """The sum of the products of parameters and of pieces of x.

    Attributes:
        shares: Of some parameters the function that makes a rank's share of a piece of x.
        groups: Of plain parameters of which no two ranks of a group hold the same, that group.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape), requires_grad=name != "frozen"))
        self.sizes = {name: torch.Size(shape) for name, shape in shapes.items() if name != "unused"}
        self.shares: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
        self.groups: dict[str, distributed.ProcessGroup] = {}

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        pieces = torch.split(x, [size.numel() for size in self.sizes.values()])
        terms = [
            self.term(name, piece.reshape(size)) for (name, size), piece in zip(self.sizes.items(), pieces, strict=True)
        ]
        return {"loss": torch.stack(terms).sum()}

    def term(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        """What a parameter adds to the loss, on every rank."""
        parameter = cast("nn.Parameter | None", getattr(self, name))
        groups = [self.groups[name]] if name in self.groups else []
        if isinstance(parameter, DTensor):  # whose products lose their layout where a rank has nothing, finding 4
            groups = [
                parameter.device_mesh.get_group(axis)
                for axis, placement in enumerate(parameter.placements)
                if placement.is_shard()
            ]
        own = piece.new_zeros(())
        if parameter is not None:
            own = (local(parameter) * local(self.shares.get(name, torch.clone)(piece))).sum()
        for group in groups:
            own = summed(own, group)
        return own


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it; the gradient of that is divided alike."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Summed(torch.autograd.Function):
    """The sum over a group, each of whose ranks has the gradient of the sum as that of its own term."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: distributed.ProcessGroup) -> torch.Tensor:
        total = own.clone()
        distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*cotangents, None)


def summed(own: torch.Tensor, group: distributed.ProcessGroup) -> torch.Tensor:
    total: torch.Tensor = Summed.apply(own, group)  # type: ignore[no-untyped-call]  # torch 2.13.0 has it untyped
    return total


def mixture() -> Mixture:
    return Mixture(SHAPES)


def divided_first() -> Mixture:
    """torch's GradScaler asks over the axes alone that divide the first gradient, finding 64."""
    return Mixture(DIVIDED_FIRST)


def with_empty_shards() -> Mixture:
    """Without them torch hangs for the largest magnitude, finding 23."""
    return Mixture(SHAPES | SHORT)


def grouped() -> Mixture:
    return Mixture(SHAPES | PLAIN)


def grouped_with_empty_shards() -> Mixture:
    return Mixture(SHAPES | SHORT | PLAIN)


SIZES = {
    build.__name__: sum(size.numel() for size in build().sizes.values())
    for build in (mixture, divided_first, with_empty_shards, grouped, grouped_with_empty_shards)
}
"""How many elements x has, by the function that makes the module."""


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """Whose updates are as long as the gradients, unlike those of Adam."""
    return torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.5)


def on_one_mesh(module: Mixture, mesh: DeviceMesh) -> nn.Module:
    """Every parameter a DTensor of the whole mesh."""
    for name, parameter in list(module.named_parameters()):
        _distribute(module, name, parameter, mesh, PLACED[name])
    return module


def over_meshes(module: Mixture, mesh: DeviceMesh) -> nn.Module:
    """DTensors of both axes, of one and of the other; plain tensors that all ranks have, or some, or one."""
    for name, parameter in list(module.named_parameters()):
        if name in ("both", "nested", "long"):
            _distribute(module, name, parameter, mesh, PLACED[name])
        elif name in ("data", "short", "frozen", "unused"):
            _distribute(module, name, parameter, mesh["dp"], PLACED[name][:1])
        elif name == "tensor":
            _distribute(module, name, parameter, mesh["tp"], PLACED[name][1:])
    _hold_experts(module, mesh["tp"])
    _hold_stages(module, mesh["dp"])
    return module


def _distribute(
    module: Mixture, name: str, parameter: nn.Parameter, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> None:
    def shared(tensor: torch.Tensor) -> DTensor:
        return distribute_tensor(tensor, mesh, placements, src_data_rank=None)

    module.shares[name] = shared
    module.register_parameter(name, nn.Parameter(shared(parameter.detach()), parameter.requires_grad))


def _hold_experts(module: Mixture, mesh: DeviceMesh) -> None:
    """Each rank of the axis has experts of its own, or none."""

    def shared(tensor: torch.Tensor) -> torch.Tensor:
        parts = tensor.tensor_split(mesh.size())
        return parts[mesh.get_local_rank()].clone()

    module.shares["experts"], module.groups["experts"] = shared, mesh.get_group()
    module.register_parameter("experts", nn.Parameter(shared(module.get_parameter("experts").detach())))


def _hold_stages(module: Mixture, mesh: DeviceMesh) -> None:
    """The first rank of the axis has the first stage, the last the last."""
    for name, holder in (("first_stage", 0), ("last_stage", mesh.size() - 1)):
        module.groups[name] = mesh.get_group()
        if mesh.get_local_rank() != holder:
            module.register_parameter(name, None)
