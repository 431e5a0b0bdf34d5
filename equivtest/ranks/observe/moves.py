"""Methods of torch's ProcessGroup as data: which arguments are operands, which results, and what a rank has alone.

Source: torch/csrc/distributed/c10d/init.cpp, class ProcessGroup (2.6.0 to 2.13.0, which renamed some).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist

Arguments = Sequence[Any]

REDUCING = ("all_reduce", "reduce", "reduce_scatter")
"""Kinds whose operands are added, or reduced in another way: those that may be counted twice."""
BARRIERS = ("barrier", "monitored_barrier")
"""Methods of a process group in which no values move: noted where a rank is watched, and never spoiled."""
FROM_ANY = "recv_anysource"
"""A method that takes whatever comes first, so that nobody can say afterwards from whom it was to come."""
WITHOUT_OPERAND_OF_ALL = ("broadcast", "scatter", "send", "recv")
"""Kinds to which not every rank gives an operand."""


@dataclass(frozen=True)
class Call:
    """One method of a process group.

    Attributes:
        kind: Of the collective, as `equivtest.base.collective.Collective` has it.
        operand, result: Position of the argument that the rank gives, and of the one that it gets.
        keep: Writes into the results what the rank has without the others: (results, operands, rank).
    """

    kind: str
    operand: int
    result: int
    keep: Callable[[Any, Any, int], None]

    def operands(self, arguments: Arguments) -> Any:
        """What the rank gives: a tensor, or tensors in lists."""
        return arguments[self.operand]

    def results(self, arguments: Arguments) -> Any:
        """Where the rank gets what the collective gives."""
        return arguments[self.result]

    def keep_own(self, arguments: Arguments, rank: int) -> None:
        """The results as they are where nothing was sent."""
        self.keep(self.results(arguments), _copied(self.operands(arguments)), rank)

    def repeat_own(self, arguments: Arguments, rank: int, size: int) -> None:
        """The results as they are where each of `size` ranks gives what this one gives."""
        self.keep_own(arguments, rank)
        if self.kind in REDUCING:
            for tensor in flat_tensors(self.results(arguments)):
                _repeat(tensor, arguments, size)
        if self.kind in ("all_gather", "gather"):
            own = flat_tensors(_copied(self.operands(arguments)))
            for result, operand in zip(_by_operand(self.results(arguments), len(own)), own, strict=False):
                _fill_with(result, operand)

    def giving(self, arguments: Arguments, operands: Sequence[torch.Tensor]) -> list[Any]:
        """The arguments with these operands, in the order of `flat_tensors`; what works in place gets their values."""
        if self.operand == self.result:
            for tensor, operand in zip(flat_tensors(self.operands(arguments)), operands, strict=True):
                tensor.copy_(operand)
            return list(arguments)
        held = _shaped_like(self.operands(arguments), iter(operands))
        return [held if place == self.operand else argument for place, argument in enumerate(arguments)]


def flat_tensors(held: Any) -> list[torch.Tensor]:
    """The tensors of a tensor, a list of tensors or a list of lists, in order."""
    if isinstance(held, torch.Tensor):
        return [held]
    return [tensor for part in held for tensor in flat_tensors(part)] if isinstance(held, list | tuple) else []


def _shaped_like(held: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The tensors in lists as those of `held` are."""
    if isinstance(held, torch.Tensor):
        return next(tensors)
    return [_shaped_like(part, tensors) for part in held]


def _copied(held: Any) -> Any:
    """Copies of the tensors: FSDP2's operand lies within its result."""
    return _shaped_like(held, (tensor.clone() for tensor in flat_tensors(held)))


def _repeat(tensor: torch.Tensor, arguments: Arguments, size: int) -> None:
    """A reduction of `size` equal operands, of which the tensor is one; averages and extrema are that one."""
    operation = next(
        (getattr(options, "reduceOp", None) for options in arguments if hasattr(options, "reduceOp")), None
    )
    if operation is None or operation == dist.ReduceOp.SUM:
        tensor.mul_(size)
    elif operation == dist.ReduceOp.PREMUL_SUM:
        tensor.mul_(size * factor_of(operation))
    elif operation == dist.ReduceOp.PRODUCT:
        tensor.pow_(size)


def factor_of(operation: Any) -> float:
    """What a PREMUL_SUM multiplies each operand by.

    Source: torch/csrc/distributed/c10d/init.cpp, class ReduceOp (2.13.0), which tells it where it is pickled.
    """
    return float(operation.__getstate__()[1])


