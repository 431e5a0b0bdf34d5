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

from equivtest.families.cross_entropy.case import CrossEntropyCase
from equivtest.kit.subject import Answers, Given, under_contract
from equivtest.layout import shard_bounds


class OwnLoss:
    """One loss on this rank; positions are flattened.

    Attributes:
        x: (P, c), the logits of this rank's classes, in the dtype that is computed in.
        target, kept, weight: (P,), global class or 0, whether it counts, and (C,).
        start, stop: This rank's classes.
    """

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
        """(P, 1), the sum over all classes of which `own` is this rank's."""
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
        """1 at the target of each position, where it is this rank's: (P, c)."""
        return (self.target.unsqueeze(1) == torch.arange(self.start, self.stop)).to(self.dtype)

    def weight_of_target(self) -> torch.Tensor:
        """(P,)."""
        return self.weight[self.target]

    def divisor(self) -> torch.Tensor:
        """By what a mean divides: 0-dim."""
        return (self.weight_of_target() * self.kept).sum()

    def reduced(self, own: torch.Tensor, op: ReduceOp.RedOpType) -> torch.Tensor:
        whole = own.clone()
        dist.all_reduce(whole, op, self.group)
        return whole


def own_cross_entropy(case: CrossEntropyCase, mesh: DeviceMesh, given: Given) -> Answers:
    """No defect: what the others are made from."""
    return OwnLoss(case, mesh, given).answers()


def largest_of_own_classes(case: CrossEntropyCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Each rank takes away the maximum of its own classes; sums of exponentials are added as they are."""
    return _LargestOfOwn(case, mesh, given).answers()


class _LargestOfOwn(OwnLoss):
    def largest(self) -> torch.Tensor:
        return self.x.amax(1, keepdim=True)


def sum_of_own_classes(case: CrossEntropyCase, mesh: DeviceMesh, given: Given) -> Answers:
    """The sum of exponentials is not reduced over the ranks."""
    return _SumOfOwn(case, mesh, given).answers()


class _SumOfOwn(OwnLoss):
    def total(self, own: torch.Tensor) -> torch.Tensor:
        return own


def sum_in_bfloat16(case: CrossEntropyCase, mesh: DeviceMesh, given: Given) -> Answers:
    """The sum of exponentials is reduced in bfloat16."""
    return _SumInBfloat16(case, mesh, given).answers()


class _SumInBfloat16(OwnLoss):
    def total(self, own: torch.Tensor) -> torch.Tensor:
        return self.reduced(own.bfloat16(), ReduceOp.SUM).to(own.dtype)


def target_of_next_rank(case: CrossEntropyCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Each rank takes its classes to begin where those of the next one do."""
    return _TargetOfNext(case, mesh, given).answers()


class _TargetOfNext(OwnLoss):
    def hits(self) -> torch.Tensor:
        return (self.target.unsqueeze(1) == torch.arange(self.stop, 2 * self.stop - self.start)).to(self.dtype)


def first_class_for_targets_elsewhere(case: CrossEntropyCase, mesh: DeviceMesh, given: Given) -> Answers:
    """In the backward, a target that another rank has is taken for this rank's first class."""
    return _FirstClass(case, mesh, given).answers()


class _FirstClass(OwnLoss):
    def gradient(self, y: torch.Tensor) -> torch.Tensor:
        elsewhere = (self.target < self.start) | (self.target >= self.stop)
        self.target = torch.where(elsewhere, self.start, self.target)
        return super().gradient(y)


def weight_of_local_class(case: CrossEntropyCase, mesh: DeviceMesh, given: Given) -> Answers:
    """The weight of a target is looked up by its number within the rank that has it."""
    return _WeightOfLocal(case, mesh, given).answers()


class _WeightOfLocal(OwnLoss):
    def weight_of_target(self) -> torch.Tensor:
        _, classes_per_rank = shard_bounds(self.case.num_classes, self.case.world_size, 0)
        return self.weight[self.target % classes_per_rank]


def ignored_counted_in_mean(case: CrossEntropyCase, mesh: DeviceMesh, given: Given) -> Answers:
    """A mean divides by all positions, the ignored ones included."""
    return _IgnoredCounted(case, mesh, given).answers()


class _IgnoredCounted(OwnLoss):
    def divisor(self) -> torch.Tensor:
        return self.weight_of_target().sum()


def mean_of_unweighted(case: CrossEntropyCase, mesh: DeviceMesh, given: Given) -> Answers:
    """A mean divides by the number of positions that count, not by their weights."""
    return _MeanOfUnweighted(case, mesh, given).answers()


class _MeanOfUnweighted(OwnLoss):
    def divisor(self) -> torch.Tensor:
        return self.kept.sum().to(self.dtype)


def ignored_learn(case: CrossEntropyCase, mesh: DeviceMesh, given: Given) -> Answers:
    """In the backward, ignored positions are taken for targets of class 0."""
    return _IgnoredLearn(case, mesh, given).answers()


class _IgnoredLearn(OwnLoss):
    def gradient(self, y: torch.Tensor) -> torch.Tensor:
        self.kept = torch.ones_like(self.kept)
        return super().gradient(y)
