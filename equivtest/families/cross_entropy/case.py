"""Defines `CrossEntropyCase`: one cross entropy of logits that are sharded along the dim of classes.

Letters: P positions (product of the dims of the target), C classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from equivtest.base import limits
from equivtest.cases.activation import X_ALONE, ActivationCase
from equivtest.cases.case import Refused, Shape, replicated, require
from equivtest.cases.case_tensor import CaseTensor
from equivtest.cases.rules import Dims, OneOf, Within
from equivtest.layout import Layout, Replicate, Shard, shard_bounds

REDUCTIONS = ("none", "sum", "mean")
IGNORED = ("none", "some", "all")
MAX_TARGET_DIMS = 4


@dataclass(frozen=True, kw_only=True, repr=False)
class CrossEntropyCase(ActivationCase):
    """Describes one loss and its gradient. At a position the loss is -weight[target] log softmax(x)[target].

    Attributes:
        positions: Dims of the target, none to four. The logits x have one more dim, for the classes. This is the second
            dim of x, or its only dim.
        num_classes: Size of the dim of classes, which is divided among the ranks.
        row_ranks: Number of ranks along another axis of the mesh, which divides the first dim of positions. If 1, the
            mesh has one axis.
        reduction: 'none', 'sum' or 'mean' over the positions. A mean is the sum of the losses, divided by the sum of
            the weights of all targets that count.
        ignore_index: The target that does not count. It may be a class or any other number.
        ignored: Positions whose target is certainly `ignore_index`: 'none', 'some' (every second position) or 'all'.
        weighted: Whether each class has a weight.
        target_is_dtensor, weight_is_dtensor: Whether the subject passes the target, or the weight, as a DTensor.
        requires_grad: ('x',) if the logits x need a gradient, () if they do not.
        x_contiguous, cotangent_contiguous: Whether the harness passes x, or the cotangent, contiguous in memory.
    """

    VALUE_MODES: ClassVar[tuple[str, ...]] = ("real", "peaked")

    values: tuple[tuple[str, int], ...] = (("real", 0),)
    positions: Annotated[Shape, Dims(0, MAX_TARGET_DIMS)] = (1,)
    num_classes: Annotated[int, Within(1, limits.MAX_FEATURES)] = 1
    row_ranks: Annotated[int, Within(1, limits.MAX_WORLD_SIZE)] = 1
    reduction: Annotated[str, OneOf(REDUCTIONS)] = "none"
    ignore_index: int = -100
    ignored: Annotated[str, OneOf(IGNORED)] = "none"
    weighted: bool = False
    target_is_dtensor: bool = False
    weight_is_dtensor: bool = False
    requires_grad: Annotated[tuple[str, ...], OneOf(X_ALONE)] = ("x",)
    x_contiguous: bool = True
    cotangent_contiguous: bool = True

    def check_fields(self) -> None:
        require(self.weighted or not self.weight_is_dtensor, "weight_is_dtensor needs weights: set weighted=True")
        if self.row_ranks > 1:
            self._check_two_axes()

    def _check_two_axes(self) -> None:
        """Requires what loss_parallel documents for a mesh of two axes, in _cast_to_dtensor and elsewhere (2.13.0)."""
        require(
            self.world_size % self.row_ranks == 0,
            f"row_ranks must divide {self.world_size} ranks, got {self.row_ranks}",
        )
        require(len(self.positions) > 0, "row_ranks divides positions: give positions a dim, or set row_ranks=1")
        require(self.reduction != "mean", "loss_parallel refuses a mean on two axes: choose 'sum' or 'none'")
        require(self.target_is_dtensor, "a target with shards must be a DTensor: set target_is_dtensor=True")
        require(not self.records, "collectives are documented for a mesh of one axis: set records=False")

    @property
    def mesh_shape(self) -> Shape:
        return (self.row_ranks, self.class_ranks) if self.row_ranks > 1 else (self.world_size,)

    @property
    def class_ranks(self) -> int:
        """Returns the number of ranks that divide the classes."""
        return self.world_size // self.row_ranks

    @property
    def _rows(self) -> tuple[Shard, ...]:
        """Returns the placement along the axis that divides positions, or () if there is no such axis."""
        return (Shard(0),) if self.row_ranks > 1 else ()

    @property
    def _of_positions(self) -> Layout:
        return Layout((*self._rows, Replicate()))

    @property
    def class_dim(self) -> int:
        return 1 if self.positions else 0

    @property
    def num_dims(self) -> int:
        return len(self.positions) + 1

    @property
    def num_positions(self) -> int:
        return math.prod(self.positions)

    def edge_classes(self) -> tuple[int, ...]:
        """Returns the first and last class of each rank's shard, ascending."""
        parts = [shard_bounds(self.num_classes, self.class_ranks, rank) for rank in range(self.class_ranks)]
        return tuple(sorted({edge for start, stop in parts if start < stop for edge in (start, stop - 1)}))

    @property
    def logits(self) -> CaseTensor:
        return CaseTensor(
            (*self.positions[:1], self.num_classes, *self.positions[1:]), Layout((*self._rows, Shard(self.class_dim)))
        )

    @property
    def target(self) -> CaseTensor:
        return CaseTensor(self.positions, self._of_positions)

    @property
    def num_weights(self) -> int:
        return self.num_classes if self.weighted else 0

    def describe_tensors(self) -> dict[str, CaseTensor]:
        x, whole = self.logits, replicated(len(self.mesh_shape))
        output, layout = (self.positions, self._of_positions) if self.reduction == "none" else ((), whole)
        tensors = {"x": self.given("x", x.shape, x.layout), "target": self.target}
        if self.num_weights:
            tensors["weight"] = CaseTensor((self.num_weights,), whole)
        tensors["cotangent"] = self.given("cotangent", output, layout)
        tensors["output"] = CaseTensor(output, layout, "output")
        return tensors | {f"grad.{name}": replace(x, role="gradient") for name in self.requires_grad}


MISFITS = ("label_smoothing", "probabilities", "replicated", "weight", "above", "below")


@dataclass(frozen=True, kw_only=True, repr=False)
class RefusedCrossEntropyCase(Refused, CrossEntropyCase):
    """Describes a cross entropy that every rank must refuse with the same error.

    Attributes:
        misfit: The reason for the refusal. If 'label_smoothing', this option is set. If 'probabilities', the target has
            the logits' shape and dtype. If 'replicated', the logits are replicated. If 'weight', the weight has one
            class too many. If 'above', one target is num_classes. If 'below', one target is -1.
    """

    misfit: Annotated[str, OneOf(MISFITS)] = "label_smoothing"

    def check_fields(self) -> None:
        super().check_fields()
        require(self.row_ranks == 1, f"refusals are for a mesh of one axis: set row_ranks=1, got {self.row_ranks}")
        require(
            self.misfit != "probabilities" or self.num_classes > 1,
            "probabilities need several classes: DTensor takes a plain tensor of one element for a number",
        )

    @property
    def logits(self) -> CaseTensor:
        logits = super().logits
        return replace(logits, layout=replicated()) if self.misfit == "replicated" else logits

    @property
    def target(self) -> CaseTensor:
        return super().logits if self.misfit == "probabilities" else super().target

    @property
    def num_weights(self) -> int:
        return self.num_classes + 1 if self.misfit == "weight" else super().num_weights

    @property
    def refusal(self) -> str:
        return f"the target or options do not fit a parallel cross entropy: {self.misfit}"
