"""Defines `CheckpointCase`: tensors that are saved under one placement and loaded under another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from equivtest.base import limits
from equivtest.cases.axes import shapes, shards, table_of
from equivtest.cases.case import Case, Shape, require
from equivtest.cases.case_tensor import CaseTensor
from equivtest.cases.rules import Dims, OneOf
from equivtest.layout import Layout, Replicate, parse_placement

PLAIN, ALONE, ONLY_X = "plain", "alone", "x"
PLACEMENTS = table_of(lambda fields: (*shards(len(fields["shape"])) * 4, "replicate", PLAIN))

SAFETENSORS = ("safetensors", "consolidated")
WRITERS = ("one file", "file per tensor", "two threads", *SAFETENSORS)
STATES = (ONLY_X, "pair", "nested", "stateful", "not flattened")
SAVES = ("save", "lowest rank", "async", "cached plans", ALONE)
LOADS = ("load", "partial", "converted", ALONE)


def states_of(writer: str) -> tuple[str, ...]:
    """Returns the states that the writer can write. A file of safetensors has tensors only."""
    return STATES[:2] if writer in SAFETENSORS else STATES


def saves_of(writer: str, saved: str, loaded: str) -> tuple[str, ...]:
    """Returns the ways to save.

    Ranks that save alone write one list of tensors each. Each rank then finds its own elements again, if it saved them.
    A file of safetensors has no such list.
    """
    finds_own = saved in ("replicate", PLAIN, loaded)
    return SAVES if finds_own and writer not in SAFETENSORS else SAVES[:-1]


def loads_of(writer: str, saves: str) -> tuple[str, ...]:
    """Returns the ways to load.

    Files of safetensors, and lists that ranks write alone, are not converted. A rank that loads alone does not know its
    rank, so it cannot find its list.
    """
    if saves == ALONE:
        return LOADS[:2]
    return tuple(each for each in LOADS if each != "converted" or writer not in SAFETENSORS)


@dataclass(frozen=True, kw_only=True, repr=False)
class CheckpointCase(Case):
    """Describes a checkpoint of a tensor x, or of x and y. The outputs are the loaded tensors, which equal x and y.

    Attributes:
        shape: Global shape of x, up to three dims; sizes may be 0. The shape of y is the reverse.
        saved: Placement of x and y when they are saved: 'shard(DIM)', 'replicate', or 'plain' for plain tensors that
            every rank has as a whole.
        loaded: Placement of the tensors into which the checkpoint is loaded, with the same names.
        writer: How the files are written: one file per rank, one file per tensor, or two files per rank by two threads.
            'safetensors' is the format of Hugging Face, and 'consolidated' has enable_consolidation too, so that the
            ranks' files become one. Ranks that load these alone find each tensor in another file.
        state: What is saved: 'x' alone, the 'pair' of x and y, or the pair with numbers and texts. These lie in
            'nested' dicts and lists, or in an object with the methods of torch's protocol Stateful. If 'not flattened',
            the planners have flatten_state_dict=False.
        saves: How it is saved. 'lowest rank' has dedup_save_to_lowest_rank, and 'async' is async_save, after which x
            and y are overwritten at once. 'cached plans' saves three times with enable_plan_caching: x, then the state
            with other values, then the state. If 'alone', ranks save with use_collectives=False.
        loads: How it is loaded. 'partial' has allow_partial_load and one tensor more than the checkpoint. If
            'converted', the group's first rank converts the checkpoint into a file of torch.save and back. If 'alone',
            ranks load with no_dist=True.
    """

    VALUE_MODES: ClassVar[tuple[str, ...]] = ("dense", "index", "special")

    shape: Annotated[Shape, Dims(1, limits.MAX_DIMS, smallest=0), shapes((1, 2, 2, 3))] = (1,)
    saved: Annotated[str, PLACEMENTS] = "shard(0)"
    loaded: Annotated[str, PLACEMENTS] = "shard(0)"
    writer: Annotated[str, OneOf(WRITERS)] = "one file"
    state: Annotated[str, OneOf(STATES), table_of(lambda fields: states_of(fields["writer"]))] = ONLY_X
    saves: Annotated[
        str, OneOf(SAVES), table_of(lambda fields: saves_of(fields["writer"], fields["saved"], fields["loaded"]))
    ] = "save"
    loads: Annotated[str, OneOf(LOADS), table_of(lambda fields: loads_of(fields["writer"], fields["saves"]))] = "load"

    def check_fields(self) -> None:
        names = (*shards(len(self.shape)), "replicate", PLAIN)
        for name in ("saved", "loaded"):
            require(
                getattr(self, name) in names, f"{name} must be one of {', '.join(names)}, got {getattr(self, name)}"
            )
        require(
            self.state in states_of(self.writer), f"a file of safetensors has tensors only, got state={self.state!r}"
        )
        require(
            self.saves in saves_of(self.writer, self.saved, self.loaded),
            f"ranks that save alone must load what they saved, and not as safetensors, got {self.saved!r}, "
            f"{self.loaded!r} and {self.writer!r}",
        )
        require(
            self.loads in loads_of(self.writer, self.saves),
            f"ranks that saved alone must load together, and torch converts no safetensors, got {self.loads!r}",
        )

    @property
    def shapes_saved(self) -> dict[str, Shape]:
        """Name -> global shape, of each saved tensor."""
        return {"x": self.shape} if self.state == ONLY_X else {"x": self.shape, "y": self.shape[::-1]}

    def describe_tensors(self) -> dict[str, CaseTensor]:
        saved = {name: CaseTensor(shape, _layout(self.saved)) for name, shape in self.shapes_saved.items()}
        loaded = {
            output_of(name): CaseTensor(shape, _layout(self.loaded), "output")
            for name, shape in self.shapes_saved.items()
        }
        return saved | loaded


def output_of(name: str) -> str:
    """Returns the name of the loaded tensor: x -> 'output', y -> 'output_y'."""
    return "output" if name == "x" else f"output_{name}"


def _layout(text: str) -> Layout:
    return Layout((Replicate() if text == PLAIN else parse_placement(text),))
