"""Reads the folder of a captured run, and checks that the files belong to one run.

A manifest never names a file.  Each rank's files have fixed names, and no other file is opened.
"""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from equivtest.captured.format.manifest import SHARED, Manifest, Tensor, read_manifest
from equivtest.captured.format.other_tools import describe_dump
from equivtest.captured.format.tensor_file import TensorFile, digest_of
from equivtest.errors import Misuse, reason_of, shorten
from equivtest.layout import Flat, Layout, Placement, Replicate, Shard, parse_placement
from equivtest.programs.micro_batches import split_micro_batch
from equivtest.tensors import Placed

RANK = re.compile(r"rank-(\d{5})\.(?:json|safetensors)", flags=re.A)

AFTER, STATE, STATE_OF = "step1.", "state.", ":"
"""Parts of the names of tensors after an update and of optimizer state, as in 'step1.state.up.weight:exp_avg'."""

INDICES = "indices."
"""Prefix of the name of a tensor of indices: the position of each element of a shard in the flattened whole tensor."""


def paths_of(folder: Path, rank: int) -> tuple[Path, Path]:
    return folder / f"rank-{rank:05}.json", folder / f"rank-{rank:05}.safetensors"


def parameter_of(name: str) -> str:
    """Returns the parameter to which a captured tensor belongs: 'fc.weight' for 'grad.fc.weight', or ''."""
    kind, _, parameter = name.removeprefix(AFTER).partition(".")
    return parameter.partition(STATE_OF)[0] if kind in ("param", "grad", "state") else ""


