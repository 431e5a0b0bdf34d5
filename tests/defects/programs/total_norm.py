"""Steps that clip by a wrong norm of type 1."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from equivtest.programs.case import ModuleCase
from equivtest.programs.examples.mixture import AXES, MAX_NORM, SIZES
from equivtest.programs.examples.mixture_plan import local
from equivtest.programs.examples.total_norm import InOneCall
from tests.defects.defect import Replacing, run_with
from tests.defects.programs.steps import run_step, step_named

wrong = Replacing("module")

_TWO_RANKS = ModuleCase(
    world_size=2,
    mesh=(1, 2),
    axes=AXES,
    build="equivtest.programs.examples.mixture:with_empty_shards",
    parallelize="equivtest.programs.examples.mixture_plan:on_one_mesh",
    x_shape=(SIZES["with_empty_shards"],),
    optimizer="equivtest.programs.examples.mixture:sgd",
    step="equivtest.programs.examples.total_norm:in_one_call_by_sum",
    steps=2,
    max_norm=MAX_NORM,
    norm_type=1.0,
    values=(("real", 0),),
)
_ONE_RANK = _TWO_RANKS.but(world_size=1, mesh=(1, 1))


class ReplicasCounted(InOneCall):
    """Adds up the norms of all ranks' local gradients, and so counts a replicated gradient once for each rank."""

    copies = False

    def clip_together(self, parameters: list[torch.Tensor]) -> torch.Tensor:
        norm = get_total_norm([local(each.grad) for each in parameters if each.grad is not None], 1.0)
        for axis in AXES:
            distributed.all_reduce(norm, group=self.mesh.get_group(axis))
        clip_grads_with_norm_(parameters, MAX_NORM, norm)
        return norm


class ByRoot(InOneCall):
    """Clips by the 2-norm."""


def __getattr__(name: str) -> Any:
    return step_named(name, globals())


replicas_counted = wrong(
    "wrong divisor or wrong group", _TWO_RANKS, "one rank has no replica", claim="gradients_equal_unsharded"
)(run_with(run_step, ReplicasCounted))

norm_of_another_type = wrong(
    "another reduction", _ONE_RANK, "one rank has another norm too", claim="gradients_equal_unsharded"
)(run_with(run_step, ByRoot))