def _by_operand(results: Any, num_operands: int) -> Sequence[Any]:
    """The results that belong to each operand: tensors, or lists of one per rank."""
    return [results] if isinstance(results, torch.Tensor) or not num_operands else results


def _fill_with(result: Any, operand: torch.Tensor) -> None:
    """Every part of a result becomes the operand, if it has its size."""
    if isinstance(result, torch.Tensor):
        result.view(-1, max(1, operand.numel()))[:, : operand.numel()] = operand.reshape(-1)
        return
    for part in result:
        if part.numel() == operand.numel():
            part.copy_(operand.reshape(part.shape))


def _nothing(results: Any, operands: Any, rank: int) -> None:
    """The rank's tensors stay as they are."""


def _own_of_list(results: Any, operands: Any, rank: int) -> None:
    """all_gather, gather: lists of one result per rank; none on other ranks than a gather's root."""
    for result, operand in zip(results, operands, strict=False):
        result[rank].copy_(operand)


def _own_part(result: Any, operand: Any, rank: int) -> None:
    """all_gather into one tensor: the rank's own part of it."""
    start = rank * operand.numel()
    result.view(-1)[start : start + operand.numel()].copy_(operand.reshape(-1))


def _own_parts(results: Any, operands: Any, rank: int) -> None:
    for result, operand in zip(results, operands, strict=True):
        _own_part(result, operand, rank)


def _own_of_operands(results: Any, operands: Any, rank: int) -> None:
    """reduce_scatter, scatter: lists of one operand per rank; none on other ranks than a scatter's root."""
    for result, operand in zip(results, operands, strict=False):
        result.copy_(operand[rank])


def _own_slice(result: Any, operand: Any, rank: int) -> None:
    """reduce_scatter of one tensor: what the rank itself has for its part."""
    start = rank * result.numel()
    result.view(-1).copy_(operand.reshape(-1)[start : start + result.numel()])


def _own_slices(results: Any, operands: Any, rank: int) -> None:
    for result, operand in zip(results, operands, strict=True):
        _own_slice(result, operand, rank)


def _as_given(results: Any, operands: Any, rank: int) -> None:
    """all_to_all: what the rank gives is what it gets, as far as it fits."""
    for result, operand in zip(flat_tensors(results), flat_tensors(operands), strict=True):
        size = min(result.numel(), operand.numel())
        result.view(-1)[:size].copy_(operand.reshape(-1)[:size])


_IN_PLACE = {"operand": 0, "result": 0, "keep": _nothing}

CALLS: dict[str, Call] = {
    "allreduce": Call("all_reduce", **_IN_PLACE),  # type: ignore[arg-type]
    "allreduce_coalesced": Call("all_reduce", **_IN_PLACE),  # type: ignore[arg-type]
    "reduce": Call("reduce", **_IN_PLACE),  # type: ignore[arg-type]
    "broadcast": Call("broadcast", **_IN_PLACE),  # type: ignore[arg-type]
    "allgather": Call("all_gather", 1, 0, _own_of_list),
    "allgather_coalesced": Call("all_gather", 1, 0, _nothing),
    "_allgather_base": Call("all_gather", 1, 0, _own_part),
    "all_gather_single": Call("all_gather", 1, 0, _own_part),
    "allgather_into_tensor_coalesced": Call("all_gather", 1, 0, _own_parts),
    "all_gather_single_coalesced": Call("all_gather", 1, 0, _own_parts),
    "gather": Call("gather", 1, 0, _own_of_list),
    "scatter": Call("scatter", 1, 0, _own_of_operands),
    "reduce_scatter": Call("reduce_scatter", 1, 0, _own_of_operands),
    "_reduce_scatter_base": Call("reduce_scatter", 1, 0, _own_slice),
    "reduce_scatter_single": Call("reduce_scatter", 1, 0, _own_slice),
    "reduce_scatter_tensor_coalesced": Call("reduce_scatter", 1, 0, _own_slices),
    "reduce_scatter_single_coalesced": Call("reduce_scatter", 1, 0, _own_slices),
    "alltoall": Call("all_to_all", 1, 0, _as_given),
    "alltoall_base": Call("all_to_all", 1, 0, _as_given),
    "all_to_all_single": Call("all_to_all", 1, 0, _as_given),
    "send": Call("send", **_IN_PLACE),  # type: ignore[arg-type]
    "recv": Call("recv", **_IN_PLACE),  # type: ignore[arg-type]
    "recv_anysource": Call("recv", **_IN_PLACE),  # type: ignore[arg-type]
}
"""By the method's name; all_reduce and broadcast work in place, so that the rank's own tensor is its result."""
