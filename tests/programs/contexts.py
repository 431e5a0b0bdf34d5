"""Chains of operators that are wrong in one way each, in a context of torch or at a step that is no operator."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement

from equivtest.cases.subject import Answers, Given
from equivtest.families.operators.case_forms import Arguments
from equivtest.families.operators.chains.case import (
    AUTOCAST,
    FLATTENED,
    IMPLICIT,
    LOCAL_MAP,
    LOSS_PARALLEL,
    MODULE,
    REDISTRIBUTE,
    ChainCase,
    Special,
    Step,
    run_chain,
)
from equivtest.families.operators.chains.subject import mapped, multiplied, run_steps, special
from equivtest.families.operators.subject import run_operator

X0 = ("x0",)
SHARD_0 = ("placements", "shard(0)")


def gradients_recorded(case: ChainCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Within no_grad and inference mode all is recorded as without them."""

    def call(case: ChainCase, operands: tuple[DTensor, ...], arguments: Arguments) -> tuple[Any, ...]:
        return run_chain(case.steps, tuple(operand.requires_grad_() for operand in operands), special)

    return run_operator(case, mesh, given, call)  # type: ignore[arg-type]


def autocast_left_out(case: ChainCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Products within autocast are computed in the operands' own dtype."""

    def call(case: ChainCase, operands: tuple[DTensor, ...], arguments: Arguments) -> tuple[Any, ...]:
        return run_chain(case.steps, operands, special)

    return run_operator(case, mesh, given, call)  # type: ignore[arg-type]


def plain_tensors_taken_for_shares(case: ChainCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Treats a plain tensor beside DTensors as each rank's summand."""

    def shared(x: DTensor) -> torch.Tensor:
        return DTensor.from_local(x.to_local(), mesh, [Partial("sum")] * mesh.ndim, run_check=False)

    return run_steps(case, mesh, given, special, shared)


def softmax_of_own_part(case: ChainCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Within loss_parallel, computes a softmax along a divided dim over each rank's part only."""

    def call(case: ChainCase, operands: tuple[DTensor, ...], arguments: Arguments) -> tuple[Any, ...]:
        [(_, _, how)], [x] = case.steps, operands
        local = torch.softmax(x.to_local(), **dict(how))  # type: ignore[call-overload]
        return (DTensor.from_local(local, mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()),)

    return run_operator(case, mesh, given, call)  # type: ignore[arg-type]


def _with(other: Special) -> Any:
    """The chain in which a step that is no operator is wrong."""
    return lambda case, mesh, given: run_steps(case, mesh, given, other)


def _axes_swapped(step: Step, x: torch.Tensor) -> torch.Tensor:
    """Gathers beside a flattened mesh in the order of the other axis."""
    assert isinstance(x, DTensor)
    if step[0] == REDISTRIBUTE:
        reversed_ = DTensor.from_local(
            x.to_local(), x.device_mesh, x.placements[::-1], run_check=False, shape=x.shape, stride=x.stride()
        )
        return special(step, reversed_)
    return special(step, x)


def _own_gradient_added_up(step: Step, x: torch.Tensor) -> torch.Tensor:
    """Treats each rank's whole gradient of a whole input as a share."""
    assert isinstance(x, DTensor)
    gradient: tuple[Placement, ...] = (Partial("sum"),) * x.device_mesh.ndim
    is_whole = step[0] == LOCAL_MAP and all(each == "replicate" for each in str(dict(step[2])["placements"]).split())
    return mapped(step, x, gradient) if is_whole else special(step, x)


def _first_part_of_a_weight(step: Step, x: torch.Tensor) -> torch.Tensor:
    """Each rank has the first part of a module's divided weight."""

    def divide(weight: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
        num = -(-weight.shape[0] // mesh.size(0))
        own = max(min(num, weight.shape[0] - mesh.get_local_rank(0) * num), 0)
        return DTensor.from_local(
            weight[:own], mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )

    assert isinstance(x, DTensor)
    return multiplied(step, x, divide) if step[0] == MODULE else special(step, x)


def _gradient_of_every_rank(step: Step, x: torch.Tensor) -> torch.Tensor:
    """Sums the gradient of a redistributed tensor over ranks that all have the whole."""
    if step[0] != REDISTRIBUTE:
        return special(step, x)
    assert isinstance(x, DTensor)
    num = x.device_mesh.size()
    found = special(step, x)
    return found * num - (found * (num - 1)).detach()


gathered_by_the_other_axis = _with(_axes_swapped)
gradient_of_a_local_map_added_up = _with(_own_gradient_added_up)
module_has_the_first_part = _with(_first_part_of_a_weight)
redistributed_gradient_added_up = _with(_gradient_of_every_rank)


def _alone(step: Step, **fields: Any) -> ChainCase:
    base = {"world_size": 2, "operands": ((2,),), "steps": (step,), "placements": (("shard(0)",),)}
    return ChainCase(**{**base, **fields})


PLANTED: dict[str, ChainCase] = {
    "gradients_recorded": _alone(("neg", X0, ()), context="no_grad"),
    "autocast_left_out": _alone(
        ("mm", ("x0", "x1"), ()),
        operands=((2, 2), (2, 2)),
        placements=(("shard(0)",), ("replicate",)),
        context=AUTOCAST,
    ),
    "plain_tensors_taken_for_shares": _alone(
        ("add", ("x0", "x1"), ()), operands=((2,), (2,)), placements=(("shard(0)",), ("replicate",)), context=IMPLICIT
    ),
    "softmax_of_own_part": _alone(
        ("softmax", X0, (("dim", 0),)), context=LOSS_PARALLEL, values=(("real", 0),), requires_grad=(0,)
    ),
    "gathered_by_the_other_axis": _alone(
        (REDISTRIBUTE, X0, (("placements", "replicate replicate"),)),
        world_size=4,
        mesh=(2, 2),
        operands=((2, 2),),
        placements=(("shard(0)", "shard(1)"),),
        context=FLATTENED,
    ),
    "gradient_of_a_local_map_added_up": _alone(
        (LOCAL_MAP, X0, (("placements", "replicate"), ("factor", 2.0))), requires_grad=(0,)
    ),
    "module_has_the_first_part": _alone((MODULE, X0, (SHARD_0, ("factor", 2.0)))),
    "redistributed_gradient_added_up": _alone((REDISTRIBUTE, X0, (("placements", "replicate"),)), requires_grad=(0,)),
}
"""Name of a wrong program -> a case that shows it."""
