"""Defines `GatheredCrossEntropyCase`: a cross entropy without loss_parallel. torch gathers the logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from equivtest.cases.case import Refused, require
from equivtest.cases.case_tensor import CaseTensor
from equivtest.cases.rules import OneOf, Within
from equivtest.families.cross_entropy.case import CrossEntropyCase
from equivtest.layout import Layout, Shard

SHARES = ("classes", "positions")


@dataclass(frozen=True, kw_only=True, repr=False)
class GatheredCrossEntropyCase(CrossEntropyCase):
    """Describes one cross entropy of DTensors. The target and the weight are DTensors too.

    The loss may have label smoothing, which moves a fraction of each target to all classes.

    Attributes:
        label_smoothing: The fraction s, 0 to 1. The smoothed loss is (1 - s) * loss + s * the average of all classes'
            losses.
        shares: The sharded dim of the logits. If 'classes', torch gathers the dim of classes. If 'positions', the first
            dim of positions is sharded. A mean needs equally many positions on each rank.
    """

    target_is_dtensor: bool = True
    label_smoothing: Annotated[float, Within(0, 1)] = 0.0
    shares: Annotated[str, OneOf(SHARES)] = "classes"

    def check_fields(self) -> None:
        super().check_fields()
        require(self.row_ranks == 1, f"a second axis is for loss_parallel: set row_ranks=1, got {self.row_ranks}")
        require(self.shares == "classes" or len(self.positions) > 0, "shares='positions' needs a dim of positions")
        require(
            self.shares == "classes" or not self.records,
            "only the collectives of gathered classes are documented: set records=False",
        )
        self._check_wrapping()

    def _check_wrapping(self) -> None:
        require(self.target_is_dtensor, "a DTensor's target is a DTensor too: leave target_is_dtensor at True")
        require(
            self.weight_is_dtensor == self.weighted,
            "the weight must be a DTensor too: set weight_is_dtensor if weighted",
        )
        require(not self.has_mean_of_uneven, f"a mean needs equally many positions on each rank, got {self.positions}")

    @property
    def has_mean_of_uneven(self) -> bool:
        """True if the loss is a mean over positions, and ranks have different numbers of positions."""
        return self.shares == "positions" and self.reduction == "mean" and self.num_rows % self.world_size != 0

    @property
    def num_rows(self) -> int:
        """Returns the size of the first dim of positions, which may be sharded."""
        return self.positions[0] if self.positions else 1

    @property
    def logits(self) -> CaseTensor:
        logits = super().logits
        return replace(logits, layout=Layout((Shard(0),))) if self.shares == "positions" else logits


GATHERED_MISFITS = ("above", "below", "plain_target", "plain_weight", "batch_mean")


@dataclass(frozen=True, kw_only=True, repr=False)
class RefusedGatheredCrossEntropyCase(Refused, GatheredCrossEntropyCase):
    """Describes a cross entropy of DTensors that every rank must refuse with the same error.

    Attributes:
        misfit: The reason for the refusal. If 'above', one target is num_classes. If 'below', one target is -1. If
            'plain_target' or 'plain_weight', the target or the weight is no DTensor, and has two elements or more,
            because DTensor accepts one element as a number. If 'batch_mean', the loss is a mean over positions that are
            divided unequally among the ranks.
    """

    misfit: Annotated[str, OneOf(GATHERED_MISFITS)] = "above"

    def _check_wrapping(self) -> None:
        target, weight = self.misfit != "plain_target", self.weighted and self.misfit != "plain_weight"
        require(
            (self.target_is_dtensor, self.weight_is_dtensor) == (target, weight),
            f"misfit {self.misfit} requires target_is_dtensor={target} and weight_is_dtensor={weight}",
        )
        require(target or self.num_positions > 1, "a plain target of one position would be accepted as a number")
        require(
            self.misfit != "plain_weight" or (self.weighted and self.num_classes > 1),
            "misfit plain_weight needs the weights of two classes or more",
        )
        require(
            self.has_mean_of_uneven == (self.misfit == "batch_mean"),
            f"misfit batch_mean, and no other, needs a mean of unevenly sharded positions, got {self.positions}",
        )

    @property
    def refusal(self) -> str:
        return f"the target, weights or layout do not fit the cross entropy of a DTensor: {self.misfit}"
