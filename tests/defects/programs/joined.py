"""Steps on different numbers of micro-batches that are wrong in one way each."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from equivtest.programs.case import PARTS_OF_WHOLE, ModuleCase
from equivtest.programs.examples.joined import Joined
from equivtest.programs.run.module import run_module
from tests.defects.defect import Replacing, argument_of, run_with
from tests.defects.programs.steps import run_step, step_named

wrong = Replacing("module")

_THREE_ROWS = ModuleCase(
    world_size=2,
    build="equivtest.programs.examples.next_token:scaled_next_token",
    parallelize="equivtest.programs.examples.joined:replicated",
    inputs=(("ids", "ids(7)", ("batch", "seq")), ("targets", "targets(7, -100)", ("batch", "seq"))),
    sizes=(("batch", 3), ("seq", 2)),
    batch=PARTS_OF_WHOLE,
    optimizer="equivtest.programs.examples.token_mean:adamw",
    step="equivtest.programs.examples.joined:joined",
    steps=2,
    values=(("real", 0),),
)
_WHY = "one of two ranks has a second row"


class ScaledByAll(Joined):
    """Multiplies each loss by the number of all ranks, although a step divides by the ranks that have a row."""

    def scaled(self, number: int, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.mesh.size() / self.num_tokens


class OwnGradients(Joined):
    """Leaves the gradients of the rank's own micro-batches on each rank."""

    def reduce(self) -> None:
        pass


class LastUpdated(Joined):
    """Updates the ranks with the most rows after the context, which has sent their parameters before the update."""

    def update(self) -> None:
        pass

    def reduce(self) -> None:
        super().reduce()
        if len(self.micro_batches) == self.num_rows[0]:
            super().update()


def __getattr__(name: str) -> Any:
    return step_named(name, globals())


@wrong("replicas that differ", _THREE_ROWS, _WHY, claim="trains_like_unsharded")
@argument_of(run_module)
def buffers_of_each_rank(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Each rank uses its own buffers, which differ from the second step on."""
    return DistributedDataParallel(module, process_group=mesh.get_group(), broadcast_buffers=False)


divided_by_the_other_number = wrong(
    "wrong divisor or wrong group", _THREE_ROWS, _WHY, claim="gradients_equal_unsharded"
)(run_with(run_step, ScaledByAll))

own_rows_alone = wrong("a reduction missing", _THREE_ROWS, _WHY, claim="gradients_equal_unsharded")(
    run_with(run_step, OwnGradients)
)

updated_too_late = wrong("replicas that differ", _THREE_ROWS, _WHY, claim="trains_like_unsharded")(
    run_with(run_step, LastUpdated)
)
