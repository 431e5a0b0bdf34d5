"""Cross entropies over divided classes that are wrong in one way each.

`OwnLoss` is right: loss_parallel once more, in plain collectives.  Each defect replaces a step.

Letters: P positions, C classes, c of them on this rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import DeviceMesh

from equivtest.cases.subject import Answers, Given, under_contract
from equivtest.families.cross_entropy.case import CrossEntropyCase
from equivtest.layout import shard_bounds
from tests.defects.defect import Replacing, answers_of

wrong = Replacing("parallel_cross_entropy")


class OwnLoss:
    """One loss on this rank; positions are flattened.

    Attributes:
        x: (P, c), the logits of this rank's classes, in the dtype that is computed in.
        target, kept, weight: (P,), global class or 0, whether it counts, and (C,).
        start, stop: This rank's classes.
    """

    case: CrossEntropyCase

    def __init__(self, case: CrossEntropyCase, mesh: DeviceMesh, given: Given) -> None:
        self.case, self.group = case, mesh.get_group()
        self.start, self.stop = shard_bounds(case.num_classes, case.world_size, mesh.get_local_rank())
        local = given["x"].detach().movedim(case.class_dim, -1).reshape(case.num_positions, self.stop - self.start)
        self.dtype = local.dtype
        self.x = local if local.dtype == torch.float64 else local.float()
        target = given["target"].reshape(-1)
        self.kept = target != case.ignore_index
        self.target = torch.where(self.kept, target, 0)
        self.weight = given.get("weight", torch.ones(case.num_classes, dtype=self.dtype))
        self.cotangent = given["cotangent"].reshape(-1)

    def answers(self) -> Answers:
        """Output and gradient, plain tensors."""
        y = self.log_softmax().to(self.dtype)  # (P, c)
        found: Mapping[str, torch.Tensor | None] = {
            "output": self.loss(y).requires_grad_(bool(self.case.requires_grad))
        }
        if self.case.requires_grad:
            gradient = self.gradient(y).view(*self.case.positions, self.stop - self.start)
            found = {**found, "grad.x": gradient.movedim(-1, self.case.class_dim)}
        return under_contract(self.case, found)

    def log_softmax(self) -> torch.Tensor:
        shifted = self.x - self.largest()
        return shifted - self.total(shifted.exp().sum(1, keepdim=True)).log()

    def largest(self) -> torch.Tensor:
        """(P, 1), over all classes."""
        lowest = self.x.new_full((len(self.x), 1), torch.finfo(self.x.dtype).min)
        own = torch.cat([self.x, lowest], 1)  # a rank may have no class
        return self.reduced(own.amax(1, keepdim=True), ReduceOp.MAX)

    def total(self, own: torch.Tensor) -> torch.Tensor:
        """Sums over all classes, from `own` for this rank's classes: (P, 1)."""
        return self.reduced(own, ReduceOp.SUM)

    def loss(self, y: torch.Tensor) -> torch.Tensor:
        y_target = self.reduced((y * self.hits()).sum(1), ReduceOp.SUM)
        terms = torch.where(self.kept, -y_target * self.weight_of_target(), 0.0)
        if self.case.reduction == "none":
            return terms.view(self.case.positions)
        return terms.sum() / (self.divisor() if self.case.reduction == "mean" else 1)

    def gradient(self, y: torch.Tensor) -> torch.Tensor:
        """(P, c)."""
        scale = self.cotangent * self.weight_of_target() / (self.divisor() if self.case.reduction == "mean" else 1)
        return (y.exp() - self.hits()) * torch.where(self.kept, scale, 0.0).unsqueeze(1)

    def hits(self) -> torch.Tensor:
        """Holds 1 at the target of each position if the target is this rank's: (P, c)."""
        return (self.target.unsqueeze(1) == torch.arange(self.start, self.stop)).to(self.dtype)

    def weight_of_target(self) -> torch.Tensor:
        """(P,)."""
        return self.weight[self.target]

    def divisor(self) -> torch.Tensor:
        """Returns the divisor of a mean: 0-dim."""
        return (self.weight_of_target() * self.kept).sum()

    def reduced(self, own: torch.Tensor, op: ReduceOp.RedOpType) -> torch.Tensor:
        whole = own.clone()
        dist.all_reduce(whole, op, self.group)
        return whole


def own_cross_entropy(case: CrossEntropyCase, mesh: DeviceMesh, given: Given) -> Answers:
    """No defect: the base of the others."""
    return OwnLoss(case, mesh, given).answers()


