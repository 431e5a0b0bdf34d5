"""Operators of DTensors that are wrong in one way each."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from equivtest.cases.subject import Answers, Given
from equivtest.families.operators.case import OperatorCase
from equivtest.families.operators.case_forms import Arguments
from equivtest.families.operators.case_table import run
from equivtest.families.operators.subject import call_torch, run_operator
from equivtest.layout import Layout
from equivtest.layout import Replicate as Whole
from equivtest.tensors import Placed
from tests.defects.defect import Replacing

wrong = Replacing("dtensor_operators")

Operands = tuple[DTensor, ...]
Results = tuple[Any, ...]


def _is_divided_along(operand: DTensor, dim: object) -> bool:
    return isinstance(dim, int) and any(placement == Shard(dim % operand.dim()) for placement in operand.placements)


def _of_own_parts(case: OperatorCase, operands: Operands, arguments: Arguments) -> Results:
    """Applies the operator to this rank's parts; the result has the first operand's placements and the global shape."""
    found = run(case.operator, tuple(operand.to_local() for operand in operands), arguments)
    first = operands[0]
    wholes = [torch.empty(result.shape, device="meta") for result in case.results]
    return tuple(
        DTensor.from_local(
            local, first.device_mesh, first.placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
        for local, whole in zip(found, wholes, strict=True)
    )


@wrong(
    "another dim",
    OperatorCase(
        world_size=2,
        operator="softmax",
        operands=((2,),),
        arguments=(("dim", -1),),
        placements=(("shard(0)",),),
        values=(("real", 0),),
    ),
    "of one element the second of two ranks has nothing, and the first all",
)
def dim_from_the_end_overlooked(case: OperatorCase, mesh: DeviceMesh, given: Given) -> Answers:
    """A softmax along a dim that is divided and counted from the end: each rank's own part adds up to one."""

    def call(case: OperatorCase, operands: Operands, arguments: Arguments) -> Results:
        is_from_end = isinstance(case.dim, int) and case.dim < 0
        wrong = case.operator == "softmax" and is_from_end and _is_divided_along(operands[0], case.dim)
        return _of_own_parts(case, operands, arguments) if wrong else call_torch(case, operands, arguments)

    return run_operator(case, mesh, given, call)


@wrong(
    "a reduction missing in the backward",
    OperatorCase(
        world_size=2,
        operator="mul",
        operands=((2,), (1,)),
        placements=(("shard(0)",), ("replicate",)),
        requires_grad=(1,),
    ),
    "one rank has all rows",
    claim="gradients_equal_unsharded",
)
def gradient_of_own_rows(case: OperatorCase, mesh: DeviceMesh, given: Given) -> Answers:
    """A product with a broadcast factor: the factor's gradient from each rank's own rows counts as the whole."""
    answers = run_operator(case, mesh, given, call_torch)
    for name, gradient in answers.items():
        if name.startswith("grad.") and case.operator == "mul" and isinstance(gradient, DTensor):
            layout = Layout((Whole(),) * mesh.ndim)
            if any(placement.is_partial() for placement in gradient.placements):
                answers[name] = Placed(gradient.to_local(), layout, tuple(gradient.shape))
    return answers


@wrong(
    "operands in fewer bits",
    OperatorCase(
        world_size=1,
        operator="add",
        operands=((1,), (1,)),
        placements=(("replicate",), ("replicate",)),
        other_dtypes=("", "float64"),
    ),
    "no other dtype is wider than float32",
    kind="shape",
)
def promoted_to_the_first(case: OperatorCase, mesh: DeviceMesh, given: Given) -> Answers:
    """A sum of numbers of two dtypes has the dtype of the first."""

    def call(case: OperatorCase, operands: Operands, arguments: Arguments) -> Results:
        results = call_torch(case, operands, arguments)
        return (results[0].to(operands[0].dtype),) if case.operator == "add" else results

    return run_operator(case, mesh, given, call)


@wrong(
    "another dim",
    OperatorCase(
        world_size=2, operator="flip", operands=((2,),), arguments=(("dims", (0,)),), placements=(("shard(0)",),)
    ),
    "one element is its own mirror image",
)
def own_part_flipped(case: OperatorCase, mesh: DeviceMesh, given: Given) -> Answers:
    """A flip of a dim that is divided: each rank flips its own part."""

    def call(case: OperatorCase, operands: Operands, arguments: Arguments) -> Results:
        dims = dict(arguments).get("dims", ())
        assert isinstance(dims, tuple)
        wrong = case.operator == "flip" and any(_is_divided_along(operands[0], dim) for dim in dims)
        return _of_own_parts(case, operands, arguments) if wrong else call_torch(case, operands, arguments)

    return run_operator(case, mesh, given, call)


@wrong(
    "ids at the edge of a shard",
    OperatorCase(
        world_size=2,
        operator="argmax",
        operands=((2,),),
        arguments=(("dim", 0),),
        placements=(("shard(0)",),),
        values=(("dense", 3),),
    ),
    "the first rank's part begins with the whole",
)
def place_in_own_part(case: OperatorCase, mesh: DeviceMesh, given: Given) -> Answers:
    """The index of the largest element along a divided dim counts from the start of each rank's part."""

    def call(case: OperatorCase, operands: Operands, arguments: Arguments) -> Results:
        (found, *_) = results = call_torch(case, operands, arguments)
        if case.operator != "argmax" or not _is_divided_along(operands[0], case.dim):
            return results
        assert isinstance(case.dim, int)
        size = -(-operands[0].shape[case.dim] // mesh.size())
        whole = found.redistribute(placements=[Replicate()] * mesh.ndim).to_local()
        return (DTensor.from_local(whole % size, mesh, [Replicate()] * mesh.ndim, run_check=False),)

    return run_operator(case, mesh, given, call)
