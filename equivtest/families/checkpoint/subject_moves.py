"""Saves and loads a state by functions and options of torch.distributed.checkpoint.

Source: state_dict_saver.py, state_dict_loader.py, default_planner.py, filesystem.py, format_utils.py and hf_storage.py
in torch/distributed/checkpoint (2.13.0).
"""

from __future__ import annotations

import itertools
import json
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.tensor import DTensor

from equivtest.cases.subject import copied
from equivtest.errors import NotSupported
from equivtest.families.checkpoint.case import ALONE, ONLY_X, SAFETENSORS, CheckpointCase

Tensors = dict[str, torch.Tensor]
STEP = 7
WRITERS: dict[str, dict[str, Any]] = {
    "file per tensor": {"single_file_per_rank": False, "sync_files": False, "per_thread_copy_ahead": 1},
    "two threads": {"thread_count": 2, "sync_files": False},
}
"""Writer -> options of FileSystemWriter. The writer 'one file' is what torch makes of the folder's name."""


@dataclass
class Application:
    """Object with the methods of torch's protocol Stateful, that saves tensors and the number of the step."""

    tensors: Tensors
    step: int

    def state_dict(self) -> dict[str, Any]:
        return {"model": dict(self.tensors), "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensors, self.step = dict(state["model"]), state["step"]


def state_of(kind: str, tensors: Tensors, step: int) -> dict[str, Any]:
    """Returns the state that the case saves. `step` determines its numbers and texts. Some have a key of this rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    numbers = torch.tensor([step, step + rank])
    own = {f"rank {rank}": {"text": f"step {step} of rank {rank}", "number": numbers[1:]}}
    if kind == "nested":
        x, y = tensors.values()
        model = OrderedDict(x=x, others=[y, (0.5, step), {"text": f"step {step}"}], count=numbers[0])
        return {"model": model, "step": step, **own}
    if kind == "stateful":
        return {"application": Application(dict(tensors), step)}
    if kind == "not flattened":
        return {**tensors, "step": step, "notes": {"text": f"step {step}"}, **own}
    return dict(tensors)


def save_by_torch(case: CheckpointCase, saved: Tensors, folder: Path, group: dist.ProcessGroup) -> Path:
    """Saves the state. Returns the folder to load."""
    state = state_of(case.state, saved, STEP)
    if case.saves == "async":
        _save_async(case, saved, folder, group)
    elif case.saves == "cached plans":
        return _save_with_cached_plans(case, saved, folder, group)
    elif case.saves == ALONE:
        save(state, **_options(case, folder, group), use_collectives=False)
    else:
        save(state, **_options(case, folder, group))
    return folder


def load_by_torch(case: CheckpointCase, loaded: Tensors, folder: Path, group: dist.ProcessGroup) -> None:
    """Loads the checkpoint into the tensors.

    Raises:
        RuntimeError: a number or a text of the state, a key of a converted state, or the index of consolidated files,
            is wrong.
    """
    if case.writer == "consolidated":
        _require_index(loaded, folder, len(loaded) if case.loads == ALONE else 1)
    state, expected = (state_of(case.state, loaded, step) for step in (0, STEP))
    if case.loads == "converted":
        folder = _converted(folder, group, set(expected))
    if case.loads == "partial":
        state["absent"] = expected["absent"] = torch.zeros(2, device=loaded["x"].device)
    is_flat = case.state != "not flattened" or case.loads == "converted"
    # If only the first were False, torch would load numbers and texts into a copy of the state (finding 153).
    planner = DefaultLoadPlanner(
        flatten_state_dict=is_flat, flatten_sharded_tensors=is_flat, allow_partial_load=case.loads == "partial"
    )
    reader = HuggingFaceStorageReader(str(folder)) if case.writer in SAFETENSORS else None
    load(
        state,
        checkpoint_id=folder,
        storage_reader=reader,
        planner=planner,
        process_group=group,
        no_dist=case.loads == ALONE,
    )
    if state != expected:  # tensors in a dict or list are equal if they are the same object
        raise RuntimeError(f"loaded {state}, not {expected}")
    if case.loads == "partial" and state["absent"].any():
        raise RuntimeError("a tensor that the checkpoint lacks was changed")


def _converted(folder: Path, group: dist.ProcessGroup, keys: set[str]) -> Path:
    """Converts the checkpoint into one file, and this file into a checkpoint. Returns the folder of the latter.

    Raises:
        RuntimeError: the state in the file lacks one of the keys.
    """
    file, again = folder / "whole.pt", folder / "again"
    if dist.get_rank(group) == 0:
        dcp_to_torch_save(folder, file)
        torch_save_to_dcp(file, again)
        if missing := keys - torch.load(file, weights_only=False).keys():
            raise RuntimeError(f"the converted state has no {missing}")
    dist.barrier(group)
    return again


def _require_index(loaded: Tensors, folder: Path, num_files: int) -> None:
    """Raises RuntimeError unless the index names a file for each tensor, and the size of all tensors in bytes.

    torch reads the files without the index, but Hugging Face's transformers reads the index.
    """
    index = json.loads((folder / "model.safetensors.index.json").read_text("utf-8"))
    size_bytes = sum(each.numel() * each.element_size() for each in loaded.values())
    is_right = index["weight_map"].keys() == loaded.keys() and index["metadata"]["total_size"] == size_bytes
    files = set(index["weight_map"].values())
    if not is_right or len(files) != num_files or not all((folder / file).is_file() for file in files):
        raise RuntimeError(f"the index of the checkpoint of {size_bytes} bytes is {index}")


def _options(
    case: CheckpointCase, folder: Path, group: dist.ProcessGroup, planner: type = DefaultSavePlanner
) -> dict[str, Any]:
    """Returns the options of `save` and `async_save`."""
    writer: FileSystemWriter | None = None
    if case.writer in SAFETENSORS:
        is_consolidated = case.writer == "consolidated"
        files = {name: number for number, name in enumerate(case.shapes_saved, 1)} if case.loads == ALONE else None
        writer = HuggingFaceStorageWriter(
            str(folder), files, save_distributed=True, enable_consolidation=is_consolidated
        )
    elif case.writer in WRITERS:
        writer = FileSystemWriter(folder, **WRITERS[case.writer])
    return {
        **({"checkpoint_id": folder} if writer is None else {"storage_writer": writer}),
        "planner": planner(
            flatten_state_dict=case.state != "not flattened",
            dedup_save_to_lowest_rank=case.saves == "lowest rank",
            enable_plan_caching=case.saves == "cached plans",
        ),
        "process_group": group,
    }


def _save_async(case: CheckpointCase, saved: Tensors, folder: Path, group: dist.ProcessGroup) -> None:
    """Saves copies, which are overwritten as soon as async_save has returned.

    If torch makes the writer, the copies are views, and one stager copies them twice, first with other values.
    """
    if "cpu" not in dist.get_backend_config(group):
        raise NotSupported("async_save needs a backend for the CPU, such as 'cpu:gloo,cuda:nccl'")
    copies = views_of(saved) if case.writer == "one file" else {name: copied(each) for name, each in saved.items()}
    stager = DefaultStager(StagingOptions(*(False,) * 4)) if case.writer == "one file" else None
    if stager is not None:
        _spoil(copies)
        earlier: Any = async_save(
            state_of(case.state, copies, 0), **_options(case, folder / "0", group), async_stager=stager
        )
        earlier.result()
        for name, tensor in copies.items():
            _local(tensor).copy_(_local(saved[name]))
    state = state_of(case.state, copies, STEP)
    future: Any = async_save(state, **_options(case, folder, group), async_stager=stager)
    _spoil(copies)
    future.result()
    if stager is not None:
        stager.close()


def views_of(tensors: Tensors) -> Tensors:
    """Returns copies that are views with reversed dims, of plain tensors behind one another in one memory.

    If the local tensor of a DTensor does not begin its memory, torch does not stage the DTensor (finding 175).
    """
    parts = {name: _local(each).detach() for name, each in tensors.items()}
    ends = [0, *itertools.accumulate(each.numel() for each in parts.values())]
    memory, views = next(iter(parts.values())).new_zeros(1 + ends[-1]), {}
    for (name, part), start in zip(parts.items(), ends, strict=False):
        tensor = tensors[name]
        own = torch.zeros_like(memory) if isinstance(tensor, DTensor) else memory[1 + start :]
        dims = tuple(reversed(range(part.dim())))
        views[name] = _like(tensor, own[: part.numel()].view(part.shape[::-1]).permute(dims).copy_(part))
    return views


def _like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Returns the local tensor, as a DTensor if `tensor` is one."""
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _save_with_cached_plans(case: CheckpointCase, saved: Tensors, folder: Path, group: dist.ProcessGroup) -> Path:
    """Saves three times. The second plan differs from the first, and the third equals the second."""
    planner = type(folder.name, (DefaultSavePlanner,), {})  # torch caches by the name of the class
    spoiled = {name: copied(tensor) for name, tensor in saved.items()}
    _spoil(spoiled)
    states = (
        state_of(ONLY_X, {"x": spoiled["x"]}, 0),
        state_of(case.state, spoiled, 0),
        state_of(case.state, saved, STEP),
    )
    for number, state in enumerate(states):
        save(state, **_options(case, folder / str(number), group, planner))
    return folder / str(len(states) - 1)


def _spoil(tensors: Tensors) -> None:
    for tensor in tensors.values():
        _local(tensor).fill_(torch.nan)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
