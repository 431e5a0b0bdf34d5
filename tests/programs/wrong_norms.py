"""Steps that clip by a wrong norm, or do not skip together, wrong in one way each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import distributed
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from equivtest.programs.examples.mixture import MAX_NORM
from equivtest.programs.examples.mixture_plan import local
from equivtest.programs.examples.total_norm import ByGroups, InOneCall, Scaled


class Groups(ByGroups):
    """A right step that clips by the norm of all gradients; subclasses change one part."""

    build: ClassVar[str] = "grouped_with_empty_shards"
    parallelize: ClassVar[str] = "over_meshes"

    def over_axis(self, norm: torch.Tensor, axis: str) -> torch.Tensor:
        """The norm of the ranks' norms along an axis of the mesh."""
        power = norm**self.norm_type
        distributed.all_reduce(power, group=self.mesh[axis].get_group())
        return power ** (1 / self.norm_type)


class ReplicasOfGroupsCounted(Groups):
    """Counts a gradient that all ranks hold alike once for each of them."""

    def combined(self, norms: list[torch.Tensor]) -> torch.Tensor:
        *others, alike = norms
        return super().combined([*others, self.over_axis(self.over_axis(alike, "dp"), "tp")])


class ShardsCountedByTheOtherAxis(Groups):
    """Counts a gradient that is divided along one axis once for each rank of the other."""

    def combined(self, norms: list[torch.Tensor]) -> torch.Tensor:
        return self.over_axis(super().combined(norms), "dp")


class ExpertsLeftOut(Groups):
    def in_groups(self) -> dict[distributed.ProcessGroup, list[torch.Tensor]]:
        experts = self.module.groups["experts"]
        return {group: own for group, own in super().in_groups().items() if group is not experts}


class ExpertsOverTheOtherAxis(Groups):
    """Sums the experts along dp, although the ranks along tp have different experts."""

    def over_group(self, gradients: list[torch.Tensor], group: distributed.ProcessGroup) -> torch.Tensor:
        is_experts = group is self.module.groups["experts"]
        return super().over_group(gradients, self.mesh["dp"].get_group() if is_experts else group)


class OwnNormOfStages(Groups):
    """Each stage counts its own parameters, and no other's."""

    def over_group(self, gradients: list[torch.Tensor], group: distributed.ProcessGroup) -> torch.Tensor:
        is_stages = group is self.module.groups["first_stage"]
        return self.norm_of(gradients) if is_stages else super().over_group(gradients, group)


class NormsAdded(Groups):
    """The norms of the parts are added up, not their powers."""

    def combined(self, norms: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(norms).sum()


class NormsOfRanksAdded(Groups):
    def over_group(self, gradients: list[torch.Tensor], group: distributed.ProcessGroup) -> torch.Tensor:
        own = self.norm_of(gradients)
        distributed.all_reduce(own, group=group)
        return own


class AveragedThenSummed(Groups):
    """The mean of the ranks' powers."""

    def over_group(self, gradients: list[torch.Tensor], group: distributed.ProcessGroup) -> torch.Tensor:
        return super().over_group(gradients, group) / math.sqrt(group.size())


class EachMeshByItself(Groups):
    """Clips every group of parameters by the group's norm."""

    def clip(self) -> torch.Tensor:
        total = super().combined([*self.norms()])
        for alike in (*self.on_meshes(parameters=True).values(), self.plain()):
            norm = self.norm_of([each.grad for each in alike if each.grad is not None])
            clip_grads_with_norm_(alike, MAX_NORM, norm)
        return total


class PlainNotClipped(Groups):
    def plain(self) -> list[torch.Tensor]:
        return []


class LargestAdded(Groups):
    """The largest of each rank, added up over the ranks."""

    build = "grouped"
    norm_type = math.inf

    def over_group(self, gradients: list[torch.Tensor], group: distributed.ProcessGroup) -> torch.Tensor:
        own = self.norm_of(gradients)
        distributed.all_reduce(own, group=group)
        return own


class OneMesh(InOneCall):
    build: ClassVar[str] = "with_empty_shards"
    parallelize: ClassVar[str] = "on_one_mesh"


class OwnShards(OneMesh):
    """Each rank clips its own shards by the norm of its own shards."""

    def clip(self) -> torch.Tensor:
        gradients = [local(each.grad) for each in self.module.parameters() if each.grad is not None]
        norm = get_total_norm(gradients)
        for gradient in gradients:
            gradient.mul_((MAX_NORM / (norm + 1e-6)).clamp(max=1.0))
        return norm


class OwnLargest(OneMesh):
    """Takes the largest magnitude, a partial maximum in torch, without the other ranks' values."""

    build = "mixture"
    norm_type = math.inf

    def clip(self) -> torch.Tensor:
        return local(clip_grad_norm_(self.module.parameters(), MAX_NORM, self.norm_type))


class ScalarLeftOut(OneMesh):
    """Parameters without dims have no norm."""

    def clip(self) -> torch.Tensor:
        norm = clip_grad_norm_([each for each in self.module.parameters() if each.dim()], MAX_NORM)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


class ClippedTwice(OneMesh):
    def clip(self) -> torch.Tensor:
        norm = super().clip()
        clip_grads_with_norm_(self.module.parameters(), MAX_NORM, norm)
        return norm


class Skips(Scaled):
    build: ClassVar[str] = "divided_first"
    parallelize: ClassVar[str] = "on_one_mesh"


class OwnOverflow(Skips):
    """Each rank skips the update only if it has seen an infinity in its own gradients."""

    def unscale(self, scaler: torch.amp.GradScaler) -> None:
        gradients = [local(each.grad) for each in self.module.parameters() if each.grad is not None]
        found = not all(each.isfinite().all() for each in gradients)
        super().unscale(scaler)
        for tensor in scaler._found_inf_per_device(self.optimizer).values():
            tensor.fill_(float(found))


class NeverSkipped(Skips):
    def update(self, scaler: torch.amp.GradScaler) -> None:
        self.optimizer.step()
        super().update(scaler)


class NotUnscaled(Skips):
    """Clipped before the scale is taken out, so that everything is clipped, by the scaled norm."""

    def unscale(self, scaler: torch.amp.GradScaler) -> None:
        pass


class ScaledTwice(Skips):
    def unscale(self, scaler: torch.amp.GradScaler) -> None:
        super().unscale(scaler)
        for each in self.module.parameters():
            if each.grad is not None:
                each.grad.mul_(1 / scaler.get_scale())


WRONG_NORMS: dict[str, type[Any]] = {
    kind.__name__: kind for right in (Groups, OneMesh, Skips) for kind in right.__subclasses__()
}


class GroupsBySum(Groups):
    norm_type = 1.0


class OneMeshBySum(OneMesh):
    norm_type = 1.0


RIGHT_NORMS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Groups, GroupsBySum, OneMesh, OneMeshBySum, Skips)
}


def __getattr__(name: str) -> Callable[..., Any]:
    """The step 'run_NAME' of a class, by which a case names it."""
    kind = {**RIGHT_NORMS, **WRONG_NORMS}.get(name.removeprefix("run_"))
    if kind is None or not name.startswith("run_"):
        raise AttributeError(name)
    step: Callable[..., Any] = kind.step
    return step
