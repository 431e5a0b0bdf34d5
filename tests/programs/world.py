"""Programs that need the world: a library with its own groups, and the environment variables that it reads."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.nn import functional as collectives
from torch.nn import functional

from equivtest import NotSupported
from tests.programs.held import Copied, Summed, own

_group: dist.ProcessGroup | None = None


def initialize(mesh: DeviceMesh) -> None:
    """Sets up once, before the first layer, as megatron-core and fairscale do."""
    global _group
    assert _group is None, "tensor parallelism is already initialized"
    _group = dist.new_group(mesh.mesh.tolist())


def destroy(mesh: DeviceMesh) -> None:
    global _group
    dist.destroy_process_group(_group)
    _group = None


def initialize_wrongly(mesh: DeviceMesh) -> None:
    """Groups of one rank each: nothing is added up."""
    global _group
    groups = [dist.new_group([rank]) for rank in range(mesh.size())]
    _group = groups[dist.get_rank()]


def forget(mesh: DeviceMesh) -> None:
    global _group
    _group = None


class Block(nn.Module):
    """Rows of the first weight, columns of the second."""

    def __init__(self, whole: Any, mesh: DeviceMesh, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.up = nn.Parameter(own(whole[0].weight.detach(), mesh))
        self.down = nn.Parameter(own(whole[2].weight.detach(), mesh, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.relu(functional.linear(Copied.apply(x, self.group), self.up))  # type: ignore[no-untyped-call]
        output: torch.Tensor = Summed.apply(functional.linear(hidden, self.down), self.group)  # type: ignore[no-untyped-call]
        return output


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8, bias=False), nn.ReLU(), nn.Linear(8, 2, bias=False))


def library(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    assert _group is not None, "tensor parallelism is not initialized"
    return Block(module, mesh, _group)


def asks_its_environment(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Trusts the environment, as accelerate and DeepSpeed do."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert (rank, size) == (dist.get_rank(), dist.get_world_size()) == (mesh.get_local_rank(), mesh.size())
    assert os.environ["LOCAL_RANK"] == str(rank) and os.environ["LOCAL_WORLD_SIZE"] == str(size)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.set(f"here {rank}", str(rank))
    store.wait([f"here {other}" for other in range(size)])
    return Block(module, mesh, dist.group.WORLD)


def asks_in_vain(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    assert "RANK" not in os.environ and "MASTER_PORT" not in os.environ
    return Block(module, mesh, mesh.get_group())


def _block_of(module: nn.Module, mesh: DeviceMesh, group: Any = dist.group.WORLD) -> nn.Module:
    return Block(module, mesh, group)


def leaves_its_group_out(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Names no group, as open_clip does: its functions bind the default group when they are imported."""
    gathered = collectives.all_gather(torch.ones(2))  # type: ignore[no-untyped-call]
    assert len(gathered) == dist.get_world_size() == mesh.size()
    return _block_of(module, mesh)


def raises(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    raise RuntimeError("it cannot be made")


def declines_late(mesh: DeviceMesh) -> None:
    dist.destroy_process_group()
    raise NotSupported("what was run already")


def raises_too(mesh: DeviceMesh) -> None:
    raise RuntimeError("nor torn down")


def raises_on_rank_0(mesh: DeviceMesh) -> None:
    if dist.get_rank() == 0:
        raise RuntimeError("it cannot be made")


def late_on_rank_0(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Calls no collective, so nothing else makes another rank wait for rank 0."""
    if dist.get_rank() == 0:
        time.sleep(0.5)
    _store().add("finished", 1)
    return module


def after_all(mesh: DeviceMesh) -> None:
    assert _store().add("finished", 0) == dist.get_world_size(), "a rank is torn down before another has finished"


def _store() -> Any:
    return distributed_c10d._get_default_store()
