"""Trains a block by ZeroRedundancyOptimizer, in which each rank updates some parameters and sends them to all others.

The first optimizer gets its second group of parameters after it is made. A schedule changes its rates. After the first
update its state is saved, and loaded into a new optimizer, which makes all later updates. One weight is frozen while
the state is saved and the new optimizer is made. The second update gets its gradients from a closure.

Source: torch/distributed/optim/zero_redundancy_optimizer.py (2.13.0), which looks for changes of `requires_grad` in
each step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from equivtest.programs.examples.gated import GatedBlock

BIAS: dict[str, Any] = {"lr": 0.25, "weight_decay": 0.0}
OTHERS: dict[str, Any] = {"lr": 0.5, "weight_decay": 0.25}
SGD: tuple[Any, dict[str, Any]] = (torch.optim.SGD, {"momentum": 0.5})
ADAMW: tuple[Any, dict[str, Any]] = (torch.optim.AdamW, {"betas": (0.5, 0.75), "eps": 0.125, "amsgrad": True})

FROZEN = "up.weight"
"""Name of the parameter that is frozen while the state is saved and the second optimizer is made."""


class TrainedBlock(GatedBlock):
    """A block that names the optimizer of each rank, 'SGD' or 'AdamW'."""

    def __init__(self, trains_by: str) -> None:
        super().__init__(2, 5)
        self.trains_by = trains_by


def trained_block(*, trains_by: str) -> nn.Module:
    return TrainedBlock(trains_by)


class Scheduled(torch.optim.Optimizer):
    """SGD or AdamW whose learning rates are halved after each update.

    Attributes:
        inner: The optimizer that updates. A replicated module has a ZeroRedundancyOptimizer.
        num_updates: Number of updates so far.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.num_updates = 0
        self.inner = self.made()
        super().__init__(self.inner.param_groups, {})

    def made(self) -> torch.optim.Optimizer:
        """Makes an optimizer with two groups. The first optimizer gets the second group later."""
        named = dict(self.module.named_parameters())
        biases = {"params": [each for name, each in named.items() if name.endswith("bias")], **BIAS}
        weights = [each for name, each in named.items() if not name.endswith("bias")]
        if self.num_updates:
            return self.made_for([{"params": weights, **OTHERS}, biases])
        made = self.made_for(weights)
        made.add_param_group(biases)
        return made

    def made_for(self, parameters: list[Any]) -> torch.optim.Optimizer:
        kind, options = SGD if getattr(self.module, "module", self.module).trains_by == "SGD" else ADAMW
        options = OTHERS | options
        if not isinstance(self.module, DistributedDataParallel):
            made: torch.optim.Optimizer = kind(parameters, **options)
            return made
        from torch.distributed.optim import ZeroRedundancyOptimizer  # warns that torch.jit is deprecated

        packs, group = bool(self.module.packs), self.module.process_group
        return ZeroRedundancyOptimizer(
            parameters, kind, process_group=group, parameters_as_bucket_view=packs, **options
        )

    def step(self, closure: Any = None) -> Any:
        self.inner.step(self.put_aside() if self.num_updates == 1 else None)
        self.num_updates += 1
        if self.num_updates == 1 and isinstance(self.module, DistributedDataParallel):
            self.reload(self.module.process_group)
        for group in self.inner.param_groups:
            group["lr"] /= 2

    def put_aside(self) -> Callable[[], float]:
        """Removes all gradients. Returns a function that puts them back, as a closure that computes them."""
        gradients = [(each, each.grad) for each in self.module.parameters()]
        self.inner.zero_grad()

        def put_back() -> float:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            return 0.0

        return put_back

    def reload(self, group: distributed.ProcessGroup) -> None:
        """Collects the whole state on the last rank, and loads it into a new optimizer on every rank."""
        frozen: Any = dict(self.module.named_parameters())[f"module.{FROZEN}"]
        frozen.requires_grad_(requires_grad=False)
        saving: Any = self.inner
        last = distributed.get_world_size(group) - 1
        saving.consolidate_state_dict(to=last)
        states: list[Any] = [saving.state_dict() if distributed.get_rank(group) == last else None]
        distributed.broadcast_object_list(states, group=group, group_src=last)
        self.inner = self.made()
        self.inner.load_state_dict(states[0])
        frozen.requires_grad_()


def scheduled(module: nn.Module) -> torch.optim.Optimizer:
    return Scheduled(module)


def replicated(block: nn.Module, mesh: Any, *, packs: bool) -> nn.Module:
    """Replicates the block. `packs` is the argument `parameters_as_bucket_view` of its optimizer."""
    module = DistributedDataParallel(block, process_group=mesh.get_group())
    module.packs = packs  # type: ignore[assignment]  # read by the optimizer
    return module
