"""Divides a chain of layers into the stages of a pipeline, and trains it by a schedule of torch.

Source: PipelineStage and the schedules in torch/distributed/pipelining (2.13.0).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, schedules

from equivtest.programs.examples.pipeline import Chain

NUM_MICRO_BATCHES = 8
ONE_STAGE = ("GPipe", "1F1B")
"""Schedules in which each rank has one stage. In all other schedules each rank has two stages."""
BACK_AND_FORTH = ("ZBVZeroBubble",)
"""Schedules in which the first rank has the first stage and the last stage."""


class Stage(nn.Module):
    """Layers that run one after the other."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Pipeline(nn.Module):
    """The layers of a chain that one rank has.

    Attributes:
        layers: The layers of this rank, by their number in the chain.
        stages: The layers of each stage of this rank, by the number of the stage.
        loss: The function of a micro-batch's outputs and weights that gives the micro-batch's loss.
        takes_mean: True if the loss of the batch is the mean of the losses of the micro-batches.
        infers: True if the stages infer the shapes of tensors that they receive, False if the shapes are given.
        schedule: Made in the first step.
    """

    def __init__(self, chain: Chain, mesh: DeviceMesh, schedule: str, *, infers: bool) -> None:
        super().__init__()
        self.mesh, self.name, self.infers = mesh, schedule, infers
        self.loss, self.takes_mean = chain.loss, chain.takes_mean
        self.layers = nn.ModuleDict()
        self.stages: dict[int, list[nn.Module]] = {}
        self.schedule: Any = None
        rank, num_ranks = mesh.get_local_rank(), mesh.size()
        numbers = stages_of(rank, num_ranks, schedule)
        self.num_stages = num_ranks * len(numbers)
        for number in numbers:
            own = torch.arange(len(chain.layers)).tensor_split(self.num_stages)[number].tolist()
            self.stages[number] = [chain.layers[layer] for layer in own]
            self.layers.update({str(layer): chain.layers[layer] for layer in own})

    @property
    def is_first(self) -> bool:
        return 0 in self.stages

    @property
    def is_last(self) -> bool:
        return self.num_stages - 1 in self.stages

    @property
    def last(self) -> int:
        """The rank that has the last stage."""
        return 0 if self.name in BACK_AND_FORTH else self.mesh.size() - 1

    def make_schedule(self, batch: torch.Tensor) -> Any:
        """Returns a schedule for batches of the same shape."""
        stages = [self.make_stage(number, layers, batch) for number, layers in self.stages.items()]
        kind: Any = schedules.get_schedule_class(self.name)
        own = stages[0] if self.name in ONE_STAGE else stages
        return kind(own, NUM_MICRO_BATCHES, loss_fn=self.loss, scale_grads=self.takes_mean)

    def make_stage(self, number: int, layers: list[nn.Module], batch: torch.Tensor) -> PipelineStage:
        given: dict[str, Any] = {"group": self.mesh.get_group()}
        if not self.infers:
            row = batch.detach().chunk(NUM_MICRO_BATCHES)[0]
            hidden = row.clone().requires_grad_()
            given |= {"input_args": hidden if number else row, "output_args": hidden}
        return PipelineStage(Stage(layers), number, self.num_stages, batch.device, **given)


def stages_of(rank: int, num_ranks: int, schedule: str) -> tuple[int, ...]:
    """Returns the numbers of the rank's stages."""
    if schedule in ONE_STAGE:
        return (rank,)
    return (rank, 2 * num_ranks - 1 - rank) if schedule in BACK_AND_FORTH else (rank, num_ranks + rank)


def pipelined(chain: Chain, mesh: DeviceMesh, *, schedule: str, infers: bool) -> nn.Module:
    return Pipeline(chain, mesh, schedule, infers=infers)


def scheduled(
    module: Any, mesh: DeviceMesh, micro_batches: Any, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Runs one step of training by the schedule, which cuts the batch into micro-batches."""
    (batch,) = micro_batches
    module.schedule = module.schedule or module.make_schedule(batch["x"])
    optimizer.zero_grad()
    losses: list[torch.Tensor] = []
    inputs = (batch["x"],) if module.is_first else ()
    target = {"target": batch["weights"], "losses": losses} if module.is_last else {}
    module.schedule.step(*inputs, **target)
    optimizer.step()
    loss = torch.stack(losses).sum() if module.is_last else batch["x"].new_zeros(())
    distributed.broadcast(loss, group=mesh.get_group(), group_src=module.last)
    return {"loss": loss / NUM_MICRO_BATCHES if module.takes_mean else loss}
