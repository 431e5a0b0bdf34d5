"""DistributedDataParallel that does not broadcast all tensors, or reduces one gradient later than the others.

If a tensor is broadcast, the first rank alone has the right tensor before. If a tensor is not broadcast, the first rank
alone has a wrong tensor, and restores the right one afterwards.

Source: class DistributedDataParallel in torch/nn/parallel/distributed.py (2.13.0).
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

BUFFERS = ("factor",)
KEPT: dict[str, tuple[Collection[str], Collection[str], dict[str, bool]]] = {
    "": ((), (), {}),
    "later buffers": ((), BUFFERS, {"forward_sync_buffers": False}),
    "buffers": (BUFFERS, BUFFERS, {"broadcast_buffers": False}),
    "all": ((*BUFFERS, "gate.weight", "up.weight", "down.weight", "down.bias"), (), {"init_sync": False}),
    "ignored": ((*BUFFERS, "down.bias"), BUFFERS, {}),
    "gradients": ((), (), {}),
}
"""Name of the kept tensors -> (tensors not broadcast at first, tensors not broadcast before a forward, settings)."""

TINY_MIB = 1e-6
BUCKETS: dict[str, dict[str, Any]] = {
    "one": {},
    "each": {"bucket_cap_mb": TINY_MIB},
    "first": {"bucket_cap_mb_list": [TINY_MIB, 1]},
}
"""How gradients are put into buckets -> settings: all in one, each in one, or one in the first and others in one."""


def data_parallel_by_own_copies(
    block: nn.Module, mesh: DeviceMesh, *, keeps: str, by_mesh: bool, buckets: str
) -> nn.Module:
    """Runs the whole block on every rank, on different rows.

    Args:
        keeps: A key of KEPT. If 'later buffers', no forward broadcasts buffers. If 'buffers', buffers are never
            broadcast. If 'all', nothing is broadcast at first. If 'ignored', the buffer and the frozen bias are never
            broadcast. If 'gradients' or '', all tensors are broadcast at first, and buffers before each forward. If
            'gradients', the gradients of `down` and `up` are reduced together when the gradient of `gate` is ready. An
            earlier backward's gradients are then in the memory that they share.
        by_mesh: Whether DistributedDataParallel takes the mesh, and not its group.
        buckets: A key of BUCKETS.
    """
    if keeps == "buffers":
        require_statistics(mesh)
    at_first, later, settings = KEPT[keeps]
    how: dict[str, Any] = (
        settings | BUCKETS[buckets] | ({"device_mesh": mesh} if by_mesh else {"process_group": mesh.get_group()})
    )
    if keeps == "ignored":
        cast("Any", DistributedDataParallel)._set_params_and_buffers_to_ignore_for_model(block, at_first)
    if keeps == "gradients":
        delayed = ("down.weight", "up.weight")
        how["delay_all_reduce_named_params"] = [(name, block.get_parameter(name)) for name in delayed]
        how["param_to_hook_all_reduce"] = block.get_parameter("gate.weight")
    spoiled = Spoiled(block, mesh)
    spoiled.begin(block.state_dict(), at_first)
    replicated = DistributedDataParallel(block, **how)
    spoiled.end()
    if keeps == "gradients":
        replicated(block.get_parameter("gate.weight").new_ones(1, 2)).sum().backward()
        replicated.zero_grad()
    replicated.register_forward_pre_hook(lambda module, args: spoiled.begin(BUFFERS, later))
    block.register_forward_pre_hook(lambda module, args: spoiled.end())
    return replicated


def require_statistics(mesh: DeviceMesh) -> None:
    """Raises an AssertionError if a layer that `convert_sync_batchnorm` converts evaluates otherwise than before."""
    layer: Any = nn.BatchNorm1d(2, device=mesh.device_type).eval()
    numbers = torch.arange(1.0, 5.0, device=mesh.device_type)
    with torch.no_grad():
        for number, each in enumerate((layer.running_mean, layer.running_var, layer.weight, layer.bias)):
            each.copy_(numbers[number] * numbers[:2])
    convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
    converted, x = convert(nn.Sequential(copy.deepcopy(layer)), mesh.get_group()), numbers.view(2, 2)
    if not torch.equal(converted(x), layer(x)):
        raise AssertionError(f"a converted layer returns {converted(x).tolist()}, expected {layer(x).tolist()}")


class Spoiled:
    """Fills tensors with NaN for a time: on the first rank tensors that are kept, on other ranks all others."""

    def __init__(self, block: nn.Module, mesh: DeviceMesh) -> None:
        self.block, self.is_first = block, mesh.get_local_rank() == 0
        self.right: dict[str, torch.Tensor] = {}

    def begin(self, names: Collection[str], kept: Collection[str]) -> None:
        for name in names:
            if (name in kept) == self.is_first:
                tensor = self.block.state_dict()[name]
                self.right |= {name: tensor.clone()} if self.is_first else {}
                tensor.fill_(torch.nan)

    def end(self) -> None:
        for name, right in self.right.items():
            self.block.state_dict()[name].copy_(right)
        self.right.clear()
