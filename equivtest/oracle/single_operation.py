"""Computes the results that one operator of torch must return for operands that are known bit by bit.

This module computes the operator once more on the CPU and counts every rounding (`equivtest.oracle.running`).  The
bound holds for any correct kernel, in the dtype in which the backend declares that its kernels compute.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from equivtest.oracle.declared import declared_of
from equivtest.oracle.exact import InexactData
from equivtest.oracle.operands import reduce_exactly
from equivtest.oracle.ranged import Parts, Ranged
from equivtest.oracle.single_collective import Right, Unjudged
from equivtest.tensors import dtype_name


@dataclass(frozen=True)
class Shares:
    """An operand whose value is a reduction of several ranks' tensors. The tensors are not reduced yet.

    `stack` has the ranks' tensors, one after the other along the first dim, and `op` is the reduction.
    """

    stack: torch.Tensor
    op: str


def right_of_operation(name: str, args: list[Any], kwargs: dict[str, Any], ranks: int = 1) -> list[Right]:
    """Returns the right values of the operator's results, and then of the operands to which the operator writes.

    For a complex tensor the right value has pairs of real numbers: see `as_pairs`.

    Args:
        name: Name in torch's form: 'aten.mm.default'.
        args, kwargs: Arguments of the operator; an operand may be `Shares`.
        ranks: Number of ranks that compute the operator together.

    Raises:
        Unjudged: no bound is known for the operator.
    """
    from equivtest.oracle.running import RunningError  # torch's decompositions take a second to import

    func = operator_of(name)
    coarsest = _coarsest(tree_leaves((args, kwargs)))
    if coarsest is None:
        args, kwargs = tree_map(lambda each: _added(each) if isinstance(each, Shares) else each, (args, kwargs))
        found = func(*args, **kwargs)
        return [Right(as_pairs(each)) for each in tree_leaves((found, written(func, args, kwargs))) if _is_tensor(each)]
    record = declared_of(dtype_name(coarsest))
    if record is None:
        raise Unjudged(f"no arithmetic of {dtype_name(coarsest)} is declared")
    counted = RunningError(record, ranks)
    operands = tree_map(_ranged, (args, kwargs))
    try:
        with counted:
            operands = tree_map(lambda each: _added(each) if isinstance(each, Shares) else each, operands)
            found = func(*operands[0], **operands[1])
            results = [as_pairs(each) for each in tree_leaves((found, written(func, *operands))) if _is_tensor(each)]
    except (InexactData, RuntimeError, TypeError, NotImplementedError) as error:  # from operators without a rule
        raise Unjudged(str(error)) from error
    if counted.undecided:
        raise Unjudged(counted.undecided)
    return [_right(counted, each) for each in results]


def as_pairs(tensor: torch.Tensor) -> torch.Tensor:
    """Returns complex numbers as pairs of real numbers, along a last dim of size 2, and any other tensor unchanged."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def raised_on_cpu(name: str, args: list[Any], kwargs: dict[str, Any]) -> str:
    """Returns the exception that the operator raises for these operands on the CPU. Returns '' if it raises nothing."""
    try:
        operator_of(name)(*args, **kwargs)
    except Exception as error:  # from torch
        return f"{type(error).__name__}: {error}"
    return ""


def operator_of(name: str) -> Any:
    _, packet, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


def written(func: Any, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
    arguments = func._schema.arguments
    named = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    return [named[each.name] for each in arguments if each.name in named and _is_written(each)]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_float(value: Any) -> bool:
    tensor = value.stack if isinstance(value, Shares) else value
    return isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.is_complex())


def _ranged(value: Any) -> Any:
    """Wraps a floating-point operand as `Ranged`, with an error of 0. Returns any other operand unchanged.

    If no order of the reduction rounds, `Shares` are reduced. Otherwise the function wraps the stack of the `Shares`,
    and the result is `Shares` again.
    """
    from equivtest.oracle.running import RunningError

    if not _is_float(value):
        return value
    if not isinstance(value, Shares):
        return RunningError.exactly(value)
    stack = value.stack
    try:
        whole = reduce_exactly("operand", stack, value.op, [len(stack)]).value.to(stack.dtype)
    except InexactData:
        return Shares(RunningError.exactly(stack), value.op)
    return Parts(whole, torch.zeros_like(whole, dtype=torch.float64), stack.double().abs().sum(0)).wrapped()


def _added(shares: Shares) -> torch.Tensor:
    """Returns the reduction of the ranks' shares.

    If the shares are `Ranged`, the bound of the result holds for any order of additions.

    Raises:
        Unjudged: the reduction of whole numbers is rounded, or unknown.
    """
    stack, op = shares.stack, shares.op
    if op in ("max", "min"):
        return stack.amax(0) if op == "max" else -(-stack).amax(0)
    if op not in ("sum", "avg") or (op == "avg" and not _is_float(stack)):
        raise Unjudged(f"the right result is unknown for the reduction {op} of {dtype_name(stack.dtype)}")
    total = stack.sum(0)
    return total.to(stack.dtype) if op == "sum" else total / len(stack)


def _coarsest(values: list[Any]) -> torch.dtype | None:
    """Returns the floating dtype with the fewest significand bits among tensors and arguments, or None.

    A complex tensor counts with the dtype of its real part.
    """
    found = {_dtype_of(value).to_real() for value in values if _is_float(value)}
    found |= {value for value in values if isinstance(value, torch.dtype) and value.is_floating_point}
    return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=None)


def _dtype_of(value: Any) -> torch.dtype:
    found: torch.dtype = (value.stack if isinstance(value, Shares) else value).dtype
    return found


def _right(counted: Any, tensor: torch.Tensor) -> Right:
    if not isinstance(tensor, Ranged):
        return Right(tensor)
    bound = counted.bounded(tensor)
    return Right(bound.value, torch.where(bound.value.isfinite(), bound.allowed, math.inf))
