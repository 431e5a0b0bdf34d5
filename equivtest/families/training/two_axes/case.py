"""Defines `TwoAxisCase`: a perceptron under HSDP, or under FSDP2 with tensor parallelism, on a mesh of two axes.

Letters: d ranks on the first axis, t ranks on the second axis, M micro-batches; K in_features, H hidden_features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from equivtest.cases.case import Shape, require
from equivtest.cases.rules import Dims, OneOf
from equivtest.families.training.data_parallel.case import DataParallelCase
from equivtest.layout import Layout, Replicate, Shard

TWO_AXIS_STYLES = ("fsdp2_tp", "hsdp")


@dataclass(frozen=True, kw_only=True, repr=False)
class TwoAxisCase(DataParallelCase):
    """Describes a data-parallel case on a mesh of two axes. The ranks are numbered row by row.

    Attributes:
        mesh: (d, t), for d rows of t ranks.
        style: How the ranks divide parameters and batch. If 'fsdp2_tp', the t ranks of a mesh row divide the hidden
            features. The d ranks of a mesh column divide each of the resulting shards of a parameter once more, on dim
            0. All ranks of a mesh row have the same part of the batch, and each mesh row has a different part. If
            'hsdp', the t ranks of a mesh row divide each parameter, usually on dim 0, and all mesh rows have the same
            shards. Every rank has its own part of the batch.
        use_local_output: Only for fsdp2_tp. Whether the hidden activation is a plain tensor. If so, torch computes its
            global size as local size times t, so that t must divide H.
    """

    mesh: Annotated[Shape, Dims(2, 2)] = (1, 1)
    style: Annotated[str, OneOf(TWO_AXIS_STYLES)] = "fsdp2_tp"
    use_local_output: bool = True

    def check_fields(self) -> None:
        require(math.prod(self.mesh) == self.world_size, f"mesh must have {self.world_size} ranks, got {self.mesh}")
        super().check_fields()
        require(
            self.style != "fsdp2_tp" or not self.tied,
            f"the weights of fsdp2_tp are sharded on different dims: omit tied, got {self.tied!r}",
        )
        require(
            not self.use_local_output or self.hidden_features % self.num_hidden_parts == 0,
            f"{self.hidden_features} hidden features on {self.num_hidden_parts} ranks are uneven: "
            "set use_local_output=False",
        )

    @property
    def has_documented_collectives(self) -> bool:
        return not self.clips

    @property
    def mesh_shape(self) -> Shape:
        return self.mesh

    @property
    def num_averaged(self) -> int:
        return self.mesh[0] if self.style == "fsdp2_tp" else self.world_size

    @property
    def num_shards(self) -> int:
        return self.mesh[1]

    @property
    def num_hidden_parts(self) -> int:
        return self.mesh[1] if self.style == "fsdp2_tp" else 1

    def _activation_layout(self, base: str) -> Layout:
        if self.style == "hsdp":
            return Layout((Shard(0), Shard(0)))
        is_hidden = base in self.captured_names() and base != "capture.in_proj.input"
        return Layout((Shard(0), Shard(self.num_dims - 1) if is_hidden else Replicate()))

    def _parameter_layout(self, base: str, shape: Shape) -> Layout:
        """For fsdp2_tp the layout shards dim 0 along the second axis first, then each shard along the first axis."""
        if self.style == "hsdp":
            return Layout((Replicate(), Shard(self._shard_dim(base))))
        if base == "out_proj.bias":
            return Layout((Shard(0), Replicate()))
        if base == "out_proj.weight":
            return Layout((Shard(0), Shard(1)))
        return Layout((Shard(0), Shard(0)), (1, 0) if self.num_hidden_parts > 1 else ())
