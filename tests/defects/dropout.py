"""Dropouts that are wrong in one way each; all except the last modify our own dropout."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from equivtest.cases.subject import Answers, Given
from equivtest.families.dropout.case import DropoutCase
from equivtest.families.dropout.subject import dropout_answers, parallel_dropout
from tests.defects.defect import Replacing, answers_of

wrong = Replacing("parallel_dropout")


@dataclass
class OwnDropout:
    """A dropout on local tensors; defects change its methods."""

    case: DropoutCase
    mesh: DeviceMesh
    given: Given
    source: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.source = torch.Generator(device=self.mesh.device_type).manual_seed(self.seed())

    def answers(self) -> Answers:
        x = self.given["x"].detach().requires_grad_("x" in self.case.requires_grad)
        mask = self.mask(x)
        output = _Masked.apply(x, mask, self.mask_of_backward(x, mask), self.scale())  # type: ignore[no-untyped-call]
        if output.requires_grad:
            output.backward(self.given["cotangent"])
        return dropout_answers(self.case, x, output)

    def seed(self) -> int:
        """Another one for each part, from one that all ranks share."""
        return int(self.given["seeds"]) + self.part

    @property
    def part(self) -> int:
        return self.mesh.get_local_rank() if self.case.is_sharded else 0

    def mask(self, x: torch.Tensor) -> torch.Tensor:
        """Draws the mask of elements to keep."""
        if self.case.is_identity:
            return torch.ones_like(x, dtype=torch.bool)
        return torch.rand(x.shape, generator=self.source, device=x.device) < self.chance()

    def chance(self) -> float:
        """The chance of an element to be left."""
        return 1 - self.case.p

    def mask_of_backward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return mask

    def scale(self) -> float:
        return 1.0 if self.case.is_identity or self.case.p == 1 else 1 / (1 - self.case.p)


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor, back: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(back)
        ctx.scale = scale
        return x.mul(scale).where(mask, 0)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return cotangent.mul(ctx.scale).where(ctx.saved_tensors[0], 0), None, None, None


class _AnotherInBackward(OwnDropout):
    """The backward draws a new mask."""

    def mask_of_backward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.mask(x)


another_mask_in_backward = wrong(
    "state across calls",
    DropoutCase(world_size=1, values=(("dense", 1),)),
    "of one element the two masks differ half of the time",
    claim="gradients_equal_unsharded",
)(answers_of(_AnotherInBackward))


class _NewNumbers(OwnDropout):
    """The recomputation draws a new mask."""

    def mask_of_backward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.mask(x) if self.case.recomputed else mask


new_numbers_in_the_recomputation = wrong(
    "state across calls",
    DropoutCase(world_size=1, recomputed=True, values=(("dense", 1),)),
    "of one element the two masks differ half of the time",
    claim="gradients_equal_unsharded",
)(answers_of(_NewNumbers))


class _NotScaled(OwnDropout):
    """The remaining elements are not divided by 1 - p."""

    def scale(self) -> float:
        return 1.0


not_scaled = wrong(
    "wrong divisor or wrong group",
    DropoutCase(world_size=1, requires_grad=(), values=(("dense", 6),)),
    "one element that is left",
)(answers_of(_NotScaled))


class _SameInEach(OwnDropout):
    """Each rank draws rank 0's mask for its own part."""

    def seed(self) -> int:
        return self.case.values[0][1]


same_mask_in_each_shard = wrong(
    "chance that is none",
    DropoutCase(world_size=2, shape=(2, 56), layout="shard(0)", requires_grad=()),
    "two ranks need the 56 elements each that the claim requires",
    claim="drops_at_random",
)(answers_of(_SameInEach))


class _Apart(OwnDropout):
    """Each rank draws by its number, even if all ranks hold the same tensor."""

    @property
    def part(self) -> int:
        return self.mesh.get_local_rank()


replicas_that_draw_apart = wrong(
    "replicas that differ",
    DropoutCase(world_size=2, requires_grad=(), values=(("dense", 2),)),
    "of one element two ranks differ half of the time",
    claim="agrees_on_all_ranks",
)(answers_of(_Apart))


class _NothingDropped(OwnDropout):
    """Keeps all elements although chance should decide, and still scales them by 1 / (1 - p)."""

    def chance(self) -> float:
        return 1.0 if self.case.drops_some else super().chance()


nothing_dropped = wrong(
    "chance that is none",
    DropoutCase(world_size=1, shape=(56,), requires_grad=()),
    "the 56 elements that the claim requires",
    claim="drops_at_random",
)(answers_of(_NothingDropped))


@wrong("flags", DropoutCase(world_size=1, training=False, requires_grad=()), "one element is doubled or dropped")
def drops_in_eval(case: DropoutCase, mesh: DeviceMesh, given: Given) -> Answers:
    """torch's dropout in training mode, even if the module is in eval mode."""
    return parallel_dropout(_in_training(case), mesh, given)


def _in_training(case: DropoutCase) -> DropoutCase:
    """The case in training mode, in which its values have no say."""
    return replace(case, training=True, values=(("dense", 0),))
