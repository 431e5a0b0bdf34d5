"""Data parallelism of FSDP2 beside sequence parallelism: parameters are sharded, replicated, or both.

Source: fully_shard and replicate_with_fsdp.replicate; DataParallelMeshDims in _fully_shard/_fsdp_api.py,
_init_sharding_spec_tp and _init_sharding_spec_spmd in _fsdp_param.py (torch 2.13.0).
"""

from __future__ import annotations

import math
from contextlib import suppress
from functools import cache, partial
from typing import Any, cast

import torch
from torch import distributed, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from equivtest.programs.examples.gated import ScaledBlock
from equivtest.programs.examples.plans import average, sequence_parallel

DATA = ("replicas", "shards")
AXES = (*DATA, "tp")
NAMED = {
    "shards": DataParallelMeshDims(shard="dp"),
    "replicas": DataParallelMeshDims(replicate="dp"),
    "both": DataParallelMeshDims(shard="shards", replicate="replicas"),
    "shards on two": DataParallelMeshDims(shard=DATA),
}
"""Value of `data` in `parallel_on_named_axes` -> axes."""
WHOLE, ROWS, TOKENS = Replicate(), Shard(0), Shard(1)
DIVIDED = {"gate.weight": Shard(0), "up.weight": Shard(0), "down.weight": Shard(1)}
"""Parameters that are divided along 'tp'. Each rank has all other parameters as a whole."""


def sequence_and_data_parallel(block: ScaledBlock, mesh: DeviceMesh, *, data: str, separates: bool) -> nn.Module:
    """Divides tokens and hidden features along the axis 'tp' of the mesh, and applies FSDP2 along 'dp'.

    Only the first rank along 'tp' has the right weights of the layers, which parallelize_module sends to the others.

    Args:
        data: What the ranks along 'dp' have of each parameter. If 'shards', each rank has a shard. If 'replicas', each
            rank has the whole parameter. If 'both', half of an even number of ranks divide the parameter, and the
            other half have the same shards. If 'groups', the same on a mesh that is made of groups. If 'unflattened',
            the same on a mesh whose only axis is divided in three. If 'flattened', each rank has a shard, and two axes
            of a mesh are flattened into one.
        separates: Whether shards of gradients are reduced on a separate process group. The option changes nothing if
            the parameters are not sharded.
    """
    whole = {name: parameter.detach().clone() for name, parameter in block.named_parameters()}
    if mesh.get_local_rank("tp") or distributed.get_rank(mesh.get_group("tp")):
        for layer in (block.gate, block.up, block.down):
            layer.weight = nn.Parameter(torch.full_like(layer.get_parameter("weight"), torch.nan))
    parallel: Any = sequence_parallel(block, mesh["tp"], dim=1)
    if data == "replicas":
        replicate(parallel, mesh=mesh["dp"])
        return block
    fully_shard(parallel, mesh=along_data(mesh, data))
    if separates:
        parallel.set_separate_reduce_scatter_group()
    if data in ("both", "groups", "unflattened"):
        write(block, whole)
    return block


def along_data(mesh: DeviceMesh, data: str) -> DeviceMesh:
    if data == "shards":
        return mesh["dp"]
    axes = three_axes(mesh, made_of=data)[DATA]
    return axes._flatten() if data == "flattened" else axes


@torch.no_grad()
def write(block: nn.Module, whole: dict[str, torch.Tensor]) -> None:
    """Spoils all parameters, and writes each rank's part of the whole parameters by the placements that FSDP2 declares.

    No judgement sees the placements on a mesh of three axes, because the case has two.
    """
    for name, parameter in cast("Any", block.named_parameters()):
        axes = parameter.device_mesh
        same = DTensor.from_local(whole[name], axes, [WHOLE] * axes.ndim, run_check=False)
        parameter.fill_(torch.nan)
        parameter.copy_(same.redistribute(placements=parameter.placements))


def parallel_on_named_axes(block: ScaledBlock, mesh: DeviceMesh, *, data: str) -> nn.Module:
    """Does the same with parameters that are DTensors on the whole mesh. FSDP2 gets the names of its axes.

    Args:
        data: The same as for `sequence_and_data_parallel`, or shards or replicas along two axes.
    """
    whole = {name: parameter.detach().clone() for name, parameter in block.named_parameters()}
    has_two = data not in DATA
    mesh = three_axes(mesh) if has_two else mesh
    fully_shard(sequence_parallel_on(block, mesh), mesh=mesh, dp_mesh_dims=NAMED[data])
    if has_two:
        write(block, whole)
    return block


