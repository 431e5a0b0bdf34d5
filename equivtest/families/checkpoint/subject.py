"""Subject that saves a tensor with torch.distributed.checkpoint and loads it under another placement.

Source: `save` and `load` in torch/distributed/checkpoint/state_dict_saver.py and state_dict_loader.py (2.13.0): `load`
reshards a DTensor and writes into the tensors that it gets.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from equivtest.cases.subject import Answers, Given, dtensor_of, placements_of, under_contract
from equivtest.errors import NotSupported
from equivtest.families.checkpoint.case import PLAIN, CheckpointCase
from equivtest.layout import local_shape

State = dict[str, torch.Tensor]
Move = Callable[[State, State, Path, dist.ProcessGroup], None]
"""Function (saved, loaded, folder, group) that saves the tensors `saved` and loads them into the tensors `loaded`."""


def checkpoint(case: CheckpointCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Saves x and loads it into a new tensor. Returns the new tensor."""
    return run_checkpoint(case, mesh, given, move_by_torch)


def move_by_torch(saved: State, loaded: State, folder: Path, group: dist.ProcessGroup) -> None:
    """Saves and loads with torch's own functions."""
    save(saved, checkpoint_id=folder, process_group=group)
    load(loaded, checkpoint_id=folder, process_group=group)


def run_checkpoint(case: CheckpointCase, mesh: DeviceMesh, given: Given, move: Move) -> Answers:
    """Runs `move` on x and a tensor of NaN, in a folder that the group shares. Returns the second tensor.

    Raises:
        NotSupported: the ranks are on hosts that share no temporary folder.
    """
    x, layout = given["x"].detach(), case.layouts()["output"]
    local = x.new_full(local_shape(case.shape, layout, case.mesh_shape, mesh.get_local_rank()), torch.nan)
    saved = x if case.saved == PLAIN else _as_dtensor(case, mesh, "x", x)
    loaded = local if case.loaded == PLAIN else _as_dtensor(case, mesh, "output", local)
    group = mesh.get_group()
    folder = _shared_folder(group)
    try:
        move({"x": saved}, {"x": loaded}, folder, group)
    except CheckpointException as error:
        if _lacks_shared_folder(error):
            raise NotSupported("a checkpoint needs a temporary folder that all hosts share") from error
        raise
    dist.barrier(group)  # so that no rank still reads
    shutil.rmtree(folder, ignore_errors=True)
    return under_contract(case, {"output": loaded})


def _as_dtensor(case: CheckpointCase, mesh: DeviceMesh, name: str, local: torch.Tensor) -> DTensor:
    return dtensor_of(local, mesh, placements_of(case.layouts()[name]), case.shape, is_contiguous=True)


def _shared_folder(group: dist.ProcessGroup) -> Path:
    """Makes a temporary folder on the group's first rank. Returns its path on every rank."""
    names = [tempfile.mkdtemp(prefix="checkpoint-") if dist.get_rank(group) == 0 else ""]
    dist.broadcast_object_list(names, group=group, group_src=0)
    return Path(names[0])


def _lacks_shared_folder(error: CheckpointException) -> bool:
    """True if every other rank, but not the group's first rank, lacks the metadata that the first rank has written."""
    return 0 not in error.failures and all(".metadata" in str(each) for each, _ in error.failures.values())
