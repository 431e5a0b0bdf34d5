"""One redistributed tensor: the same values under another layout, and operands that are reduced.

Letters: k operands of one reduction, u_r and u_o unit roundoffs of a collective's additions and of
storage.

What no reduction touches is copied: every bit is known.  The largest or smallest of k operands is
one of them.  A sum of exact data has one value in any order; so has its average where the operands
are multiples of k's odd part, or, where a multiplication by fl(1 / k) may stand for the division,
where that is near enough (`equivtest.oracle.averages`).  Of real operands each takes part in at
most k - 1 rounded additions, in any order and in steps over several axes; averaging rounds a
reciprocal and a product more for each axis.  These errors prefer no sign but where averaging rounds:
every element has the same reciprocal's in it.

A gradient here is one of the tensor, not of its operands: the cotangent as it is, whatever the
reduction was.

Source: DTensor.redistribute and DTensor.from_local in torch/distributed/tensor/_api.py,
_redistribute_backward in torch/distributed/tensor/_redistribute.py (2.13.0); Higham, Accuracy and
Stability of Numerical Algorithms, 2nd ed., section 4.2.  Exactness: `equivtest.oracle.exact`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from equivtest.cases.prepared import PreparedCase
from equivtest.cases.redistribute import REAL_MODE, RedistributeCase, partial_axes
from equivtest.cases.values import draw
from equivtest.collective import Collective
from equivtest.layout import Partial, Replicate, parse_placement
from equivtest.oracle.averages import reciprocal_is_near
from equivtest.oracle.collectives import Collectives, distribute, redistribute
from equivtest.oracle.declared import arithmetic_of
from equivtest.oracle.exact import InexactData, find_integers, sum_terms
from equivtest.oracle.expected import COPIED, Expected, ExpectedTensor
from equivtest.oracle.rounding import Bounded, bounded, growth, where_finite


@dataclass(frozen=True)
class Reduced:
    """The value of a tensor, float64; its bits where there is one right value; what it may be off by.

    Attributes:
        is_symmetric: As of `ExpectedTensor`.
    """

    value: torch.Tensor
    bits: torch.Tensor | None
    allowed: torch.Tensor | None
    derivation: str
    bits_used: int = 0
    is_symmetric: bool = False


def expect_redistribute(case: RedistributeCase, index: int) -> Expected:
    """x as the output and the cotangent as its gradient: equal, or within the bound of a reduction.

    Raises:
        InexactData: the drawn values break the conditions of exactness.
    """
    given = draw(case, index)
    pairs = {"output": "x", "grad.x": "cotangent"}
    found = {name: reduce_operands(case, pairs[name], given[pairs[name]], index) for name in case.answer_names()}
    tensors = {
        name: ExpectedTensor(
            value=reduced.value,
            allowed=reduced.allowed,
            layout=case.layouts()[name],
            dtype=case.dtype,
            derivation=reduced.derivation,
            requires_grad=bool(case.requires_grad) if name == "output" else None,
            is_symmetric=reduced.is_symmetric,
            bits=reduced.bits,
            is_sum=case.reduction(pairs[name])[0] in ("sum", "avg"),
        )
        for name, reduced in found.items()
    }
    return Expected(tensors, {name: reduced.bits_used for name, reduced in found.items() if reduced.bits_used})


def reduce_operands(case: RedistributeCase, name: str, given: torch.Tensor, index: int) -> Reduced:
    """The tensor (*shape) whose operands (P, *shape) are `given`; `name` is 'x' or 'cotangent'.

    Raises:
        InexactData: operands of an exact draw add up to more than the dtype holds.
    """
    op, num_operands = case.reduction(name)
    if not op:
        return Reduced(given.double(), given, None, COPIED)
    operands = given.reshape(num_operands, *case.shape)
    if op in ("max", "min"):
        chosen = operands.amax(0) if op == "max" else operands.amin(0)
        return Reduced(chosen.double(), chosen, None, f"equal: the {op} of {num_operands} operands is one of them")
    if case.values[index][0] == REAL_MODE:
        return _bounded(case, operands, partial_axes(case.operand_layout(name)), op)
    if op == "avg" and not _divides_exactly(case, partial_axes(case.operand_layout(name))):
        return _bounded(case, operands, partial_axes(case.operand_layout(name)), op)
    return _exactly(name, operands, op)


def _divides_exactly(case: RedistributeCase, axes: tuple[int, ...]) -> bool:
    """Whether dividing by the ranks of each axis, or multiplying by the reciprocal, rounds no multiple."""
    accumulate = arithmetic_of(case.dtype).accumulate
    return all(reciprocal_is_near(case.mesh_shape[axis], accumulate) for axis in axes)


def _exactly(name: str, operands: torch.Tensor, op: str) -> Reduced:
    num_operands, shape = len(operands), operands.shape[1:]
    flat = find_integers(name, operands.reshape(num_operands, -1))
    odd = num_operands // (num_operands & -num_operands)
    if op == "avg" and bool((flat.integers % odd != 0).any()):
        raise InexactData(f"{name}: operands are no multiples of {odd}, so that their average is rounded")
    found = sum_terms(name, flat, operands.dtype)
    value = found.value.reshape(shape) / (num_operands if op == "avg" else 1)
    derivation = f"equal: the {op} of {num_operands} integers times a power of two, exact in any order"
    return Reduced(value, value.to(operands.dtype), None, derivation, found.bits_used)


def _bounded(case: RedistributeCase, operands: torch.Tensor, axes: tuple[int, ...], op: str) -> Reduced:
    arithmetic, num_operands = arithmetic_of(case.dtype), len(operands)
    divisor, num_divisions = (num_operands, 2 * len(axes)) if op == "avg" else (1, 0)
    value, magnitude = operands.double().sum(0) / divisor, operands.double().abs().sum(0) / divisor
    relative = growth((num_operands - 1, arithmetic.u_r), (num_divisions, arithmetic.u_o))
    num_additions = num_operands - 1
    error = relative * magnitude + num_divisions * num_operands * arithmetic.eta + num_additions * arithmetic.eta_r
    error = where_finite(magnitude * divisor + error, arithmetic.largest, error)
    divided = f", and {num_divisions} of {arithmetic.dtype} to divide" if num_divisions else ""
    derivation = f"{num_operands - 1} roundings of {arithmetic.reduce} of the operands' magnitudes{divided}"
    found: Bounded = bounded(value, error, magnitude, num_operands, derivation)
    is_symmetric = arithmetic.rounds_to_nearest and (op == "sum" or num_operands & (num_operands - 1) == 0)
    return Reduced(found.value, None, found.allowed, found.derivation, is_symmetric=is_symmetric)


def document_redistribute(case: RedistributeCase, rank: int) -> Collectives:
    """On a mesh of one axis: the tensor handed out, taken to the target, and its cotangent to its gradient's layout.

    Source: DTensor.redistribute, its docstring, and distribute_tensor, `src_data_rank`, in
    torch/distributed/tensor/_api.py (2.13.0).
    """
    calls: list[Collective] = []
    source = case.operand_layout("x").placements[0]
    if case.road == "distribute":
        calls.append(distribute(case, rank, case.shape, source))
    calls += redistribute(case, case.shape, source, case.layouts()["output"].placements[0], "forward")
    if case.requires_grad:
        cotangent, gradient = case.cotangent_layout.placements[0], case.gradient_layout.placements[0]
        calls += redistribute(case, case.shape, cotangent, gradient, "backward")
    return tuple(calls)


def document_prepared(case: PreparedCase, rank: int) -> Collectives:
    """Each step of the tensor in the forward, and of its cotangent back in the backward; a partial sum is none there.

    Source: as of `document_redistribute`; PrepareModuleInput and PrepareModuleOutput in
    torch/distributed/tensor/parallel/style.py (2.13.0).
    """
    steps = [parse_placement(text) for text in case.steps]
    calls: list[Collective] = []
    for old, new in itertools.pairwise(steps):
        calls += redistribute(case, case.shape, old, new, "forward")
    if case.requires_grad:
        back = [Replicate() if isinstance(step, Partial) else step for step in reversed(steps)]
        for old, new in itertools.pairwise(back):
            calls += redistribute(case, case.shape, old, new, "backward")
    return tuple(calls)
