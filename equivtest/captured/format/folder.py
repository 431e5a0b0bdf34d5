"""The folder of a captured run: which files lie there, whether they are of one run, and what each rank held.

Nothing in a manifest names a file: each rank's files have fixed names, and no other file is opened.
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
from equivtest.captured.format.tensor_file import TensorFile, digest_of
from equivtest.errors import Misuse, reason_of, shorten
from equivtest.layout import Flat, Layout, Placement, Replicate, Shard, parse_placement
from equivtest.programs.micro_batches import split_micro_batch
from equivtest.tensors import Placed

RANK = re.compile(r"rank-(\d{5})\.(?:json|safetensors)", flags=re.A)
"""Name of a file of a rank."""

AFTER, STATE, STATE_OF = "step1.", "state.", ":"
"""What the names of an update's results and an optimizer's state are made of: 'step1.state.up.weight:exp_avg'."""

INDICES = "indices."
"""What precedes the name of a tensor in the name of the list of where its elements lie."""


def paths_of(folder: Path, rank: int) -> tuple[Path, Path]:
    """The manifest of a rank, and its file of tensors."""
    return folder / f"rank-{rank:05}.json", folder / f"rank-{rank:05}.safetensors"


def parameter_of(name: str) -> str:
    """The parameter of which a tensor is the value, the gradient or a part of the optimizer's state; '' of others."""
    what, _, parameter = name.removeprefix(AFTER).partition(".")
    return parameter.partition(STATE_OF)[0] if what in ("param", "grad", "state") else ""


class RankHeld(Mapping[str, Placed]):
    """What one rank held, by the names of answers; each tensor is read when it is asked for.

    Attributes:
        manifest: What the rank says.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        path, tensors = paths_of(folder, rank)
        self.manifest = read_manifest(path)
        self._file = TensorFile(tensors)
        self._check(path)
        self._names = {name: name for name in self.manifest.tensors}  # as they are asked for, and in the file

    def of_micro_batch(self, number: int) -> RankHeld:
        """What the rank held in one forward and backward, by the names of the first; of parameters what it held."""
        found = copy.copy(self)
        split = {name: split_micro_batch(name) for name in self.manifest.tensors}
        found._names = {
            base: name
            for name, (own, base) in split.items()
            if own == number or (own == 1 and parameter_of(base) in self.manifest.parameters)
        }
        return found

    def told(self, name: str) -> Tensor:
        """What the rank says of a tensor."""
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
        """The tensor under the layout that it says, or under `plain` where it says none; None means that nobody knows.

        Raises:
            Misuse: its bytes are others than were written, or say what cannot be.
        """
        told = self.told(name)
        name = self._names[name]
        local = self._file.read(name)
        if digest_of(local) != told.sha256:
            raise Misuse(f"{self._file.path}: {name} has other bytes than its rank wrote: copy the file again")
        if told.is_listed:
            return Placed(local, Layout(()), indices=self._indices(name, local))
        if not told.layout:
            return Placed(local, Layout(()) if plain is None else plain)
        return Placed(local, layout_of(told), told.whole)

    def _indices(self, name: str, local: torch.Tensor) -> torch.Tensor:
        indices = self._file.read(INDICES + name)
        numel = math.prod(self.manifest.parameters[parameter_of(name)].shape)
        if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < numel:
            raise Misuse(f"{self._file.path}: {INDICES}{name} holds places outside of the {numel} elements of {name}")
        return indices

    def _check(self, path: Path) -> None:
        """Raises Misuse unless the two files name the same tensors, and each tensor can be what they say of it."""
        file, manifest = self._file, self.manifest
        if file.size_bytes != manifest.size_bytes:
            raise Misuse(
                f"{file.path} has {file.size_bytes} bytes, its rank wrote {manifest.size_bytes}: it is cut off, or of "
                "another run"
            )
        lists = {INDICES + name for name, told in manifest.tensors.items() if told.is_listed}
        differing = sorted((manifest.tensors.keys() | lists) ^ file.entries.keys())
        if differing:
            raise Misuse(
                f"{file.path} and {path.name} do not hold the same tensors: {differing[0][:80]!r} is in one alone"
            )
        for name, told in manifest.tensors.items():
            _check_tensor(f"{path}: {name}", told, file.entries[name].shape, len(manifest.mesh))
            listed = file.entries.get(INDICES + name)
            is_parameter = parameter_of(name) in manifest.parameters
            if told.is_listed and (
                listed is None or (listed.dtype, listed.shape) != ("I64", file.entries[name].shape) or not is_parameter
            ):
                raise Misuse(f"{path}: {INDICES}{name} must be int64 of the shape of a parameter, {name}")


def _check_tensor(what: str, told: Tensor, shape: tuple[int, ...], num_axes: int) -> None:
    """Raises Misuse for a layout that no tensor of such a shape has on such a mesh."""
    if not told.layout:
        return
    if len(told.layout) != num_axes or (told.whole is not None and len(told.whole) != len(shape)):
        raise Misuse(f"{what} has a layout of {len(told.layout)} axes, the mesh has {num_axes}")
    placements = [parse_placement(text) for text in told.layout if text]
    if any(isinstance(each, Flat) or (isinstance(each, Shard) and each.dim >= len(shape)) for each in placements):
        raise Misuse(f"{what} of {len(shape)} dims cannot be {', '.join(told.layout)}")
    sharded = [axis for axis, text in enumerate(told.layout) if text.startswith("shard")]
    if told.order and sorted(told.order) != sharded:
        raise Misuse(f"{what}: the order {told.order} must name each sharded axis of {', '.join(told.layout)} once")


def layout_of(told: Tensor) -> Layout:
    """What a tensor says of its layout; on axes of which it says nothing it is the same."""
    placements: list[Placement] = [parse_placement(text) if text else Replicate() for text in told.layout]
    return Layout(tuple(placements), told.order)


class CapturedRun:
    """What all ranks of one run held; every file has been checked, and no tensor has been read.

    Attributes:
        folder: Where it lies.
        held: Of each rank, by number.

    Raises:
        Misuse: a file is missing, broken or of another run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.held = {rank: RankHeld(folder, rank) for rank in _ranks_in(folder)}
        _check_run(folder, {rank: held.manifest for rank, held in self.held.items()})

    def micro_batches(self) -> list[CapturedRun]:
        """Each forward and backward by itself, as a run of which there is no other."""
        found = []
        for number in range(1, self.manifest.micro_batches + 1):
            one = copy.copy(self)
            one.held = {rank: held.of_micro_batch(number) for rank, held in self.held.items()}
            found.append(one)
        return found

    @property
    def manifest(self) -> Manifest:
        """Rank 0's manifest, whose `SHARED` fields are those of all ranks."""
        return self.held[0].manifest


