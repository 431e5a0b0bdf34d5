"""Steps of training over all tokens of a batch, wrong in one way each, as trainers have been."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import distributed

from equivtest.programs.examples.token_mean import MAX_NORM, Report, TokenMean, clip
from tests.defects.programs import token_mean as shipped


class Step(TokenMean):
    """A right step; subclasses change one part."""

    shards: ClassVar[bool] = False  # by FSDP2; else DistributedDataParallel

    def clip_to(self, norm: torch.Tensor) -> None:
        for parameter in self.module.parameters():
            parameter.grad.mul_((MAX_NORM / (norm + 1e-6)).clamp(max=1.0))


class MeanOfMeans(shipped.MeanOfMeans, Step):
    pass


class MeanOfRanks(Step):
    def scaled(self, number: int, loss: torch.Tensor) -> torch.Tensor:
        return loss / self.own.sum().clamp(min=1)


class IgnoredCounted(Step):
    def counted(self) -> torch.Tensor:
        return self.summed(torch.tensor(sum(each["targets"].numel() for each in self.micro_batches)))


class LastCounted(Step):
    def counted(self) -> torch.Tensor:
        return self.summed(self.own[-1].clone()) * len(self.own)


class LargestCounted(Step):
    def counted(self) -> torch.Tensor:
        most = self.own.sum()
        distributed.all_reduce(most, distributed.ReduceOp.MAX, group=self.mesh.get_group())
        return most * self.mesh.size()


class WholeCounted(Step):
    """Tokens for each rank, rounded down."""

    def counted(self) -> torch.Tensor:
        return (super().counted() // self.mesh.size()).clamp(min=1) * self.mesh.size()


class DividedTwice(Step):
    def scaled(self, number: int, loss: torch.Tensor) -> torch.Tensor:
        return super().scaled(number, loss) / len(self.own)


class RanksForgotten(Step):
    def scaled(self, number: int, loss: torch.Tensor) -> torch.Tensor:
        return loss / self.num_tokens


class Summed(Step):
    def scaled(self, number: int, loss: torch.Tensor) -> torch.Tensor:
        return loss


class FirstReduced(shipped.FirstReduced, Step):
    pass


class FirstReducedOfShards(FirstReduced):
    shards = True


class NeverReduced(Step):
    def reduces(self, number: int) -> bool:
        return False


class ReducedTwice(Step):
    def reduce(self) -> None:
        for parameter in self.module.parameters():
            self.summed(parameter.grad)


class BiasNotReduced(Step):
    """Removes the summands of all other ranks from the bias's gradient."""

    def backward(self, number: int, loss: torch.Tensor) -> None:
        bias = self.module.module.head.bias
        before = torch.zeros_like(bias) if bias.grad is None else bias.grad.clone()
        (own,) = torch.autograd.grad(loss, bias, retain_graph=True)
        super().backward(number, loss)
        bias.grad = before + own


class GradientsKept(shipped.GradientsKept, Step):
    pass


class LastDropped(Step):
    def backward(self, number: int, loss: torch.Tensor) -> None:
        super().backward(number, loss * (number < len(self.own) - 1))


class OwnNorm(shipped.OwnNorm, Step):
    shards = True


class NormWithoutHead(Step):
    def clipped(self) -> torch.Tensor:
        named = self.module.named_parameters()
        norm = torch.nn.utils.get_total_norm([each.grad for name, each in named if "head" not in name])
        self.clip_to(norm)
        return norm


class ReplicasCounted(Step):
    def clipped(self) -> torch.Tensor:
        own = torch.nn.utils.get_total_norm([each.grad for each in self.module.parameters()])
        norm = self.summed(own.square()).sqrt()
        self.clip_to(norm)
        return norm


class MeanOfNorms(Step):
    """Each parameter's norm, averaged."""

    def clipped(self) -> torch.Tensor:
        norm = torch.stack([each.grad.norm() for each in self.module.parameters()]).mean()
        self.clip_to(norm)
        return norm


class ClippedEachTime(Step):
    def backward(self, number: int, loss: torch.Tensor) -> None:
        super().backward(number, loss)
        clip(self.module)


class ClippedBeforeReduction(NeverReduced):
    def reduce(self) -> None:
        self.norm = clip(self.module)
        for parameter in self.module.parameters():
            self.summed(parameter.grad).div_(self.mesh.size())

    def clipped(self) -> torch.Tensor:
        return self.norm


class ClippedAfterUpdate(Step):
    def clipped(self) -> torch.Tensor:
        self.optimizer.step()
        return super().clipped()

    def update(self) -> None:
        pass


class NormAfterClipping(Step):
    def clipped(self) -> torch.Tensor:
        super().clipped()
        return super().clipped()


class UpdatedEachTime(Step):
    def backward(self, number: int, loss: torch.Tensor) -> None:
        super().backward(number, loss)
        if number < len(self.own) - 1:
            self.optimizer.step()


class SkippedByOne(Step):
    """One rank alone skips the update, as if it alone saw an overflow."""

    def update(self) -> None:
        if self.mesh.get_local_rank() != self.mesh.size() - 1:
            super().update()


class DecayedTwice(Step):
    def update(self) -> None:
        super().update()
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.mul_(1 - 0.05 * 0.01)


class RateOfRanks(Step):
    """The learning rate is multiplied by the number of ranks."""

    def update(self) -> None:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] *= math.sqrt(self.mesh.size())
        super().update()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


class OwnReported(shipped.OwnReported, Step):
    pass


class MeanOfMeansReported(Step):
    def reported(self) -> torch.Tensor:
        means = torch.stack(self.losses) / self.own.clamp(min=1)
        return self.summed(means.mean()) / self.mesh.size()


def _subclasses(kind: type[Step]) -> list[type[Step]]:
    return [each for child in kind.__subclasses__() for each in (child, *_subclasses(child))]


WRONG = {kind.__name__: kind for kind in _subclasses(Step)}


def __getattr__(name: str) -> Callable[..., Report]:
    """The step 'run_NAME' of a class."""
    kind = {**WRONG, "Step": Step}.get(name.removeprefix("run_"))
    if kind is None or not name.startswith("run_"):
        raise AttributeError(name)
    return kind.step