class _LargestOfOwn(OwnLoss):
    """Each rank subtracts the maximum of its own classes; sums of exponentials are added without a correction."""

    def largest(self) -> torch.Tensor:
        return self.x.amax(1, keepdim=True)


largest_of_own_classes = wrong(
    "a partial value taken for the whole",
    CrossEntropyCase(world_size=2, num_classes=2, requires_grad=()),
    "two ranks need one class each, whose logits differ",
)(answers_of(_LargestOfOwn))


class _SumOfOwn(OwnLoss):
    """The sum of exponentials is not reduced over the ranks."""

    def total(self, own: torch.Tensor) -> torch.Tensor:
        return own


sum_of_own_classes = wrong(
    "a partial value taken for the whole",
    CrossEntropyCase(world_size=2, num_classes=2, requires_grad=()),
    "two ranks need one class each",
)(answers_of(_SumOfOwn))


class _SumInBfloat16(OwnLoss):
    """The sum of exponentials is reduced in bfloat16."""

    def total(self, own: torch.Tensor) -> torch.Tensor:
        return self.reduced(own.bfloat16(), ReduceOp.SUM).to(own.dtype)


sum_in_bfloat16 = wrong(
    "a reduction in fewer bits",
    CrossEntropyCase(world_size=1, num_classes=2, requires_grad=()),
    "the exponentials of two logits have more bits than bfloat16, on one rank too; of one logit it is 1",
)(answers_of(_SumInBfloat16))


class _TargetOfNext(OwnLoss):
    """Each rank takes the first class of the next rank for its own first one."""

    def hits(self) -> torch.Tensor:
        return (self.target.unsqueeze(1) == torch.arange(self.stop, 2 * self.stop - self.start)).to(self.dtype)


target_of_next_rank = wrong(
    "ids at the edge of a shard",
    CrossEntropyCase(world_size=1, num_classes=2, requires_grad=()),
    "one rank then has no target, and a loss of zero, which is right of one class alone",
)(answers_of(_TargetOfNext))


class _FirstClass(OwnLoss):
    """In the backward, a target on another rank counts as this rank's first class."""

    def gradient(self, y: torch.Tensor) -> torch.Tensor:
        elsewhere = (self.target < self.start) | (self.target >= self.stop)
        self.target = torch.where(elsewhere, self.start, self.target)
        return super().gradient(y)


first_class_for_targets_elsewhere = wrong(
    "ids at the edge of a shard",
    CrossEntropyCase(world_size=2, num_classes=2),
    "two ranks need one class each, and one class is the target",
    claim="gradients_equal_unsharded",
)(answers_of(_FirstClass))


class _WeightOfLocal(OwnLoss):
    """The weight of a target is looked up by its number within the rank that has it."""

    def weight_of_target(self) -> torch.Tensor:
        _, classes_per_rank = shard_bounds(self.case.num_classes, self.case.world_size, 0)
        return self.weight[self.target % classes_per_rank]


weight_of_local_class = wrong(
    "shard order",
    CrossEntropyCase(world_size=2, positions=(2,), num_classes=2, weighted=True, requires_grad=()),
    "two ranks need one class each, and a target on the second",
)(answers_of(_WeightOfLocal))


class _IgnoredCounted(OwnLoss):
    """A mean divides by all positions, including ignored ones."""

    def divisor(self) -> torch.Tensor:
        return self.weight_of_target().sum()


ignored_counted_in_mean = wrong(
    "wrong divisor or wrong group",
    CrossEntropyCase(world_size=1, reduction="mean", ignored="all", requires_grad=()),
    "a mean of nothing is NaN, and zero where what is ignored counts",
)(answers_of(_IgnoredCounted))


class _MeanOfUnweighted(OwnLoss):
    """A mean divides by the number of positions that count, not by their weights."""

    def divisor(self) -> torch.Tensor:
        return self.kept.sum().to(self.dtype)


mean_of_unweighted = wrong(
    "wrong divisor or wrong group",
    CrossEntropyCase(world_size=1, num_classes=2, reduction="mean", weighted=True, requires_grad=()),
    "one position is off by its weight; the loss of a single class is zero",
)(answers_of(_MeanOfUnweighted))


class _IgnoredLearn(OwnLoss):
    """In the backward, ignored positions count as targets of class 0."""

    def gradient(self, y: torch.Tensor) -> torch.Tensor:
        self.kept = torch.ones_like(self.kept)
        return super().gradient(y)


ignored_learn = wrong(
    "flags",
    CrossEntropyCase(world_size=1, num_classes=2, ignored="all"),
    "one position that does not count; the gradient of a single class is zero",
    claim="gradients_equal_unsharded",
)(answers_of(_IgnoredLearn))
