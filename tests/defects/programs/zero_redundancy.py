"""Optimizers that are divided among ranks and wrong in one way each."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from equivtest.cases.subject import Answers, Given
from equivtest.programs.case import MEAN_OF_PARTS, ModuleCase
from equivtest.programs.examples.zero_redundancy import Scheduled
from tests.defects.defect import Replacing
from tests.defects.programs.optimizers import trained_by

wrong = Replacing("module")

_FOUR_PARAMETERS = ModuleCase(
    world_size=2,
    build="equivtest.programs.examples.zero_redundancy:trained_block(trains_by='SGD')",
    parallelize="equivtest.programs.examples.zero_redundancy:replicated(packs=False)",
    x_shape=(2, 2),
    batch=MEAN_OF_PARTS,
    optimizer="equivtest.programs.examples.zero_redundancy:scheduled",
    steps=2,
    values=(("real", 0),),
)


class Alone(Scheduled):
    """Updates this rank's part of the parameters, and sends none of them."""

    def made(self) -> torch.optim.Optimizer:
        made = super().made()
        if not isinstance(self.module, DistributedDataParallel):
            return made
        rank, num_ranks = distributed.get_rank(self.module.process_group), self.module.process_group.size()
        groups = [{**group, "params": group["params"][rank::num_ranks]} for group in made.param_groups]
        return torch.optim.SGD([group for group in groups if group["params"]], lr=0.5)

    def reload(self, group: distributed.ProcessGroup) -> None:
        pass


class Forgetful(Scheduled):
    """Makes a new optimizer after the first update, and loads no state into it."""

    def reload(self, group: distributed.ProcessGroup) -> None:
        self.inner = self.made()


class Thawing(Scheduled):
    """Updates its frozen parameter on its own rank, and does not send this parameter to the others."""

    def reload(self, group: distributed.ProcessGroup) -> None:
        super().reload(group)
        made: Any = self.inner
        made._get_is_trainable_mask = lambda: made._is_trainable_mask


def alone(module: nn.Module) -> torch.optim.Optimizer:
    return Alone(module)


def forgetful(module: nn.Module) -> torch.optim.Optimizer:
    return Forgetful(module)


def thawing(module: nn.Module) -> torch.optim.Optimizer:
    return Thawing(module)


@wrong("replicas that differ", _FOUR_PARAMETERS, "each rank updates other parameters", claim="trains_like_unsharded")
def parameters_of_other_ranks_not_received(case: ModuleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Updates this rank's part of the parameters, and sends none of them."""
    return trained_by(f"{__name__}:alone", case, mesh, given)


@wrong(
    "state across steps",
    _FOUR_PARAMETERS,
    "the second update has a momentum",
    claim="trains_like_unsharded",
)
def divided_state_lost(case: ModuleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Makes a new optimizer after the first update, and loads no state into it."""
    return trained_by(f"{__name__}:forgetful", case, mesh, given)


@wrong(
    "replicas that differ",
    _FOUR_PARAMETERS.but(parallelize="equivtest.programs.examples.zero_redundancy:replicated(packs=True)"),
    "the first update is right, and only packed parameters have a list of what is sent",
    claim="trains_like_unsharded",
)
def thawed_parameter_not_sent(case: ModuleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Does not see that a parameter is no longer frozen, and does not send it to other ranks."""
    return trained_by(f"{__name__}:thawing", case, mesh, given)
