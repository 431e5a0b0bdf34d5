"""Defines `CheckpointCase`: a tensor that is saved under one placement and loaded under another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from equivtest.base import limits
from equivtest.cases.axes import shapes, shards, table_of
from equivtest.cases.case import Case, Shape, require
from equivtest.cases.case_tensor import CaseTensor
from equivtest.cases.rules import Dims
from equivtest.layout import Layout, Replicate, parse_placement

PLAIN = "plain"
PLACEMENTS = table_of(lambda fields: (*shards(len(fields["shape"])) * 4, "replicate", PLAIN))


@dataclass(frozen=True, kw_only=True, repr=False)
class CheckpointCase(Case):
    """Describes a checkpoint of one tensor x. The output is the loaded tensor, which equals x.

    Attributes:
        shape: Global shape of x, up to three dims; sizes may be 0.
        saved: Placement of x when it is saved: 'shard(DIM)', 'replicate', or 'plain' for a plain tensor that every rank
            has as a whole.
        loaded: Placement of the tensor into which the checkpoint is loaded, with the same names.
    """

    VALUE_MODES: ClassVar[tuple[str, ...]] = ("dense", "index", "special")

    shape: Annotated[Shape, Dims(1, limits.MAX_DIMS, smallest=0), shapes((1, 2, 2, 3))] = (1,)
    saved: Annotated[str, PLACEMENTS] = "shard(0)"
    loaded: Annotated[str, PLACEMENTS] = "shard(0)"

    def check_fields(self) -> None:
        names = (*shards(len(self.shape)), "replicate", PLAIN)
        for name in ("saved", "loaded"):
            require(
                getattr(self, name) in names, f"{name} must be one of {', '.join(names)}, got {getattr(self, name)}"
            )

    def describe_tensors(self) -> dict[str, CaseTensor]:
        return {
            "x": CaseTensor(self.shape, _layout(self.saved)),
            "output": CaseTensor(self.shape, _layout(self.loaded), "output"),
        }


def _layout(text: str) -> Layout:
    return Layout((Replicate() if text == PLAIN else parse_placement(text),))
