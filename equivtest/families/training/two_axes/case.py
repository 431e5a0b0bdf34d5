"""Defines `TwoAxisCase`: a perceptron on a mesh of two axes.

It is under HSDP, or under FSDP2 or DDP with tensor parallelism.

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

TENSOR_PARALLEL_STYLES = ("fsdp2_tp", "ddp_tp")
TWO_AXIS_STYLES = (*TENSOR_PARALLEL_STYLES, "hsdp")
DIVISIONS = ("", "sums", "factor")
DIVIDE_FACTOR = 2.0
"""The divide factor of the division 'factor'."""


@dataclass(frozen=True, kw_only=True, repr=False)
class TwoAxisCase(DataParallelCase):
    """Describes a data-parallel case on a mesh of two axes. The ranks are numbered row by row.

    Attributes:
        mesh: (d, t), for d rows of t ranks.
        style: How the ranks divide parameters and batch. If 'fsdp2_tp', the t ranks of a mesh row divide the hidden
            features. The d ranks of a mesh column divide each of the resulting shards of a parameter once more, on dim
            0. All ranks of a mesh row have the same part of the batch, and each mesh row has a different part. If
            'ddp_tp', the same ranks divide the hidden features, and all mesh rows have the same shards. If 'hsdp', the
            t ranks of a mesh row divide each parameter, usually on dim 0, and all mesh rows have the same shards. Every
            rank has its own part of the batch.
        use_local_output: Only for fsdp2_tp and ddp_tp. Whether the hidden activation is a plain tensor. If so, torch
            computes its global size as local size times t, so that t must divide H.
        scatters_every: Only for hsdp. Whether the ranks of a mesh row reduce gradients after every micro-batch, and the
            ranks of a mesh column reduce the sums only after the last one.
        division: Only for hsdp. How torch turns sums of gradients into averages. If '', torch chooses. If 'sums', torch
            may call only collectives that add. If 'factor', torch divides by DIVIDE_FACTOR, and the program turns the
            result into the average.
    """

    mesh: Annotated[Shape, Dims(2, 2)] = (1, 1)
    style: Annotated[str, OneOf(TWO_AXIS_STYLES)] = "fsdp2_tp"
    use_local_output: bool = True
    scatters_every: bool = False
    division: Annotated[str, OneOf(DIVISIONS)] = ""

    def check_fields(self) -> None:
        require(math.prod(self.mesh) == self.world_size, f"mesh must have {self.world_size} ranks, got {self.mesh}")
        super().check_fields()
        require(
            self.style not in TENSOR_PARALLEL_STYLES or not self.tied,
            f"the weights of {self.style} are sharded on different dims: omit tied, got {self.tied!r}",
        )
        require(
            not self.use_local_output or self.hidden_features % self.num_hidden_parts == 0,
            f"{self.hidden_features} hidden features on {self.num_hidden_parts} ranks are uneven: "
            "set use_local_output=False",
        )
        require(
            self.style != "ddp_tp" or self.wrapper == "mesh",
            f"ddp_tp needs wrapper='mesh', because a composable module gives its parameters no gradient (finding 145), "
            f"got {self.wrapper!r}",
        )
        require(
            self.style != "ddp_tp" or not self.clips,
            f"ddp_tp gives each rank the plain gradients of one shard: set clip_norm=0, got {self.clip_norm}",
        )
        for name in ("scatters_every", "division"):
            require(
                self.style == "hsdp" or not getattr(self, name),
                f"{name} needs style 'hsdp', got {self.style!r}",
            )
        require(
            not (self.scatters_every and self.syncs_every),
            "after a micro-batch gradients are reduced along one axis or both: set scatters_every or syncs_every",
        )

    @property
    def has_documented_collectives(self) -> bool:
        return not self.clips and self.style != "ddp_tp"

    @property
    def mesh_shape(self) -> Shape:
        return self.mesh

    @property
    def num_averaged(self) -> int:
        return self.mesh[0] if self.style in TENSOR_PARALLEL_STYLES else self.world_size

    @property
    def num_shards(self) -> int:
        return self.mesh[1]

    @property
    def num_scattered(self) -> int:
        return self.num_shards if self.scatters_every else 1

    @property
    def adds_only(self) -> bool:
        """True if torch may call only collectives that add.

        gloo lacks the operation by which torch divides by a factor other than the number of ranks.
        """
        return self.division == "sums" or (self.division == "factor" and self.num_shards not in (1, DIVIDE_FACTOR))

    @property
    def num_hidden_parts(self) -> int:
        return self.mesh[1] if self.style in TENSOR_PARALLEL_STYLES else 1

    def _activation_layout(self, base: str) -> Layout:
        if self.style == "hsdp":
            return Layout((Shard(0), Shard(0)))
        is_hidden = base in self.captured_names() and base != "capture.in_proj.input"
        return Layout((Shard(0), Shard(self.num_dims - 1) if is_hidden else Replicate()))

    def _parameter_layout(self, base: str, shape: Shape) -> Layout:
        """For fsdp2_tp the layout shards dim 0 along the second axis first, then each shard along the first axis."""
        if self.style == "hsdp":
            return Layout((Replicate(), Shard(self._shard_dim(base))))
        if self.style == "ddp_tp":
            within = Replicate() if base == "out_proj.bias" else Shard(int(base == "out_proj.weight"))
            return Layout((Replicate(), within))
        if base == "out_proj.bias":
            return Layout((Shard(0), Replicate()))
        if base == "out_proj.weight":
            return Layout((Shard(0), Shard(1)))
        return Layout((Shard(0), Shard(0)), (1, 0) if self.num_hidden_parts > 1 else ())
