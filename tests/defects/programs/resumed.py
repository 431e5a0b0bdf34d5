"""Ways to resume from a saved state that are wrong in one way each."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from equivtest.cases.subject import Answers, Given
from equivtest.programs.case import PARTS_OF_WHOLE, ModuleCase
from equivtest.programs.examples.resumed import SGD, Resumable
from tests.defects.defect import Replacing
from tests.defects.programs.optimizers import trained_by

wrong = Replacing("module")

_TWO_ROWS = ModuleCase(
    world_size=2,
    build="equivtest.programs.examples.resumed:resumable_next_token(optimizers='SGD')",
    parallelize="equivtest.programs.examples.resumed:resumable(state='shards', together=False)",
    inputs=(("ids", "ids(7)", ("batch", "seq")), ("targets", "targets(7, -100)", ("batch", "seq"))),
    sizes=(("batch", 2), ("seq", 2)),
    batch=PARTS_OF_WHOLE,
    optimizer="equivtest.programs.examples.resumed:Resumable",
    step="equivtest.programs.examples.resumed:resumed",
    steps=2,
    max_norm=0.5,
    values=(("real", 0),),
)


class OptionsByPosition(Resumable):
    """Gives the groups their options by position, although the new optimizer has them in another order."""

    def resume(self) -> None:
        super().resume()
        for group, options in zip(self.inner[0].param_groups[:2], SGD[::-1], strict=True):
            group |= options


class WithoutMomentum(Resumable):
    """Makes a new optimizer and loads no momentum."""

    def resume(self) -> None:
        super().resume()
        for state in self.inner[0].state.values():
            state["momentum_buffer"].zero_()


class EarlierParameters(Resumable):
    """Updates the parameters from before the assignment."""

    def resume(self) -> None:
        earlier, is_new = self.inner, not self.inner[0].state
        super().resume()
        if not is_new:
            self.inner = earlier


@wrong(
    "a copy left behind",
    _TWO_ROWS,
    "the second update is one of the module",
    claim="trains_like_unsharded",
)
def earlier_parameters_updated(case: ModuleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Updates the parameters from before the assignment."""
    return trained_by(f"{__name__}:EarlierParameters", case, mesh, given)


@wrong("state across steps", _TWO_ROWS, "the groups differ in their options", claim="trains_like_unsharded")
def options_by_position(case: ModuleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Gives the groups their options by position, although the new optimizer has them in another order."""
    return trained_by(f"{__name__}:OptionsByPosition", case, mesh, given)


@wrong("state across steps", _TWO_ROWS, "the second update has a momentum", claim="trains_like_unsharded")
def resumed_without_momentum(case: ModuleCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Makes a new optimizer and loads no momentum."""
    return trained_by(f"{__name__}:WithoutMomentum", case, mesh, given)
