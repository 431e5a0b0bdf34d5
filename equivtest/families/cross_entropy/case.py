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
from equivtest.layout import Layout, Shard, shard_bounds

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
        parts = [shard_bounds(self.num_classes, self.world_size, rank) for rank in range(self.world_size)]
        return tuple(sorted({edge for start, stop in parts if start < stop for edge in (start, stop - 1)}))

    @property
    def logits(self) -> CaseTensor:
        return CaseTensor(
            (*self.positions[:1], self.num_classes, *self.positions[1:]), Layout((Shard(self.class_dim),))
        )

    @property
    def target(self) -> CaseTensor:
        return CaseTensor(self.positions, replicated())

    @property
    def num_weights(self) -> int:
        return self.num_classes if self.weighted else 0

    def describe_tensors(self) -> dict[str, CaseTensor]:
        x, output = self.logits, self.positions if self.reduction == "none" else ()
        tensors = {"x": self.given("x", x.shape, x.layout), "target": self.target}
        if self.num_weights:
            tensors["weight"] = CaseTensor((self.num_weights,), replicated())
        tensors["cotangent"] = self.given("cotangent", output, replicated())
        tensors["output"] = CaseTensor(output, replicated(), "output")
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
