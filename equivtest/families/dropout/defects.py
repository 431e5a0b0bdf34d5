"""Dropouts that are wrong in one way each: all but the last of our own, and right but for that."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from equivtest.families.dropout.case import DropoutCase
from equivtest.families.dropout.subject import dropout_answers, parallel_dropout
from equivtest.kit.subject import Answers, Given


@dataclass
class OwnDropout:
    """A dropout on local tensors; its methods are what a defect changes."""

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
        """What is left."""
        if self.case.is_identity:
            return torch.ones_like(x, dtype=torch.bool)
        return torch.rand(x.shape, generator=self.source, device=x.device) < self.chance()

    def chance(self) -> float:
        """Of an element to be left."""
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


def another_mask_in_backward(case: DropoutCase, mesh: DeviceMesh, given: Given) -> Answers:
    """The backward draws what is dropped once more."""
    return _AnotherInBackward(case, mesh, given).answers()


class _AnotherInBackward(OwnDropout):
    def mask_of_backward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.mask(x)


def not_scaled(case: DropoutCase, mesh: DeviceMesh, given: Given) -> Answers:
    """What is left is not divided by 1 - p."""
    return _NotScaled(case, mesh, given).answers()


class _NotScaled(OwnDropout):
    def scale(self) -> float:
        return 1.0


def same_mask_in_each_shard(case: DropoutCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Each rank draws for its part what rank 0 draws."""
    return _SameInEach(case, mesh, given).answers()


class _SameInEach(OwnDropout):
    def seed(self) -> int:
        return self.case.values[0][1]


def replicas_that_draw_apart(case: DropoutCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Each rank draws by its number, also where all hold the same."""
    return _Apart(case, mesh, given).answers()


class _Apart(OwnDropout):
    @property
    def part(self) -> int:
        return self.mesh.get_local_rank()


def nothing_dropped(case: DropoutCase, mesh: DeviceMesh, given: Given) -> Answers:
    """All is left where chance should decide, and scaled by 1 / (1 - p) all the same."""
    return _NothingDropped(case, mesh, given).answers()


class _NothingDropped(OwnDropout):
    def chance(self) -> float:
        return 1.0 if self.case.drops_some else super().chance()


def drops_in_eval(case: DropoutCase, mesh: DeviceMesh, given: Given) -> Answers:
    """torch's own, but in training mode also where the module is not."""
    return parallel_dropout(_in_training(case), mesh, given)


def _in_training(case: DropoutCase) -> DropoutCase:
    """The case in training mode, in which its values have no say."""
    return replace(case, training=True, values=(("dense", 0),))
