"""A pair of outputs whose layouts are prepared wrongly, in one way each."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    PrepareModuleInput,
    PrepareModuleInputOutput,
    SequenceParallel,
    parallelize_module,
)

from equivtest.programs.case import ModuleCase
from equivtest.programs.run.module import run_module
from tests.defects.defect import Replacing, argument_of

wrong = Replacing("module")

_TWO_RANKS = ModuleCase(
    world_size=2,
    build="equivtest.programs.examples.gated:scaled_pair",
    parallelize="equivtest.programs.examples.plans:prepared_pair(shards_x=True, shards_memory=False, in_one=True)",
    inputs=(("x", "real", ("rows", 2)), ("memory", "real", ("rows", 2))),
    sizes=(("rows", 2),),
    positional=("x",),
)
_ROWS = "one rank has all rows, and each of two must have one"


def prepared(
    pair: nn.Module, mesh: DeviceMesh, *, x: PrepareModuleInput, memory: Placement, second: Placement
) -> nn.Module:
    """Cuts the rows of x, and joins the rows of the first output.

    Args:
        memory: The layout to which the second input is redistributed.
        second: The layout that the second output is declared to have.
    """
    whole, rows = Replicate(), Shard(0)
    outputs: Any = {"output_layouts": (rows, None, second), "desired_output_layouts": (whole, None, whole)}
    each = PrepareModuleInputOutput(
        input_layouts=(None, rows),
        desired_input_layouts=(None, rows),
        input_kwarg_layouts={"memory": whole},
        desired_input_kwarg_layouts={"memory": memory},
        use_local_input=True,
        **outputs,
    )
    return parallelize_module(pair, mesh, {"": x, "scale": SequenceParallel(sequence_dim=0), "each": each})


def replicated() -> PrepareModuleInput:
    return PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())


@wrong("a partial value taken for the whole", _TWO_RANKS, _ROWS, kind="raised")
@argument_of(run_module)
def second_output_of_own_rows(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Cuts the rows of the second input, and never joins the rows of the second output."""
    return prepared(module, mesh, x=replicated(), memory=Shard(0), second=Replicate())


@wrong("misfits accepted", _TWO_RANKS, _ROWS, kind="raised")
@argument_of(run_module)
def whole_input_taken_for_shard(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Gives the scale all rows as a plain tensor, which SequenceParallel takes for the rank's own rows."""
    return prepared(module, mesh, x=PrepareModuleInput(), memory=Replicate(), second=Replicate())


@wrong("a term added on every rank", _TWO_RANKS, "any sum of two shows it")
@argument_of(run_module)
def second_output_added_up(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Declares the second output a partial sum, although each rank has it as a whole."""
    return prepared(module, mesh, x=replicated(), memory=Replicate(), second=Partial())