def replicated_by_layers(block: nn.Module, mesh: DeviceMesh, *, ignores: str = "") -> nn.Module:
    """Replicates each layer, and then the whole block. Each rank has the whole parameters.

    Before that the block gives up a step.

    Args:
        ignores: Name of a layer whose weight `replicate` ignores. A hook averages the gradient of this weight. The
            layer `up` has no other parameter, and `down` has a bias.
    """
    names = [f"{ignores}.weight"] if ignores else []
    ignored: Any = {block.get_parameter(name) for name in names}
    x = block.get_parameter("up.weight").detach().clone()
    for part in (*block.children(), block):
        replicate(part, mesh=mesh, ignored_params=ignored)
    give_up(block, x)
    for name in names:
        own: Any = block.get_parameter(name)
        own.register_post_accumulate_grad_hook(partial(average, mesh))
    return block


def give_up(replicas: Any, x: torch.Tensor) -> None:
    """Runs a micro-batch whose gradients stay on each rank, and another that fails. No later step may see them."""
    replicas.set_requires_all_reduce(False)
    replicas(x).sum().backward()
    with suppress(RuntimeError):
        replicas(x[:, :1])  # has too few features
    replicas.reset_iter_state()
    replicas.set_requires_all_reduce(True)
    replicas.zero_grad()


def three_axes(mesh: DeviceMesh, *, made_of: str = "") -> DeviceMesh:
    return _three_axes(mesh.device_type, tuple(mesh.shape), made_of)


@cache
def _three_axes(device_type: str, shape: tuple[int, int], made_of: str) -> DeviceMesh:
    """Returns the mesh of the whole world on which the first axis is divided in two."""
    num_replicas = 1 if shape[0] % 2 else 2
    sizes = (num_replicas, shape[0] // num_replicas, shape[1])
    if made_of == "unflattened":
        world: Any = init_device_mesh(device_type, (math.prod(sizes),), mesh_dim_names=("world",))
        return cast("DeviceMesh", world._unflatten("world", sizes, AXES))
    if made_of != "groups":
        return init_device_mesh(device_type, sizes, mesh_dim_names=AXES)
    ranks, new_groups = torch.arange(math.prod(sizes)).view(sizes), cast("Any", distributed)
    lines = [ranks.movedim(axis, -1).flatten(0, -2).tolist() for axis in range(ranks.ndim)]
    groups = [new_groups.new_subgroups_by_enumeration(each)[0] for each in lines]
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=AXES)


def _distributed(parameter: nn.Parameter, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> nn.Parameter:
    """Returns the parameter as a DTensor on this very mesh object, as FSDP2 requires.

    From its cache of rules torch may take an equal mesh, which an earlier case made. Then the cache is cleared.
    """
    for _ in range(2):
        own = nn.Parameter(distribute_tensor(parameter, mesh, placements), requires_grad=parameter.requires_grad)
        if cast("Any", own).device_mesh is mesh:
            break
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    return own


def sequence_parallel_on(block: ScaledBlock, mesh: DeviceMesh) -> nn.Module:
    """Divides the tokens outside of the layers and the hidden features inside, with DTensors on the whole mesh.

    The block takes and returns this rank's rows. All ranks must have the same number of rows, because torch refuses
    linear layers of a DTensor whose rows are divided unevenly.
    """
    rows = (ROWS,) * (mesh.ndim - 1)
    whole = (WHOLE,) * (mesh.ndim - 1)

    def partition(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for own, parameter in list(module.named_parameters(recurse=False)):
            placements = (*whole, DIVIDED.get(f"{name}.{own}", WHOLE))
            module.register_parameter(own, _distributed(parameter, mesh, placements))

    def take(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        (x,) = inputs
        return DTensor.from_local(x, mesh, (*rows, WHOLE)).redistribute(placements=(*rows, TOKENS))

    def give(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output.redistribute(placements=(*rows, WHOLE)).to_local()

    for layer in (block.gate, block.up):
        moved(layer, before=(*rows, WHOLE))
    moved(block.down, after=(*rows, TOKENS))
    return distribute_module(block, mesh, partition, take, give)


def moved(layer: nn.Module, before: tuple[Placement, ...] = (), after: tuple[Placement, ...] = ()) -> None:
    """Redistributes the input of a layer, or its output."""
    if before:
        layer.register_forward_pre_hook(lambda _, inputs: inputs[0].redistribute(placements=before))
    if after:
        layer.register_forward_hook(lambda _, inputs, output: output.redistribute(placements=after))
