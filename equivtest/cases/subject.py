"""Functions for many subjects: they add layouts to results, make DTensors without a collective, or run a backward."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from equivtest import layout
from equivtest.cases.case import Case
from equivtest.cases.operands import partial_axes
from equivtest.tensors import Placed

Given = Mapping[str, torch.Tensor]
Answers = dict[str, DTensor | Placed | None]


def run_backward(output: torch.Tensor, case: Case, mesh: DeviceMesh, cotangent: torch.Tensor) -> None:
    """Runs backward from the output with this rank's cotangent, which has the output's shape and layout."""
    if output.requires_grad:
        if isinstance(output, DTensor):
            cotangent = as_dtensor(cotangent, case, "output", mesh)
        torch.autograd.backward(output, cotangent)


def require_form(output: torch.Tensor, *, is_plain: bool) -> None:
    """Raises TypeError if the output is a DTensor and must be a plain tensor, or the other way round."""
    if isinstance(output, DTensor) == is_plain:
        expected = "a plain tensor" if is_plain else "a DTensor"
        raise TypeError(f"the output must be {expected}, got {type(output).__name__}")


def under_contract(case: Case, found: Mapping[str, torch.Tensor | None]) -> Answers:
    """Returns the tensors as a subject returns them: plain tensors get the layout of the case's contract."""
    contract = case.layouts()
    return {
        name: tensor if tensor is None or isinstance(tensor, DTensor) else Placed(tensor, contract[name])
        for name, tensor in found.items()
    }


def as_dtensor(local: torch.Tensor, case: Case, name: str, mesh: DeviceMesh) -> DTensor:
    """Makes a DTensor with the shape and layout that the contract states for `name`, without a collective."""
    source = "cotangent" if name == "output" else name
    placements = torch_placements(case, name)
    return dtensor_of(
        local, mesh, placements, case.tensors[name].shape, is_contiguous=case.tensors[source].is_contiguous
    )


def dtensor_of(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: tuple[int, ...],
    *,
    is_contiguous: bool,
    **options: Any,
) -> DTensor:
    """Makes a DTensor of a global shape from this rank's local tensor, without a collective.

    `options` are further arguments of DTensor.from_local. Only `run_check=True` calls collectives.

    Its strides come from a whole tensor in the harness's memory format.  If a shard is empty or has dims of size 1,
    strides from the local tensor would differ between ranks, and then the ranks would call different collectives.
    """
    whole = torch.empty(shape, device="meta")
    if whole.dim() > 1 and not is_contiguous:
        whole = whole.transpose(-1, -2).contiguous().transpose(-1, -2)
    options = {"run_check": False, "shape": whole.shape, "stride": whole.stride(), **options}
    return DTensor.from_local(local, mesh, placements, **options)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a detached copy of a tensor without a collective.

    `DTensor.clone` would add the operands of a partial tensor in a collective.  Source: torch.distributed.tensor
    (2.13.0), clone of Partial(), which gives Replicate().
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    local = tensor.to_local().detach().clone()
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


@functools.cache
def flattened_mesh(device_type: str, mesh_shape: tuple[int, ...]) -> DeviceMesh:
    """Makes a mesh of the whole world in the harness's order, and flattens it to one more axis with the name 'both'.

    A flattened mesh stays with its root mesh for good.  So the function does not flatten the harness's own mesh.
    """
    mesh = init_device_mesh(device_type, mesh_shape, mesh_dim_names=("outer", "inner"))
    mesh._flatten("both")
    return mesh


def own_operand(given: torch.Tensor, whole: layout.Layout) -> torch.Tensor:
    """Returns a view of this rank's operand, without the leading dims of size 1 in its shard `given`: see `stacked`."""
    return given.detach()[(0,) * len(partial_axes(whole))]


def torch_placement(case: Case, name: str) -> Placement:
    """Converts the contract's only placement of tensor `name` to a placement of torch: see `torch_placements`."""
    [placement] = torch_placements(case, name)
    return placement


def torch_placements(case: Case, name: str) -> list[Placement]:
    """Converts the contract's placements of tensor `name` to placements of torch.

    If a placement shards the last dim, that dim is -1, as users write it.
    """
    last = len(case.shapes()[name]) - 1
    return [
        Shard(-1 if placement.dim == last else placement.dim) if isinstance(placement, layout.Shard) else Replicate()
        for placement in case.layouts()[name].placements
    ]


def placements_of(whole: layout.Layout) -> list[Placement]:
    return list(map(placement_of, whole.placements))


def placement_of(placement: layout.Placement) -> Placement:
    if isinstance(placement, layout.Shard):
        return Shard(placement.dim)
    return Partial(placement.op) if isinstance(placement, layout.Partial) else Replicate()
