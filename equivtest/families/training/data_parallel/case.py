"""A perceptron under data parallelism: its batch divided among the ranks, its gradients averaged.

Letters: w ranks, M micro-batches, K in_features, H hidden_features, N out_features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from equivtest.families.training.case import SCALARS, PerceptronCase, base_of
from equivtest.families.zero3.fetch.case import FETCH_COLLECTIVES, PADDINGS
from equivtest.kit.case import Shape, replicated, require
from equivtest.layout import Flat, Layout, Shard

STYLES = ("ddp", "fsdp2", "zero3")
SHARDED_STYLES = ("fsdp2", "hsdp")
"""Those that shard each parameter on one of its dims."""
MAX_MICRO_BATCHES = 8


@dataclass(frozen=True, kw_only=True, repr=False)
class DataParallelCase(PerceptronCase):
    """A perceptron whose rows are divided among the ranks, each rank taking as many.

    `leading` is what one rank is given in one micro-batch.  Globally x is (w M leading[0],
    *leading[1:], K): rank after rank, and of each rank micro-batch after micro-batch.  What a rank
    answers of its activations is that of all its micro-batches, in order.  The gradient of a
    parameter is that of the whole batch divided by w; of x it is each rank's own.

    Attributes:
        style: One of STYLES: parameters and gradients replicated; sharded on a dim, mostly 0; or flattened,
            padded and partitioned.
        micro_batches: Forwards and backwards whose gradients are added up before each update.
        syncs_every: Of fsdp2: whether gradients are reduced after every micro-batch, not the last alone.
        reshards: Of fsdp2: whether a layer's parameters are released between forward and backward.
        by_columns: Of fsdp2: the weights that are sharded on dim 1, in order; every rank must hold as many columns.
        small_buckets: Of ddp: whether each gradient is reduced by itself.
        views: Of ddp: whether gradients are views of the buckets.
        padding: Of zero3: what padding holds, 'nan' or a 'large' finite number, as nobody writes it.
        stopped_steps: Steps, ascending and after the first, whose backward ends at the hidden activation:
            in_proj takes part in the forward alone, and an update leaves it and its state as they are.
        fetch: Of zero3: the collective that its fetches are documented to use; '' where nobody says.
    """

    STYLES: ClassVar[tuple[str, ...]] = STYLES

    style: str = "ddp"
    micro_batches: int = 1
    syncs_every: bool = False
    reshards: bool = True
    by_columns: tuple[str, ...] = ()
    small_buckets: bool = False
    views: bool = False
    padding: str = "nan"
    stopped_steps: tuple[int, ...] = ()
    fetch: str = ""

    def __post_init__(self) -> None:
        for name, known in (("style", self.STYLES), ("padding", PADDINGS), ("fetch", FETCH_COLLECTIVES)):
            value = getattr(self, name)
            require(value in known, f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")
        require(
            1 <= self.micro_batches <= MAX_MICRO_BATCHES,
            f"micro_batches must be in 1..{MAX_MICRO_BATCHES}, got {self.micro_batches}",
        )
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
        super().__post_init__()

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
            columns = self.shapes()[name][1]
            require(
                columns % self.num_shards == 0,
                f"{name} has {columns} columns, which {self.num_shards} ranks cannot hold as many of each",
            )

    @property
    def num_shards(self) -> int:
        """Into how many parts a parameter is divided where it is sharded."""
        return self.world_size

    @property
    def is_folded_by_a_view_alone(self) -> bool:
        """Whether in_proj's product takes another road for x than for a view of x, which has other strides.

        Not contiguous, of one row: a view's outer strides fit its inner ones.  Where the weight needs a
        gradient strides do not matter (should_fold in aten/src/ATen/native/LinearAlgebra.cpp, torch 2.13.0).
        """
        *outer, tokens = self.leading
        is_one_row = bool(outer) and set(outer) == {1} and tokens > 1 and self.in_features > 1
        needs = self.requires_grad
        return is_one_row and not self.x_contiguous and "x" in needs and "in_proj.weight" not in needs

    @property
    def has_documented_collectives(self) -> bool:
        """Whether it is known what the ranks call."""
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
    def norm_axes(self) -> tuple[int, ...]:
        return () if self.style == "ddp" else self.mesh_shape

    @property
    def has_empty_trained_shard(self) -> bool:
        """Whether some rank holds nothing of a parameter that is trained."""
        return self.worst_shard_kind(f"param.{name}" for name in self.trained_names()) == "empty"

    @property
    def smallest_numel(self) -> int:
        """Elements of the smallest parameter."""
        shapes = self.shapes()
        return min(math.prod(shapes[f"param.{name}"]) for name in self.parameter_names())

    def stops_at_hidden(self, step: int) -> bool:
        return step in self.stopped_steps

    def names_left(self, state: str) -> tuple[str, ...]:
        """Parameters that are frozen too, which an update must leave as they are."""
        return self.parameter_names() if state == "param" else self.trained_names()

    def layouts(self) -> dict[str, Layout]:
        whole, shapes, places = replicated(len(self.mesh_shape)), self.shapes(), self.place_names()
        given = dict.fromkeys(self.parameter_names(), whole)
        others = (*(name for name in self.given_names() if name not in given), *self.answer_names())
        return given | {
            name: self._parameter_layout(base_of(name), shapes[name])
            if base_of(name) in places
            else whole
            if base_of(name) in SCALARS
            else self._activation_layout(base_of(name))
            for name in others
        }

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
        """The worst of the parameters: 'even', 'uneven' or 'empty'."""
        return self.worst_shard_kind(f"param.{name}" for name in self.parameter_names())
