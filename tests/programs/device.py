"""Compares the device written in Python with the CPU, on a rank."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from equivtest.cases.subject import Answers
from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.families.zero3.fetch.subject import zero3_fetch_all_gather
from equivtest.tensors import same_bits


def on_the_device(case: FetchCase, mesh: DeviceMesh, given: Mapping[str, torch.Tensor]) -> Answers:
    """Fetches on the CPU, after a check that the device computes the same as the CPU.

    Raises:
        AssertionError: the results differ.
    """
    from tests.programs import python_device  # once per process, and never in the process of the tests

    x, w = torch.randn(3, 4), torch.randn(4, 2)
    there = x.to(python_device.DEVICE)
    require(there.device.type == python_device.DEVICE and same_bits(there, x), "moved")
    require(same_bits(there @ w.to(python_device.DEVICE), x @ w), "a product")
    require(same_bits(there.t()[1:].contiguous(), x.t()[1:].contiguous()), "a view")
    there[1:].mul_(2)
    x[1:].mul_(2)
    require(same_bits(there, x), "what is written by a view")
    require(
        same_bits(torch.cat([there, there], out=torch.empty(0, device=python_device.DEVICE)), x.repeat(2, 1)), "out"
    )
    storage = weakref.ref(there.untyped_storage())
    held = weakref.ref(there.untyped_storage()._host)  # type: ignore[attr-defined]
    del there
    gc.collect()
    require(storage() is None and held() is None, "memory is freed with the last tensor")
    require_freed(torch.ones(3, device=python_device.DEVICE))
    require_summed(mesh)
    return dict(zero3_fetch_all_gather(case, mesh, given))


def require_freed(tensor: torch.Tensor) -> None:
    """Frees a storage and allocates it again, as fully_shard does."""
    storage = tensor.untyped_storage()
    storage.resize_(0)
    require(storage.nbytes() == 0, "a freed storage has no bytes")
    try:
        tensor.add(1)
    except RuntimeError as error:
        require("memory of the device is used that was freed" in str(error), str(error))
    else:
        raise AssertionError("freed memory was used")
    storage.resize_(12)
    require(tensor.fill_(2).sum().item() == 6, "made again")


def require_summed(mesh: DeviceMesh) -> None:
    """Sums over the ranks by the device's process group, beside the CPU's group."""
    group = dist.new_group(mesh.mesh.tolist(), backend="shadow")
    tensor = torch.full((3,), float(mesh.get_local_rank() + 1), device="shadow")
    dist.all_reduce(tensor, group=group)
    require(tensor.tolist() == [sum(range(1, mesh.size() + 1))] * 3, f"a sum over the ranks: {tensor.tolist()}")


def require(is_so: bool, what: str) -> None:  # noqa: FBT001
    if not is_so:
        raise AssertionError(what)
