"""Computes one cross entropy of gathered logits as torch's kernels on whole rows do, with label smoothing.

Letters: P positions, C classes, s the smoothing; y the logarithm of the softmax, t the target of a position, W a
class's weight, N the divisor of a mean, g the cotangent; h the hard loss -W_t y_t.

    loss    (1 - s) h + s / C sum over classes of -W y        for a mean, both over N
    dy      -(1 - s) W_t g at the target, - s / C W g at each class; grad.x = dy - exp(y) sum dy

Derived here. y comes from `equivtest.oracle.softmaxes`, for kernels that see whole rows. The sums of nll_loss are kept
in the dtype of storage, so in 16 bits the bound counts roundings to that dtype. The sum over classes is accumulated.
Every other operation stores its result before the next begins. The error of dy goes through grad.x = dy - exp(y) sum
dy, which is linear in dy.

Source: cross_entropy_loss_label_smoothing and nll_loss_out_frame in ATen/native/LossNLL.cpp (2.13.0); softmax_strategy
and nll_loss_forward_strategy in torch/distributed/tensor/_ops/_math_ops.py; _BINARY_ADDITIVE_RULES in _pointwise_ops.py
there, for the sum of a loss that the ranks average and a loss that they sum: the second is summed over the ranks first,
then the sum of both is averaged.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from equivtest.cases.values import draw
from equivtest.families.cross_entropy.gathered.case import GatheredCrossEntropyCase
from equivtest.families.cross_entropy.oracle import expect_bounds, targets_of
from equivtest.layout import Replicate
from equivtest.oracle import expect
from equivtest.oracle.collectives import Collectives, expected_collectives, redistribute
from equivtest.oracle.declared import arithmetic_of
from equivtest.oracle.expected import Expected
from equivtest.oracle.losses import Targets, exp_error, nll, rounded, sum_of_weights
from equivtest.oracle.rounding import U_REFERENCE, Arithmetic, Bounded, growth
from equivtest.oracle.softmaxes import log_softmax, log_softmax_grad

Off = tuple[torch.Tensor, torch.Tensor]
"""(value, error), both tensors of one shape."""


@expect.register
def expect_gathered(case: GatheredCrossEntropyCase, index: int) -> Expected:
    return expect_bounds(case, bound_gathered(case, index))


def bound_gathered(case: GatheredCrossEntropyCase, index: int) -> dict[str, Bounded]:
    """Returns the loss and the logits' gradient by name. The gradient has one row per position."""
    given, arithmetic = draw(case, index), arithmetic_of(case.dtype)
    x = given["x"].double().movedim(case.class_dim, -1).reshape(-1, case.num_classes)
    loss = _Loss(case, targets_of(case, given["target"].reshape(-1), given.get("weight")), given.get("weight"))
    y = log_softmax(x, arithmetic)
    answers = {"output": loss.forward(y)}
    if case.requires_grad:
        g, e_g = loss.backward(given["cotangent"].double().reshape(-1).expand(len(x)))
        bound = _through(y, log_softmax_grad(x, g, arithmetic), e_g, x, arithmetic)
        allowed = torch.where(g.any(1, keepdim=True), bound.allowed, 0.0)  # 0 - p * 0
        answers["grad.x"] = Bounded(bound.value, allowed, bound.derivation)
    return answers


