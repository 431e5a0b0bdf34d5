"""Subject that saves tensors with torch.distributed.checkpoint and loads them under another placement.

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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from equivtest.cases.subject import Answers, Given, dtensor_of, placements_of, under_contract
from equivtest.errors import NotSupported
from equivtest.families.checkpoint.case import PLAIN, CheckpointCase, output_of
from equivtest.families.checkpoint.subject_moves import Tensors, load_by_torch, save_by_torch
from equivtest.layout import local_shape

Move = Callable[[CheckpointCase, Tensors, Tensors, Path, dist.ProcessGroup], None]
"""Function (case, saved, loaded, folder, group) that saves the tensors `saved` and loads them into `loaded`."""


def checkpoint(case: CheckpointCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Saves x, and y if the case has one, and loads them into new tensors. Returns the new tensors."""
    return run_checkpoint(case, mesh, given, move_by_torch)


def move_by_torch(
    case: CheckpointCase, saved: Tensors, loaded: Tensors, folder: Path, group: dist.ProcessGroup
) -> None:
    """Saves and loads with torch's own functions."""
    load_by_torch(case, loaded, save_by_torch(case, saved, folder, group), group)


def run_checkpoint(case: CheckpointCase, mesh: DeviceMesh, given: Given, move: Move) -> Answers:
    """Runs `move` on the saved tensors and tensors of NaN, in a folder that the group shares. Returns the latter.

    Raises:
        NotSupported: the ranks are on hosts that share no temporary folder, or `async_save` lacks a CPU backend.
    """
    saved, loaded = {}, {}
    for name, shape in case.shapes_saved.items():
        tensor, layout = given[name].detach(), case.layouts()[output_of(name)]
        local = tensor.new_full(local_shape(shape, layout, case.mesh_shape, mesh.get_local_rank()), torch.nan)
        saved[name] = tensor if case.saved == PLAIN else _as_dtensor(case, mesh, name, tensor)
        loaded[name] = local if case.loaded == PLAIN else _as_dtensor(case, mesh, output_of(name), local)
    group = mesh.get_group()
    folder = _shared_folder(group)
    try:
        move(case, saved, loaded, folder, group)
    except CheckpointException as error:
        if _lacks_shared_folder(error):
            raise NotSupported("a checkpoint needs a temporary folder that all hosts share") from error
        raise
    dist.barrier(group)  # so that no rank still reads
    shutil.rmtree(folder, ignore_errors=True)
    return under_contract(case, {output_of(name): tensor for name, tensor in loaded.items()})


def _as_dtensor(case: CheckpointCase, mesh: DeviceMesh, name: str, local: torch.Tensor) -> DTensor:
    return dtensor_of(local, mesh, placements_of(case.layouts()[name]), case.tensors[name].shape, is_contiguous=True)


def _shared_folder(group: dist.ProcessGroup) -> Path:
    """Makes a temporary folder on the group's first rank. Returns its path on every rank."""
    names = [tempfile.mkdtemp(prefix="checkpoint-") if dist.get_rank(group) == 0 else ""]
    dist.broadcast_object_list(names, group=group, group_src=0)
    return Path(names[0])


def _lacks_shared_folder(error: CheckpointException) -> bool:
    """True if every other rank, but not the group's first rank, lacks the metadata that the first rank has written."""
    return 0 not in error.failures and all(".metadata" in str(each) for each, _ in error.failures.values())