class CapturedRank(Mapping[str, Placed]):
    """The tensors of one rank by name.  Each tensor is read on demand."""

    def __init__(self, folder: Path, rank: int) -> None:
        path, tensors = paths_of(folder, rank)
        self.manifest = read_manifest(path)
        self._file = TensorFile(tensors)
        self._check(path)
        self._names = {name: name for name in self.manifest.tensors}  # name of a tensor -> its name in the file

    def of_micro_batch(self, number: int) -> CapturedRank:
        """Returns the rank's tensors of one micro-batch (a forward with its backward), and all tensors of parameters.

        The tensors get their names in the first micro-batch.
        """
        rank = copy.copy(self)
        split = {name: split_micro_batch(name) for name in self.manifest.tensors}
        rank._names = {
            base: name
            for name, (own, base) in split.items()
            if own == number or (own == 1 and parameter_of(base) in self.manifest.parameters)
        }
        return rank

    def entry(self, name: str) -> Tensor:
        return self.manifest.tensors[self._names[name]]

    def __getitem__(self, name: str) -> Placed:
        return self.placed(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def placed(self, name: str, plain: Layout | None) -> Placed:
        """Reads a tensor with its layout.

        Args:
            plain: Layout of the tensor if it was no DTensor. None if the layout is unknown.

        Raises:
            Misuse: the tensor's bytes have changed since they were written, or the tensor's indices lie outside of the
                parameter.
        """
        entry, name = self.entry(name), self._names[name]
        local = self._file.read(name)
        if digest_of(local) != entry.sha256:
            raise Misuse(f"{self._file.path}: tensor {name} has other bytes than its rank wrote: copy the file again")
        if entry.is_listed:
            return Placed(local, Layout(()), indices=self._indices(name))
        if not entry.layout:
            return Placed(local, Layout(()) if plain is None else plain)
        return Placed(local, layout_of(entry), entry.whole)

    def _indices(self, name: str) -> torch.Tensor:
        indices = self._file.read(INDICES + name)
        numel = math.prod(self.manifest.parameters[parameter_of(name)].shape)
        if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < numel:
            raise Misuse(f"{self._file.path}: {INDICES}{name} has an index outside of the {numel} elements of {name}")
        return indices

    def _check(self, path: Path) -> None:
        """Raises Misuse unless the manifest and the file of tensors list the same tensors with the same shapes."""
        file, manifest = self._file, self.manifest
        if file.size_bytes != manifest.size_bytes:
            raise Misuse(
                f"{file.path} has {file.size_bytes} bytes, but its rank wrote {manifest.size_bytes}: the file is cut "
                "off, or belongs to another run; copy it again"
            )
        lists = {INDICES + name for name, entry in manifest.tensors.items() if entry.is_listed}
        differing = sorted((manifest.tensors.keys() | lists) ^ file.entries.keys())
        if differing:
            raise Misuse(
                f"{file.path} and {path.name} name different tensors: only one of the two has {differing[0][:80]!r}"
            )
        for name, entry in manifest.tensors.items():
            shape = file.entries[name].shape
            _check_tensor(f"{path}: {name}", entry, shape, len(manifest.mesh))
            is_parameter = parameter_of(name) in manifest.parameters
            if entry.is_listed and not (is_parameter and file.entries[INDICES + name] == ("I64", shape)):
                raise Misuse(f"{path}: {INDICES}{name} must be int64 and have the shape of {name}")


def _check_tensor(where: str, entry: Tensor, shape: tuple[int, ...], num_axes: int) -> None:
    """Raises Misuse if the manifest gives a tensor a layout that is impossible for its shape or for the mesh."""
    if not entry.layout:
        return
    if len(entry.layout) != num_axes or (entry.whole is not None and len(entry.whole) != len(shape)):
        raise Misuse(f"{where} has a layout for {len(entry.layout)} axes, but the mesh has {num_axes}")
    placements = [parse_placement(text) for text in entry.layout if text]
    if any(isinstance(each, Flat) or (isinstance(each, Shard) and each.dim >= len(shape)) for each in placements):
        raise Misuse(f"{where} has {len(shape)} dims, which do not fit the layout {', '.join(entry.layout)}")
    sharded = [axis for axis, text in enumerate(entry.layout) if text.startswith("shard")]
    if entry.order and sorted(entry.order) != sharded:
        raise Misuse(f"{where}: the order {entry.order} must name each sharded axis of {', '.join(entry.layout)} once")


def layout_of(entry: Tensor) -> Layout:
    """Returns the layout that a manifest's entry describes.  An axis with an unknown placement counts as replicated."""
    placements: list[Placement] = [parse_placement(text) if text else Replicate() for text in entry.layout]
    return Layout(tuple(placements), entry.order)


class CapturedRun:
    """The files of all ranks of one run.  The files are checked, but no tensor is read yet.

    Raises:
        Misuse: a file is missing or broken, or belongs to another run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ranks = {rank: CapturedRank(folder, rank) for rank in _ranks_in(folder)}
        _check_run(folder, {number: rank.manifest for number, rank in self.ranks.items()})

    def micro_batches(self) -> list[CapturedRun]:
        """Returns one run for each micro-batch, which is a forward and its backward."""
        runs = []
        for number in range(1, self.manifest.micro_batches + 1):
            run = copy.copy(self)
            run.ranks = {each: rank.of_micro_batch(number) for each, rank in self.ranks.items()}
            runs.append(run)
        return runs

    @property
    def manifest(self) -> Manifest:
        """Manifest of rank 0.  Its fields in `SHARED` are equal on all ranks."""
        return self.ranks[0].manifest


def parts_in(folder: Path) -> list[Path]:
    """Returns the folders of submodules that were captured alone, or [] if the folder has a run of the whole model.

    Raises:
        Misuse: the folder cannot be read.
    """
    entries = _entries_of(folder)
    if any(RANK.fullmatch(entry.name) for entry in entries):
        return []
    folders = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    return [each for each in folders if each.name.isprintable() and any(map(os.path.lexists, paths_of(each, 0)))]


def _entries_of(folder: Path) -> list[os.DirEntry[str]]:
    try:
        return sorted(os.scandir(folder), key=lambda entry: entry.name)
    except (OSError, ValueError) as error:
        dump = describe_dump(folder, [folder]) if isinstance(error, NotADirectoryError) else ""
        raise Misuse(dump or f"{shorten(str(folder))} cannot be read as a folder: {reason_of(error)}") from error


def _ranks_in(folder: Path) -> list[int]:
    """Returns the ranks of the run in a folder.  Raises Misuse if the folder has no run, or only a part of one."""
    names = {entry.name for entry in _entries_of(folder)}
    ranks = sorted({int(match[1]) for name in names if (match := RANK.fullmatch(name))})
    if not ranks:
        raise Misuse(
            describe_dump(folder, [folder / name for name in sorted(names)])
            or f"{folder} holds no captured run: no rank-00000.json; equivtest.capture writes one on every rank"
        )
    for rank in range(ranks[-1] + 1):
        missing = next((path.name for path in paths_of(folder, rank) if path.name not in names), None)
        if missing:
            raise Misuse(f"{folder}: {missing} is missing: collect the files of all ranks in one folder")
    return ranks


def _check_run(folder: Path, manifests: Mapping[int, Manifest]) -> None:
    """Raises Misuse unless all manifests belong to one run and each rank of that run has a manifest."""
    first = manifests[0]
    for rank, manifest in manifests.items():
        if manifest.rank != rank:
            raise Misuse(
                f"{paths_of(folder, rank)[0]} belongs to rank {manifest.rank}: the files of ranks were renamed or "
                "mixed up"
            )
        if manifest.run != first.run:
            raise Misuse(
                f"{folder} has files of two runs: {first.run[:8]} on rank 0, {manifest.run[:8]} on rank {rank}; "
                "collect the files of one run"
            )
        differing = [name for name in SHARED if getattr(manifest, name) != getattr(first, name)]
        if differing:
            raise Misuse(
                f"{folder}: ranks 0 and {rank} recorded different {differing[0]}, which must be the same on all ranks"
            )
    if len(manifests) != first.world_size:
        raise Misuse(
            f"{folder} has files of {len(manifests)} ranks, but the run had {first.world_size}: collect the files of "
            "these ranks alone"
        )
    if math.prod(first.mesh) != first.world_size or len(first.axes) not in (0, len(first.mesh)):
        raise Misuse(
            f"{folder}: a mesh of shape {first.mesh} with axes {first.axes} does not fit {first.world_size} ranks"
        )
