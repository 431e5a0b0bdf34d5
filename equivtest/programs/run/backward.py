"""Runs the backward of a parallel module from its outputs.

Each output must be the whole output, or the rank's own rows of the output.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from equivtest.cases.subject import Given
from equivtest.errors import Misuse
from equivtest.layout import divided_dim
from equivtest.programs.case import ModuleCase, cotangent_of


def run_backward(case: ModuleCase, mesh: DeviceMesh, outputs: Mapping[str, torch.Tensor], given: Given) -> None:
    """Runs backward from the loss, or from all outputs if the module has no loss.

    The gradient of the loss is 1. The gradient of any other output is the output's cotangent. Outputs that require no
    gradient are left out.

    Raises:
        Misuse: an output is a DTensor that no rank has whole, or a DTensor of a divided batch.
        ValueError: an output's shape differs from the shape in the unsharded module.
    """
    roots = {name: outputs[name] for name in case.facts.roots if outputs[name].requires_grad}
    cotangents = {
        name: torch.ones((), device=root.device) if case.facts.loss else given[cotangent_of(name)]
        for name, root in roots.items()
    }
    if roots:
        likes = [_like(case, mesh, name, root, cotangents[name]) for name, root in roots.items()]
        torch.autograd.backward(list(roots.values()), likes)


def _like(case: ModuleCase, mesh: DeviceMesh, name: str, output: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
    """Returns this rank's cotangent as a plain tensor, or as a replicated DTensor if the output is a DTensor."""
    cotangent = cotangent.to(output.dtype)
    if not isinstance(output, DTensor):
        cotangent = cotangent if output.dim() or cotangent.numel() != 1 else cotangent.reshape(())
        _require_shape(case, mesh, name, tuple(output.shape), tuple(cotangent.shape))
        return cotangent
    if case.has_own_rows:
        raise Misuse(
            f"{case.parallelize}: with a divided batch each rank must return its own rows as a plain tensor, got a "
            f"DTensor with placements {output.placements}: call to_local on it"
        )
    if any(not placement.is_replicate() for placement in output.placements):
        raise Misuse(
            f"the parallel module must return its whole output on every rank, got a DTensor with placements "
            f"{output.placements}: redistribute it to Replicate"
        )
    _require_shape(case, mesh, name, tuple(output.shape), tuple(cotangent.shape))
    return DTensor.from_local(cotangent, output.device_mesh, [Replicate()] * output.device_mesh.ndim, run_check=False)


def _require_shape(
    case: ModuleCase, mesh: DeviceMesh, name: str, shape: tuple[int, ...], right: tuple[int, ...]
) -> None:
    """Raises ValueError, and not Misuse, for a wrong shape, so that the harness searches for the smallest case."""
    if shape == right:
        return
    rank = 0
    for place, size in zip(mesh.get_coordinate() or (), case.mesh_shape, strict=False):
        rank = rank * size + place
    dim = divided_dim(right, shape, case.mesh_shape, rank)
    is_own = "this rank's rows of " if case.has_own_rows else ""
    message = f"{case.parallelize}: {name} has shape {shape}, but {is_own}the unsharded module's output has {right}"
    if dim is None:
        raise ValueError(f"{message}: return the unsharded module's whole output on every rank")
    rows = ". If each rank has different rows, pass batch='mean of parts'"
    raise ValueError(
        f"{message}: {shape} is this rank's shard along dim {dim}: gather it (all_gather, full_tensor() of a "
        f"DTensor, output_layouts=Replicate() in a plan){'' if dim or case.has_own_rows else rows}"
    )