def parts_in(folder: Path) -> list[Path]:
    """The folders within, of parts that were captured alone; none where the folder is of one run itself.

    Raises:
        Misuse: it cannot be read.
    """
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except (OSError, ValueError) as error:
        raise Misuse(f"{shorten(str(folder))} is no folder that can be read: {reason_of(error)}") from error
    if any(RANK.fullmatch(entry.name) for entry in entries):
        return []
    found = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    return [each for each in found if each.name.isprintable() and any(map(os.path.lexists, paths_of(each, 0)))]


def _ranks_in(folder: Path) -> list[int]:
    """The numbers of all ranks of the run.

    Raises:
        Misuse: there is no folder, no run in it, or not all of one.
    """
    try:
        names = {path.name for path in folder.iterdir()}
    except (OSError, ValueError) as error:
        raise Misuse(f"{shorten(str(folder))} is no folder that can be read: {reason_of(error)}") from error
    found = [RANK.fullmatch(name) for name in names]
    ranks = sorted({int(match[1]) for match in found if match})
    if not ranks:
        raise Misuse(f"{folder} holds no captured run: no rank-00000.json; equivtest.capture writes one on every rank")
    for rank in range(ranks[-1] + 1):
        missing = next((path.name for path in paths_of(folder, rank) if path.name not in names), None)
        if missing:
            raise Misuse(f"{folder}: {missing} is missing: collect the files of all ranks in one folder")
    return ranks


def _check_run(folder: Path, manifests: Mapping[int, Manifest]) -> None:
    """Raises Misuse unless the manifests are those of all ranks of one run."""
    first = manifests[0]
    for rank, manifest in manifests.items():
        if manifest.rank != rank:
            raise Misuse(
                f"{paths_of(folder, rank)[0]} is of rank {manifest.rank}: files of ranks were renamed or mixed up"
            )
        if manifest.run != first.run:
            raise Misuse(
                f"{folder} is mixed from two runs: rank 0 is of run {first.run[:8]}, rank {rank} of {manifest.run[:8]}"
            )
        differing = [name for name in SHARED if getattr(manifest, name) != getattr(first, name)]
        if differing:
            raise Misuse(f"{folder}: ranks 0 and {rank} of one run say different {differing[0]}, which all ranks share")
    if len(manifests) != first.world_size:
        raise Misuse(
            f"{folder} holds {len(manifests)} ranks, and the run has {first.world_size}: some are missing, or too many"
        )
    if math.prod(first.mesh) != first.world_size or len(first.axes) not in (0, len(first.mesh)):
        raise Misuse(f"{folder}: a mesh of {first.mesh} with axes {first.axes} is none of {first.world_size} ranks")