class _Loss:
    """Computes the loss and its gradient with respect to the log-softmax y, each with a bound.

    The operations and their order are torch's.

    Attributes:
        weights: One weight per class, a float64 tensor. All weights are 1 if the case has none.
    """

    def __init__(self, case: GatheredCrossEntropyCase, targets: Targets, weight: torch.Tensor | None) -> None:
        self.case, self.targets, self.arithmetic = case, targets, arithmetic_of(case.dtype)
        self.narrow = replace(self.arithmetic, accumulate=case.dtype)
        self.weights = torch.ones(case.num_classes, dtype=torch.float64) if weight is None else weight.double()
        self.smoothing = case.label_smoothing

    def forward(self, y: Bounded) -> Bounded:
        hard = self._averaged(nll(y, self.targets, self.narrow, self.case.reduction))
        if not self.smoothing:
            return hard
        left, right = self._times((hard.value, hard.allowed), 1 - self.smoothing), self._smooth(y)
        value, error = left[0] + right[0], left[1] + right[1]
        allowed = torch.where(value.isnan(), 0.0, rounded(value, error, self.arithmetic))
        return Bounded(value, allowed, f"{hard.derivation}, and of a sum over all classes")

    def _averaged(self, hard: Bounded) -> Bounded:
        """Adds two roundings if the ranks' means are averaged: a division on each rank, and one of their sum."""
        if self.case.shares == "classes" or self.case.reduction != "mean":
            return hard
        relative = growth((2, self.arithmetic.u_o))
        more = relative * (hard.value.abs() + hard.allowed).nan_to_num(nan=0.0)
        return Bounded(hard.value, hard.allowed + more, f"{hard.derivation}, of means of the ranks")

    def _smooth(self, y: Bounded) -> Off:
        """Returns s / C times the sum over classes of -W y, reduced over positions, and its error."""
        terms, error = -y.value * self.weights, y.allowed * self.weights
        if self.targets.has_weight:
            error = rounded(terms, error, self.arithmetic)
        value, error = self._sum(terms, error)
        value, error = (torch.where(self.targets.kept, each, 0.0) for each in (value, error))
        if self.case.reduction != "none":
            value, error = self._sum(value, error, self.case.shares == "positions")
        if self.case.reduction == "mean":
            value, error = self._over_total(value, error)
        return self._times((value, error), self.smoothing / self.case.num_classes)

    def backward(self, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the gradient of y and its error, each (positions, classes). g is the cotangent of the loss."""
        hits = torch.zeros(len(g), self.case.num_classes, dtype=torch.float64)
        hits = hits.scatter(1, self.targets.classes.unsqueeze(1), 1.0)
        value, error = self._backward_of(g, hits, 1 - self.smoothing)
        if self.smoothing:
            more, e_more = self._backward_of(g, torch.ones_like(hits), self.smoothing / self.case.num_classes)
            value, error = value + more, rounded(value + more, error + e_more, self.arithmetic)
        kept = self.targets.kept.unsqueeze(1)
        return torch.where(kept, value, 0.0), torch.where(kept, error, 0.0)

    def _backward_of(self, g: torch.Tensor, where: torch.Tensor, factor: float) -> Off:
        """Returns -factor * g * weight, zero outside of the mask `where`, and its error."""
        value, error = self._times((g, torch.zeros_like(g)), factor)
        if self.case.reduction == "mean":
            value, error = self._over_total(value, error)
        value, error = (-value.unsqueeze(1) * self.weights * where, error.unsqueeze(1) * self.weights * where)
        return value, rounded(value, error, self.arithmetic) if self.targets.has_weight else error

    def _times(self, off: Off, factor: float) -> Off:
        """Returns the product and its error. A factor other than 1 rounds twice: when computed and when cast."""
        value, error = off[0] * factor, off[1] * factor
        if factor != 1:
            error = error + growth((1, U_REFERENCE), (1, self.arithmetic.u_a)) * (value.abs() + error)
            error = rounded(value, error, self.arithmetic)
        return value, error

    def _sum(self, value: torch.Tensor, error: torch.Tensor, divided: bool = False) -> Off:  # noqa: FBT001, FBT002
        """Returns the sum of `value` over the last dim, and the error of the sum.

        The sum is accumulated, then stored. If `divided` is True, each rank stores its own sum, and the ranks' sums are
        added. With the reduction 'mean' the ranks add twice: first this sum alone, then the total of this sum and the
        hard loss.
        """
        num_sums = 2 if self.case.reduction == "mean" else 1
        stored_on_ranks = (num_sums * self.case.world_size if divided else 0, self.arithmetic.u_o)
        relative = growth((value.shape[-1], self.arithmetic.u_a), stored_on_ranks)
        brought = error.sum(-1) + relative * (value.abs() + error).sum(-1)
        return value.sum(-1), rounded(value.sum(-1), brought, self.arithmetic)

    def _over_total(self, value: torch.Tensor, error: torch.Tensor) -> Off:
        total, e_total = sum_of_weights(self.targets, self.narrow)
        off = (error + (value / total).abs() * e_total) / (total - e_total)
        return value / total, rounded(value / total, off, self.arithmetic)


def _through(y: Bounded, right: Bounded, e_g: torch.Tensor, x: torch.Tensor, arithmetic: Arithmetic) -> Bounded:
    """Returns grad.x with its bound. `right` assumes an exact gradient of y; `e_g` is that gradient's error."""
    if x.shape[1] == 1:
        return right
    p = y.value.exp()
    moved = e_g + (p + exp_error(p, y.allowed, arithmetic)) * e_g.sum(1, keepdim=True)
    rounding = log_softmax_grad(x, e_g, arithmetic).allowed * bool(e_g.any())
    return Bounded(right.value, right.allowed + moved * (1 + 4 * arithmetic.u_o) + rounding, right.derivation)


@expected_collectives.register
def gathered_collectives(case: GatheredCrossEntropyCase, rank: int) -> Collectives:
    """Returns one all_gather of the logits, which precedes the softmax in the forward.

    The backward calls no collective, because each rank cuts its shard out of the gradient.

    Source: softmax_strategy in torch/distributed/tensor/_ops/_math_ops.py (2.13.0): the reduced dim is replicated;
    DTensor.from_local for the gradient.
    """
    return tuple(redistribute(case, case.shapes()["x"], case.layouts()["x"].placements[0], Replicate(), "forward"))
