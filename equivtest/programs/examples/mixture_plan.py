"""Distributes parameters in different ways.

Some parameters are whole, some are divided along one axis or both, and some are only on some ranks or on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from equivtest.programs.examples.attention_plan import sum_over
from equivtest.programs.examples.mixture import Mixture

WHOLE, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)

PLACED: Mapping[str, tuple[Placement, Placement]] = {
    "whole": (WHOLE, WHOLE), "scalar": (WHOLE, WHOLE), "data": (ROWS, WHOLE), "tensor": (WHOLE, COLUMNS),
    "both": (ROWS, COLUMNS), "nested": (ROWS, ROWS), "frozen": (ROWS, WHOLE), "unused": (ROWS, WHOLE),
    "short": (ROWS, WHOLE), "long": (WHOLE, ROWS),
}  # fmt: skip


class Divided(Mixture):
    """The part of a mixture on one rank.

    Attributes:
        shares: Name of a divided parameter -> function from the parameter's slice of x to this rank's part of the
            slice.
        groups: Name of a plain parameter -> group, if each rank of the group has a different part of the parameter.
    """

    def __init__(self, whole: Mixture) -> None:
        super().__init__({}, whole.adam)
        for name, parameter in whole.named_parameters():
            self.register_parameter(name, parameter)
        self.sizes = whole.sizes
        self.shares: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
        self.groups: dict[str, distributed.ProcessGroup] = {}

    def term(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        """Returns a parameter's term in the loss. The term is the same on every rank."""
        parameter = cast("nn.Parameter | None", getattr(self, name))
        groups = [self.groups[name]] if name in self.groups else []
        if isinstance(parameter, DTensor):  # products of DTensors lose their layout if a rank has no element, finding 4
            groups = [
                parameter.device_mesh.get_group(axis)
                for axis, placement in enumerate(parameter.placements)
                if placement.is_shard()
            ]
        own = piece.new_zeros(())
        if parameter is not None:
            own = (local(parameter) * local(self.shares.get(name, torch.clone)(piece))).sum()
        for group in groups:
            own = sum_over(own, group)
        return own


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def on_one_mesh(whole: Mixture, mesh: DeviceMesh) -> nn.Module:
    module = Divided(whole)
    for name, parameter in list(module.named_parameters()):
        _distribute(module, name, parameter, mesh, PLACED[name])
    return module


def over_meshes(whole: Mixture, mesh: DeviceMesh) -> nn.Module:
    """Makes some parameters DTensors on both axes, on 'dp' alone or on 'tp' alone.

    All other parameters are plain tensors. A plain tensor is on all ranks, on some ranks or on one rank.
    """
    module = Divided(whole)
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
    module: Divided, name: str, parameter: nn.Parameter, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> None:
    def shared(tensor: torch.Tensor) -> DTensor:
        # each rank cuts its own part without a collective: distribute_tensor asks rank 0 in torch 2.6
        same = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return same.redistribute(placements=placements)

    module.shares[name] = shared
    module.register_parameter(name, nn.Parameter(shared(parameter.detach()), parameter.requires_grad))


def _hold_experts(module: Divided, mesh: DeviceMesh) -> None:
    def shared(tensor: torch.Tensor) -> torch.Tensor:
        parts = tensor.tensor_split(mesh.size())
        return parts[mesh.get_local_rank()].clone()

    module.shares["experts"], module.groups["experts"] = shared, mesh.get_group()
    module.register_parameter("experts", nn.Parameter(shared(module.get_parameter("experts").detach())))


def _hold_stages(module: Divided, mesh: DeviceMesh) -> None:
    for name, holder in (("first_stage", 0), ("last_stage", mesh.size() - 1)):
        module.groups[name] = mesh.get_group()
        if mesh.get_local_rank() != holder:
            module.register_parameter(name, None)
