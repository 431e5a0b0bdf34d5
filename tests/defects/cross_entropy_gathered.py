"""Cross entropies of gathered logits that are wrong in one way each."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from equivtest.cases.subject import Answers, Given
from equivtest.families.cross_entropy.case import CrossEntropyCase
from equivtest.families.cross_entropy.gathered.case import GatheredCrossEntropyCase, RefusedGatheredCrossEntropyCase
from equivtest.families.cross_entropy.subject import dtensor_cross_entropy, gathered_by_torch, run_loss
from equivtest.layout import shard_bounds
from equivtest.tensors import Placed
from tests.defects.defect import Replacing, argument_of

wrong = Replacing("dtensor_cross_entropy")


@wrong(
    "wrong divisor or wrong group",
    GatheredCrossEntropyCase(world_size=2, num_classes=2, label_smoothing=0.125, requires_grad=()),
    "two ranks need one class each; of one class all losses are zero",
)
def smoothing_over_own_classes(case: GatheredCrossEntropyCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Divides the smoothing by the number of this rank's classes instead of all classes."""
    if case.shares == "positions":
        return dtensor_cross_entropy(case, mesh, given)
    start, stop = shard_bounds(case.num_classes, case.world_size, mesh.get_local_rank())
    share = case.label_smoothing * case.num_classes / max(1, stop - start)
    return run_loss(case, mesh, given, lambda case, logits, others: _smoothed(case, logits, others, others, share))


@wrong(
    "flags",
    GatheredCrossEntropyCase(world_size=1, num_classes=2, label_smoothing=0.125, ignored="all", requires_grad=()),
    "one position that does not count, and two classes, since the loss of a single one is zero",
)
@argument_of(run_loss)
def ignored_are_smoothed(case: CrossEntropyCase, logits: torch.Tensor, others: Given) -> torch.Tensor:
    """Ignored positions have no loss, but still their share of the smoothing."""
    assert isinstance(case, GatheredCrossEntropyCase)
    target = others["target"]
    counted = {**others, "target": target.masked_fill(target == case.ignore_index, 0)}
    return _smoothed(replace(case, ignore_index=-100), logits, others, counted, case.label_smoothing)


def _smoothed(case: CrossEntropyCase, logits: torch.Tensor, hard: Given, soft: Given, share: float) -> torch.Tensor:
    """Adds (1 - s) times the loss of `hard` and `share` times the loss of `soft` with full smoothing."""
    assert isinstance(case, GatheredCrossEntropyCase)
    if not case.label_smoothing:
        return gathered_by_torch(case, logits, hard)
    left = gathered_by_torch(replace(case, label_smoothing=0.0), logits, hard)
    right = gathered_by_torch(replace(case, label_smoothing=1.0), logits, soft)
    return left * (1 - case.label_smoothing) + right * share


@wrong(
    "other collectives than documented",
    GatheredCrossEntropyCase(world_size=2, records=True, requires_grad=()),
    "two ranks share one class; one rank gathers nothing",
    claim="uses_only_collectives",
)
@argument_of(run_loss)
def logits_gathered_twice(case: CrossEntropyCase, logits: torch.Tensor, others: Given) -> torch.Tensor:
    """The logits are gathered once for nothing."""
    assert isinstance(logits, DTensor)
    DTensor.redistribute(logits, placements=[Replicate()])
    return gathered_by_torch(case, logits, others)


@wrong(
    "a term added on every rank",
    GatheredCrossEntropyCase(world_size=2, num_classes=2),
    "two ranks; the gradient of a single class is zero",
    claim="gradients_equal_unsharded",
)
def gradient_of_every_rank(case: GatheredCrossEntropyCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Each rank has the whole loss; the gradients of all ranks are added, although each is the whole."""
    answers = dtensor_cross_entropy(case, mesh, given)
    gradient = answers.get("grad.x")
    if isinstance(gradient, Placed):
        answers["grad.x"] = Placed(gradient.local * case.world_size, gradient.layout)
    return answers


@wrong(
    "misfits accepted",
    RefusedGatheredCrossEntropyCase(world_size=1, misfit="plain_target", positions=(2,), target_is_dtensor=False),
    "two positions, since torch takes a target of one for a number; one rank must refuse too",
    claim="refuses",
)
def plain_targets_taken(case: GatheredCrossEntropyCase, mesh: DeviceMesh, given: Given) -> Answers:
    """A plain target counts as replicated without a check."""

    def loss(case: CrossEntropyCase, logits: torch.Tensor, others: Given) -> torch.Tensor:
        wrapped = {
            name: tensor if isinstance(tensor, DTensor) else DTensor.from_local(tensor, mesh, [Replicate()])
            for name, tensor in others.items()
        }
        return gathered_by_torch(case, logits, wrapped)

    return run_loss(case, mesh, given, loss)
