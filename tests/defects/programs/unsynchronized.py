"""Steps with micro-batches that are not synchronized, wrong in one way each."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from equivtest.programs.case import PARTS_OF_WHOLE, ModuleCase
from equivtest.programs.examples.token_mean import MAX_NORM
from equivtest.programs.examples.unsynchronized import Unsynchronized
from equivtest.programs.run.module import run_module
from tests.defects.defect import Replacing, argument_of, run_with
from tests.defects.programs.steps import run_step, step_named

wrong = Replacing("module")

_TWO_ROWS = ModuleCase(
    world_size=2,
    build="equivtest.programs.examples.next_token:scaled_next_token",
    parallelize="equivtest.programs.examples.plans:data_parallel",
    inputs=(("ids", "ids(7)", ("batch", "seq")), ("targets", "targets(7, -100)", ("batch", "seq"))),
    sizes=(("batch", 2), ("seq", 2)),
    batch=PARTS_OF_WHOLE,
    optimizer="equivtest.programs.examples.token_mean:adamw",
    step="equivtest.programs.examples.unsynchronized:unsynchronized",
    steps=2,
    micro_batches=3,
    max_norm=MAX_NORM,
    values=(("real", 0),),
)
_FOUR_ROWS = _TWO_ROWS.but(sizes=(("batch", 4), ("seq", 2)))


class FirstReduced(Unsynchronized):
    """Averages the gradients of the first micro-batch instead of the gradients of all micro-batches."""

    def reduces(self, number: int) -> bool:
        return number == 0


class NeverReduced(Unsynchronized):
    """Runs the last micro-batch in `no_sync` too."""

    def reduces(self, number: int) -> bool:
        return False


def __getattr__(name: str) -> Any:
    return step_named(name, globals())


_ONE_ROW_EACH = "one rank has all rows, and each of two must have one"


@wrong("replicas that differ", _TWO_ROWS, _ONE_ROW_EACH, claim="trains_like_unsharded")
@argument_of(run_module)
def buffers_of_each_rank_in_no_sync(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Each rank uses its own buffers, which differ from the second step on."""
    return DistributedDataParallel(module, process_group=mesh.get_group(), broadcast_buffers=False)


synchronized_too_early = wrong(
    "a reduction missing", _FOUR_ROWS, "each of two ranks must have a micro-batch before the last one",
    claim="gradients_equal_unsharded",
)(run_with(run_step, FirstReduced))  # fmt: skip

never_synchronized = wrong("a reduction missing", _TWO_ROWS, _ONE_ROW_EACH, claim="gradients_equal_unsharded")(
    run_with(run_step, NeverReduced)
)
