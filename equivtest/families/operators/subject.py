"""Subject that calls torch's own operators on DTensors.

Source: torch.distributed.tensor.DTensor (2.13.0): an operator on DTensors gives the result of the same operator on
whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from equivtest.base.refusal import is_older
from equivtest.cases.subject import Answers, Given, dtensor_of, own_operand, placements_of
from equivtest.errors import NotSupported
from equivtest.families.operators.case import OperatorCase
from equivtest.families.operators.case_forms import Arguments
from equivtest.families.operators.case_table import run
from equivtest.layout import REDUCE_OPS, Layout
from equivtest.layout import Replicate as Whole
from equivtest.tensors import Placed

Call = Callable[[OperatorCase, tuple[DTensor, ...], Arguments], tuple[Any, ...]]
"""Function (case, operands, arguments) -> results of the operator."""

REFUSALS: tuple[tuple[type[Exception], str], ...] = (
    (NotImplementedError, "does not have a sharding strategy registered"),
    (NotImplementedError, "does not support cross-mesh operation"),
    (RuntimeError, "in-place operations that require placement changes are not supported"),
    (RuntimeError, "is not supported for in-place operations"),
    (RuntimeError, "without redistribution"),
    (RuntimeError, "Please redistribute"),
    (RuntimeError, "Attempted to"),
    (ValueError, "does not support things like hybrid sharding strategies"),
    (RuntimeError, "not supported yet"),
    (RuntimeError, "got mixed torch.Tensor and DTensor"),
    (RuntimeError, "not supported with DTensor"),
    (RuntimeError, "for tensor parallel convolution"),
    (RuntimeError, "does not support complex tensors"),
    (ValueError, "conversion is not supported"),
    (AssertionError, "Redistribution from one partial type"),
)
"""(class, words) of each error by which DTensor refuses an operator or its placements; `words` occur in the message.

Whatever else a rule raises is a mistake, although DTensor says "Sharding propagation failed" for every error of a rule.

Source: ShardingPropagator in torch/distributed/tensor/_sharding_prop.py, OpDispatcher in _dispatch.py, view_groups and
_ViewShardingPropagator in _ops/_view_ops.py, redistribute_local_tensor in _redistribute.py, tp_convolution in
_tp_conv.py (2.13.0 and 2.15.0).
"""


def operators(case: OperatorCase, mesh: DeviceMesh, given: Given) -> Answers:
    return run_operator(case, mesh, given, call_torch)


def call_torch(case: OperatorCase, operands: tuple[DTensor, ...], arguments: Arguments) -> tuple[Any, ...]:
    return run(case.operator, operands, arguments)


def run_operator(case: OperatorCase, mesh: DeviceMesh, given: Given, call: Call) -> Answers:
    """Runs one call forward and backward. If DTensor refuses, returns the error's text in place of tensors."""
    operands = tuple(operand_of(case, mesh, given, number) for number in range(len(case.operands)))
    try:
        results = call(case, operands, case.arguments)
    except Exception as error:
        require_kernels(error, case, operands, call)
        return {"refused": told(error, mesh)}
    answers: Answers = {f"output.{number}": in_known_words(result) for number, result in enumerate(results)}
    pairs = [
        (result, cotangent_of(case, mesh, given, number))
        for number, result in enumerate(results)
        if f"cotangent.{number}" in given and result.requires_grad
    ]
    if not pairs:
        return answers
    try:
        torch.autograd.backward(*map(list, zip(*pairs, strict=True)))  # type: ignore[arg-type]
    except Exception as error:
        require_kernels(error, case, operands, call)
        return answers | {"grad.refused": told(error, mesh)}
    return answers | {f"grad.operand.{number}": in_known_words(operands[number].grad) for number in case.graded()}


def require_kernels(error: Exception, case: OperatorCase, operands: Sequence[DTensor], call: Call) -> None:
    """Declines the case if the device has no kernel for the dtype, as the call shows on whole plain tensors.

    Args:
        error: What the call on DTensors, or its backward, raised.

    Raises:
        NotSupported: the call on plain tensors, or its backward, raises the same error.
    """
    if not isinstance(error, NotImplementedError) or "not implemented for" not in str(error):
        return
    wholes: Any = tuple(
        torch.ones(each.shape, dtype=each.dtype, device=each.device, requires_grad=each.requires_grad)
        for each in operands
    )
    try:
        results = call(case, wholes, case.arguments)
        torch.autograd.backward([result.sum() for result in results if result.requires_grad])
    except Exception as plain:  # another error shows nothing
        if (type(plain), str(plain)) == (type(error), str(error)):
            raise NotSupported(str(error)) from error


def told(error: Exception, mesh: DeviceMesh) -> Placed:
    """Returns DTensor's refusal as a tensor of bytes, which the harness compares. Raises any other error again."""
    if not is_refusal(error):
        raise error
    written = f"{type(error).__name__}: {error}".encode()[:200]
    layout = Layout((Whole(),) * mesh.ndim)
    return Placed(torch.tensor(list(written), dtype=torch.uint8), layout)


def is_refusal(error: Exception) -> bool:
    """True for an error of `REFUSALS`, and for a rule that cannot know the shape of the result.

    Before torch 2.13 every error of a rule counts.
    """
    text = str(error)
    return (
        any(isinstance(error, kind) and words in text for kind, words in REFUSALS)
        or isinstance(error.__cause__, DynamicOutputShapeException)
        or (is_older(torch.__version__) and "Sharding propagation failed" in text)
    )


def operand_of(case: OperatorCase, mesh: DeviceMesh, given: Given, number: int) -> DTensor:
    """Returns operand `number` as a leaf, made from this rank's local tensor without a collective."""
    name, layout = f"operand.{number}", case.operand_layout(number)
    local, placements = own_operand(given[name], layout), placements_of(layout)
    made = dtensor_of(local, mesh, placements, case.operands[number], is_contiguous=case.tensors[name].is_contiguous)
    made.requires_grad_(number in case.graded())
    return made


def cotangent_of(case: OperatorCase, mesh: DeviceMesh, given: Given, number: int) -> DTensor:
    layout = case.cotangent_layout(number)
    local, placements = own_operand(given[f"cotangent.{number}"], layout), placements_of(layout)
    return dtensor_of(local, mesh, placements, case.results[number].shape, is_contiguous=True)


def in_known_words(result: Any) -> DTensor | None:
    """Replicates the result if the harness cannot describe its placements.

    The harness cannot describe two different reductions of one tensor, nor a placement for which `is_known` is False.
    """
    if result is None:
        return None
    if not isinstance(result, DTensor):
        raise TypeError(f"an operator of DTensors gave a {type(result).__name__}")
    reductions = {placement for placement in result.placements if placement.is_partial()}
    if len(reductions) <= 1 and all(is_known(placement, result.dtype) for placement in result.placements):
        return result
    return result.redistribute(placements=[Replicate()] * result.device_mesh.ndim)


def is_known(placement: Placement, dtype: torch.dtype) -> bool:
    """False for strided shards, partial norms, partial masks, and bools that DTensor reduces by a sum."""
    if placement.is_partial():
        return type(placement) is Partial and placement.reduce_op in REDUCE_OPS and dtype != torch.bool
    return placement.is_replicate() or type(placement) is Shard
