"""Defines `DataParallelCase`: a perceptron under data parallelism.

The ranks divide the batch, and the gradients of the parameters are averaged over the ranks.

Letters: w ranks, M micro-batches, K in_features, H hidden_features, N out_features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from equivtest.cases.case import Shape, replicated, require
from equivtest.cases.rules import OneOf, Within
from equivtest.families.training.case import SCALARS, PerceptronCase, base_of
from equivtest.families.zero3.fetch.case import FETCH_COLLECTIVES, PADDINGS
from equivtest.layout import Flat, Layout, Shard

STYLES = ("ddp", "fsdp2", "zero3")
WRAPPERS = ("group", "mesh", "composable")
SHARDED_STYLES = ("fsdp2", "hsdp")
"""Styles that shard each parameter along one of its dims."""
MAX_MICRO_BATCHES = 8


@dataclass(frozen=True, kw_only=True, repr=False)
class DataParallelCase(PerceptronCase):
    """Describes a perceptron under data parallelism. Every rank has the same number of rows of the batch.

    `leading` is the shape of one micro-batch on one rank. The first dim of the global x is leading[0] times the numbers
    of ranks and of micro-batches. The rows of one rank follow those of another, and within a rank, the rows of one
    micro-batch follow those of another. A rank returns the activations of all its micro-batches, in order. A
    parameter's gradient is the gradient of the whole batch divided by the number of ranks; the gradient of x is not
    averaged.

    Attributes:
        style: How parameters and their gradients lie on the ranks. If 'ddp', they are replicated. If 'fsdp2', they are
            sharded on one dim, usually 0. If 'zero3', they are flattened, padded and partitioned.
        micro_batches: Number of forwards and backwards whose gradients are added up before each update.
        syncs_every: Only for fsdp2. Whether gradients are reduced after every micro-batch, and not only after the last
            one.
        reshards: Only for fsdp2. Whether a layer's parameters are released between forward and backward.
        by_columns: Only for fsdp2. Names of the weights that are sharded on dim 1, in order. Every rank must get the
            same number of columns.
        small_buckets: Only for ddp. Whether each gradient is reduced separately.
        views: Only for ddp. Whether gradients are views of the buckets.
        wrapper: Only for ddp. How the module is replicated. If 'group', DistributedDataParallel takes a process group.
            If 'mesh', it takes a mesh. If 'composable', the function `replicate` takes a mesh and changes the module.
        padding: Only for zero3. The value that fills the padding: 'nan', or 'large' for a finite number. Nothing writes
            padding, so the padding must keep this value.
        stopped_steps: Steps, in ascending order and without the first, whose backward ends at the hidden activation. In
            such a step in_proj takes part in the forward alone, and the update does not change its parameters or their
            state.
        fetch: Only for zero3. The documented collective of the fetches; '' if no collective is documented.
    """

    style: Annotated[str, OneOf(STYLES)] = "ddp"
    micro_batches: Annotated[int, Within(1, MAX_MICRO_BATCHES)] = 1
    syncs_every: bool = False
    reshards: bool = True
    by_columns: tuple[str, ...] = ()
    small_buckets: bool = False
    views: bool = False
    wrapper: Annotated[str, OneOf(WRAPPERS)] = "group"
    padding: Annotated[str, OneOf(PADDINGS)] = "nan"
    stopped_steps: tuple[int, ...] = ()
    fetch: Annotated[str, OneOf(FETCH_COLLECTIVES)] = ""

    def check_fields(self) -> None:
        super().check_fields()
        require(bool(self.trained_names()), "data parallelism needs a parameter in requires_grad, got none")
        require(
            not self.records or self.has_documented_collectives,
            "only the collectives of style 'zero3' with a named fetch, and of two axes without clipping, are "
            "documented: set records=False",
        )
        require(
            self.stopped_steps == tuple(step for step in range(2, self.steps + 1) if step in self.stopped_steps),
            f"stopped_steps must list some of 2..{self.steps} in this order, got {self.stopped_steps}",
        )
        require(
            not self.stopped_steps or any(map(self.is_used_in_out_proj, self.trained_names())),
            f"stopped_steps need a parameter of out_proj in requires_grad, got {self.requires_grad}",
        )
        self._check_columns()

    def _check_columns(self) -> None:
        weights = tuple(name for name in self.parameter_names() if name.endswith("weight"))
        require(
            self.by_columns == tuple(name for name in weights if name in self.by_columns),
            f"by_columns must list some of {', '.join(weights)} in this order, got {self.by_columns}",
        )
        require(
            not self.by_columns or self.style in SHARDED_STYLES,
            f"only {' and '.join(SHARDED_STYLES)} shard on another dim: leave by_columns out for {self.style!r}",
        )
        for name in self.by_columns:
            columns = self.tensors[name].shape[1]
            require(
                columns % self.num_shards == 0,
                f"{name} has {columns} columns, which {self.num_shards} ranks cannot shard evenly",
            )

    @property
    def num_shards(self) -> int:
        return self.world_size

    @property
    def has_documented_collectives(self) -> bool:
        return self.style == "zero3" and bool(self.fetch)

    @property
    def batch(self) -> Shape:
        return (self.num_averaged * self.micro_batches * self.leading[0], *self.leading[1:])

    @property
    def num_averaged(self) -> int:
        return self.world_size

    @property
    def num_hidden_parts(self) -> int:
        return 1

    @property
    def num_scattered(self) -> int:
        """Number of ranks whose gradients are added after each micro-batch, if fewer than all ranks. Otherwise 1."""
        return 1

    @property
    def norm_axes(self) -> tuple[int, ...]:
        return () if self.style == "ddp" else self.mesh_shape

    def stops_at_hidden(self, step: int) -> bool:
        return step in self.stopped_steps

    def names_left(self, state: str) -> tuple[str, ...]:
        """Frozen parameters are returned as 'param' too, because no update may change them."""
        return self.parameter_names() if state == "param" else self.trained_names()

    def layout_of(self, name: str, shape: Shape) -> Layout:
        base = base_of(name)
        if base in self.place_names():
            return self._parameter_layout(base, shape)
        return replicated(len(self.mesh_shape)) if base in SCALARS else self._activation_layout(base)

    def _activation_layout(self, base: str) -> Layout:
        return Layout((Shard(0),))

    def _parameter_layout(self, base: str, shape: Shape) -> Layout:
        if self.style == "ddp":
            return replicated()
        if self.style == "fsdp2":
            return Layout((Shard(self._shard_dim(base)),))
        return Layout((Flat(-(-math.prod(shape) // self.world_size) * self.world_size),))

    def _shard_dim(self, place: str) -> int:
        return int(self.parameter_at(place) in self.by_columns)

    @property
    def shard_kind(self) -> str:
        return self.worst_shard_kind(f"param.{name}" for name in self.parameter_names())
