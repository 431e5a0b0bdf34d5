"""Trains a block by PostLocalSGDOptimizer, in which each rank updates its own parameters, and ranks average them later.

Every rank has the same gradients, and multiplies them by a factor. Ranks have different factors, whose average is 1.
Updates by SGD are linear, so the average of the parameters is what one optimizer computes from the gradients
themselves. The unsharded module has a copy of the parameters for each of four factors, and averages the copies as four
ranks do.

Source: torch/distributed/optim/post_localSGD_optimizer.py; averagers.py and hierarchical_model_averager.py in
torch/distributed/algorithms/model_averaging (2.13.0).
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager, PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.nn.parallel import DistributedDataParallel

from equivtest.programs.examples.gated import GatedBlock

PERIOD, WARM_UP, NUM_COPIES = 4, 1, 4


class LocalBlock(GatedBlock):
    """A block that names its averager: 'periodic', or 'hierarchical' if half of the ranks average more often.

    The layer `up`, which no averager averages, is frozen.
    """

    def __init__(self, averager: str) -> None:
        super().__init__(2, 5)
        self.averager = averager
        self.up.requires_grad_(requires_grad=False)


def local_block(*, averager: str) -> nn.Module:
    return LocalBlock(averager)


class Local(torch.optim.Optimizer):
    """SGD on this rank's parameters, or on copies of the parameters of an unsharded module.

    A step makes `PERIOD` updates from the same gradients. The first step makes one more, and if the averager counts
    from the end of its warm-up, `WARM_UP` more. So all ranks average after the last update of each step. After the
    first step, a parallel module resumes from a saved state.

    Attributes:
        copies: Parameters that an optimizer of `inner` updates, with the factor of their gradients.
        num_updates: Number of updates so far.
        first: Number of the first update after which all copies are averaged.
    """

    def __init__(self, module: Any) -> None:
        self.module, self.num_updates = module, 0
        self.parameters: list[nn.Parameter] = list(module.parameters())
        self.is_parallel = isinstance(module, DistributedDataParallel)
        averager = getattr(module, "module", module).averager
        self.first = WARM_UP if averager == "periodic" else 0
        if self.is_parallel:
            group = module.process_group
            self.copies: list[tuple[float, list[Any]]] = [(factor(group.rank(), group.size()), self.parameters)]
        else:
            kept = [each.detach().clone() for each in self.parameters]
            self.copies = [
                (factor(number, NUM_COPIES), [each.clone().requires_grad_() for each in kept])
                for number in range(NUM_COPIES)
            ]
        self.inner = [self.made(parameters) for _, parameters in self.copies]
        super().__init__(self.parameters, {})

    def made(self, parameters: list[Any]) -> Any:
        made: Any = torch.optim.SGD(parameters[:-1], lr=0.25, momentum=0.5, weight_decay=0.25, foreach=False)
        if self.is_parallel:
            from torch.distributed.optim import PostLocalSGDOptimizer  # warns that torch.jit is deprecated

            made = PostLocalSGDOptimizer(made, averager_of(self.module))
        made.add_param_group({"params": parameters[-1:], "lr": 0.125, "weight_decay": 0.0})
        return made

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        gradients = [each.grad for each in self.parameters]
        for scale, parameters in self.copies:
            for own, parameter, gradient in zip(parameters, self.parameters, gradients, strict=True):
                if own is not parameter:
                    own.copy_(parameter)
                own.grad = None if gradient is None else gradient * scale
        for _ in range(PERIOD + (0 if self.num_updates else self.first + 1)):
            for each in self.inner:
                self.update(each)
            self.average(self.num_updates - self.first)
            self.num_updates += 1
        if self.is_parallel and self.num_updates == PERIOD + self.first + 1:
            self.resume()

    def update(self, optimizer: Any) -> None:
        """Updates and averages, by the averager itself if a parallel module has resumed."""
        if self.is_parallel and self.num_updates > PERIOD + self.first:
            optimizer.optim.step()
            optimizer.averager.average_parameters(iter(self.parameters))
        else:
            optimizer.step()

    def average(self, number: int) -> None:
        """Averages the copies after the update with this number, first two by two, then all."""
        if self.is_parallel or number < 0 or number % (PERIOD // 2):
            return
        groups: Sequence[list[int]] = ([0, 1], [2, 3]) if number % PERIOD else ([0, 1], [2, 3], [0, 1, 2, 3])
        for group in groups:
            for alike in zip(*(self.copies[index][1] for index in group), strict=True):
                mean = torch.stack(alike).mean(0)
                for each in alike:
                    each.copy_(mean)
        if not number % PERIOD:
            for parameter, right in zip(self.parameters, self.copies[0][1], strict=True):
                parameter.copy_(right)

    def resume(self) -> None:
        """Loads the state into a new optimizer, whose averager has counted no update before."""
        state = copy.deepcopy(self.inner[0].state_dict())
        self.inner = [self.made(self.parameters)]
        self.inner[0].load_state_dict(state)


def factor(rank: int, num_ranks: int) -> float:
    """Returns a rank's factor: 1/2 and 3/2 for two ranks, and 1/4, 3/4, 5/4 and 7/4 for four."""
    return (2 * rank + 1) / num_ranks


def averager_of(module: Any) -> ModelAverager:
    group = module.process_group
    if module.module.averager == "periodic":
        return PeriodicModelAverager(PERIOD, WARM_UP, process_group=group)
    sizes = OrderedDict({PERIOD // 2: group.size() // 2, PERIOD: group.size()})
    return HierarchicalModelAverager(sizes, WARM_UP, process_group=group)  # type: ignore[no-untyped-call]


def local(module: nn.Module) -> torch.optim.Optimizer:
    return Local(module)
