"""Modules that prepare their inputs and outputs wrong in one way each."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import PrepareModuleInput

from equivtest.cases.subject import Answers, Given, placement_of
from equivtest.families.redistribute.prepared.case import PreparedCase
from equivtest.families.redistribute.prepared.subject import prepared_module, run_prepared
from equivtest.layout import Layout, Replicate, Shard, parse_placement, shard_bounds
from equivtest.tensors import Placed
from tests.defects.defect import Replacing

wrong = Replacing("prepared_module")


@wrong(
    "a step left out",
    PreparedCase(world_size=1, target=("shard(0)",), requires_grad=()),
    "a layout differs by its name on one rank too",
    kind="layout",
)
def input_left_as_it_came(case: PreparedCase, mesh: DeviceMesh, given: Given) -> Answers:
    """PrepareModuleInput: the module's input is not redistributed to the desired layout."""
    if case.style != "input" or case.as_kwarg:
        return prepared_module(case, mesh, given)
    given_as = placement_of(parse_placement(case.source[0]))
    plan = PrepareModuleInput(
        input_layouts=given_as, desired_input_layouts=given_as, use_local_output=case.use_local_output
    )
    return run_prepared(case, mesh, given, plan)


@wrong(
    "a step left out",
    PreparedCase(world_size=1, target=("shard(0)",), x_is_dtensor=True, as_kwarg=True, requires_grad=()),
    "a layout differs by its name on one rank too",
    kind="layout",
)
def named_input_left_out(case: PreparedCase, mesh: DeviceMesh, given: Given) -> Answers:
    """PrepareModuleInput: a keyword argument is looked up under another name, and not prepared."""
    if case.style != "input" or not case.as_kwarg:
        return prepared_module(case, mesh, given)
    first, last = (placement_of(parse_placement(step)) for step in case.steps)
    plan = PrepareModuleInput(
        input_kwarg_layouts={"x": first},
        desired_input_kwarg_layouts={"x": last},
        use_local_output=case.use_local_output,
    )
    return run_prepared(case, mesh, given, plan)


@wrong(
    "a partial value taken for the whole",
    PreparedCase(
        world_size=2, shape=(2,), source=("shard(0)",), style="output", use_local_output=True, requires_grad=()
    ),
    "two ranks need one element each",
)
def own_part_for_the_whole(case: PreparedCase, mesh: DeviceMesh, given: Given) -> Answers:
    """A plain output that is gathered holds this rank's own part over and over."""
    answers, source = prepared_module(case, mesh, given), parse_placement(case.source[0])
    output = answers["output"]
    if not isinstance(source, Shard) or not isinstance(output, Placed) or output.layout != Layout((Replicate(),)):
        return answers
    size = case.shape[source.dim]
    start, stop = shard_bounds(size, case.world_size, mesh.get_local_rank())
    if start < stop:
        places = start + torch.arange(size) % (stop - start)
        local = output.local.detach().index_select(source.dim, places)
        answers["output"] = Placed(local.requires_grad_(output.local.requires_grad), output.layout)
    return answers
