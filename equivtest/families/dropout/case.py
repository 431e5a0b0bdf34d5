"""Defines `DropoutCase`: one dropout of an activation that is sharded or replicated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from equivtest.base import limits
from equivtest.cases.activation import X_ALONE, ActivationCase
from equivtest.cases.case import Shape, replicated, require
from equivtest.cases.case_tensor import CaseTensor
from equivtest.cases.rules import Dims, OneOf, Within
from equivtest.layout import Layout, Replicate, Shard, local_shape, parse_placement

DROPOUT_STYLES = ("dtensor", "sequence_parallel")
SEEDINGS = ("by_shard", "same")
MAX_DROPOUT_NUMEL = 2**16  # with more, chances of an event would depend on the last bits of 1 - p
CHANCE_BITS = 56  # claims about chance may fail once in 10**12 draws, over up to 2,000 pairs of ranks


@dataclass(frozen=True, kw_only=True, repr=False)
class DropoutCase(ActivationCase):
    """Describes one dropout: output = x / (1 - p), except that each element is dropped with probability p.

    The gradient of x is the cotangent, divided by 1 - p, with the same elements dropped.

    Attributes:
        style: How nn.Dropout runs: on a DTensor if 'dtensor', and under SequenceParallel if 'sequence_parallel'.
        shape: Shape of x, one to four dims.
        layout: Placement of x and the output. It is 'shard(DIM)', where DIM is the sequence, or 'replicate', which only
            the style 'dtensor' allows.
        p: Probability that an element is dropped, 0 to 1.
        training: Whether the module is in training mode. If it is not, the output is x.
        seeding: Seeds of torch's generator before the call. If 'same', every rank has the same seed, as torch documents
            for DTensors. If 'by_shard', ranks with the same shard have the same seed.
        x_is_dtensor: Whether x is passed as a DTensor. The style 'dtensor' requires this, and so do uneven shards,
            because torch computes the global shape of a plain tensor as local size times ranks.
        use_local_output: Option of SequenceParallel. If True, the output is a plain tensor instead of a DTensor.
        recomputed: Whether the backward computes the dropout again, by torch.utils.checkpoint.
        reentrant: Whether the recomputation is a backward within the backward. It needs a gradient of x.
        requires_grad: ('x',) if x needs a gradient, () if it does not.
        x_contiguous, cotangent_contiguous: Whether the harness passes x, or the cotangent, contiguous in memory.
    """

    VALUE_MODES: ClassVar[tuple[str, ...]] = ("dense", "real", "special")

    style: Annotated[str, OneOf(DROPOUT_STYLES)] = "dtensor"
    shape: Annotated[Shape, Dims(1, limits.MAX_DIMS)] = (1,)
    layout: str = "replicate"
    p: Annotated[float, Within(0, 1)] = 0.5
    training: bool = True
    seeding: Annotated[str, OneOf(SEEDINGS)] = "by_shard"
    x_is_dtensor: bool = True
    use_local_output: bool = False
    recomputed: bool = False
    reentrant: bool = False
    requires_grad: Annotated[tuple[str, ...], OneOf(X_ALONE)] = ("x",)
    x_contiguous: bool = True
    cotangent_contiguous: bool = True

    def check_fields(self) -> None:
        numel = math.prod(self.shape)
        require(numel <= MAX_DROPOUT_NUMEL, f"x must have at most {MAX_DROPOUT_NUMEL} elements, got {numel}")
        require(
            not self.reentrant or (self.recomputed and bool(self.requires_grad)),
            "reentrant needs recomputed=True and a gradient of x",
        )
        placed = isinstance(self.placement, Replicate | Shard)
        require(placed, f"layout must be replicate or shard(DIM), got {self.layout!r}")
        require(
            self.is_identity or all(mode != "special" for mode, _ in self.values),
            "special values need a dropout that drops nothing: set p=0 or training=False",
        )

    def check_layouts(self) -> None:
        if self.style == "dtensor":
            require(self.x_is_dtensor, "style dtensor needs a DTensor: set x_is_dtensor=True")
            require(not self.use_local_output, "only SequenceParallel has use_local_output: leave it at False")
            return
        require(self.is_sharded, f"SequenceParallel divides x: layout must be shard(DIM), got {self.layout!r}")
        require(
            self.x_is_dtensor or self.worst_shard_kind(("x",)) == "even",
            f"x of shape {self.shape} has uneven shards: set x_is_dtensor=True",
        )

    @property
    def placement(self) -> Replicate | Shard:
        return parse_placement(self.layout)  # type: ignore[return-value]

    @property
    def is_sharded(self) -> bool:
        return isinstance(self.placement, Shard)

    @property
    def is_identity(self) -> bool:
        return not self.training or self.p == 0

    @property
    def drops_some(self) -> bool:
        """True if chance decides which elements are dropped."""
        return self.training and 0 < self.p < 1

    @property
    def draws_at_random(self) -> bool:
        """True if chance decides, and two shards drop the same elements at most once in 2**56 draws."""
        alike = self.p**2 + (1 - self.p) ** 2
        return self.drops_some and -min(self.parts) * math.log2(alike) >= CHANCE_BITS

    def fixes_bits(self, draw: int) -> bool:
        """True if nothing is dropped. Otherwise kept elements are multiplied by 1 / (1 - p), which may round."""
        return self.is_identity

    @property
    def num_parts(self) -> int:
        return len(self.parts)

    @property
    def parts(self) -> tuple[int, ...]:
        """Number of elements of each shard of x that is not empty. Replicas of a shard occur once."""
        layout = self.tensors["x"].layout
        ranks = range(self.world_size if self.is_sharded else 1)
        sizes = (math.prod(local_shape(self.shape, layout, self.mesh_shape, rank)) for rank in ranks)
        return tuple(size for size in sizes if size)

    def describe_tensors(self) -> dict[str, CaseTensor]:
        """Describes each tensor. `seeds` has one element per rank, the seed of the rank's generator."""
        layout = Layout((self.placement,)) if self.is_sharded else replicated()
        return {
            "x": self.given("x", self.shape, layout),
            "cotangent": self.given("cotangent", self.shape, layout),
            "seeds": CaseTensor((self.world_size,), Layout((Shard(0),))),
            "output": CaseTensor(self.shape, layout, "output"),
            **{f"grad.{name}": CaseTensor(self.shape, layout, "gradient") for name in self.requires_grad},
        }
