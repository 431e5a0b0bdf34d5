"""Describes, for methods of torch's ProcessGroup, which arguments are operands and which receive results.

The descriptions also compute the results that a rank would have if other ranks sent nothing.

Source: torch/csrc/distributed/c10d/init.cpp, class ProcessGroup (2.6.0 to 2.13.0; the last renamed some methods).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist

Arguments = Sequence[Any]

REDUCING = ("all_reduce", "reduce", "reduce_scatter")
"""Kinds of collective that reduce operands; a fault can make these count an operand twice."""
BARRIERS = ("barrier", "monitored_barrier")
"""Methods of a process group that move no values: a watched rank notes them, and no fault spoils them."""
FROM_ANY = "recv_anysource"
"""The method that receives the first message of any sender, so its sender cannot be known afterwards."""
WITHOUT_OPERAND_OF_ALL = ("broadcast", "scatter", "send", "recv")
"""Kinds of collective in which not every rank has an operand."""


@dataclass(frozen=True)
class Call:
    """Describes one method of a process group.

    Attributes:
        operand, result: Positions of the arguments with the rank's operand and with its result.
        keep: Function of (results, operands, rank) that fills the results from the rank's own operands, without other
            ranks.
    """

    kind: str
    operand: int
    result: int
    keep: Callable[[Any, Any, int], None]

    def operands(self, arguments: Arguments) -> Any:
        return arguments[self.operand]

    def results(self, arguments: Arguments) -> Any:
        return arguments[self.result]

    def keep_own(self, arguments: Arguments, rank: int) -> None:
        """Fills the results from this rank's operands alone, as if no other rank had sent anything."""
        self.keep(self.results(arguments), _copied(self.operands(arguments)), rank)

    def repeat_own(self, arguments: Arguments, rank: int, size: int) -> None:
        """Fills the results as if each of `size` ranks had this rank's operand."""
        self.keep_own(arguments, rank)
        if self.kind in REDUCING:
            for tensor in flat_tensors(self.results(arguments)):
                _repeat(tensor, arguments, size)
        if self.kind in ("all_gather", "gather"):
            own = flat_tensors(_copied(self.operands(arguments)))
            for result, operand in zip(_by_operand(self.results(arguments), len(own)), own, strict=False):
                _fill_with(result, operand)

    def giving(self, arguments: Arguments, operands: Sequence[torch.Tensor]) -> list[Any]:
        """Returns `arguments` with `operands`, a flat list of tensors, in place of the rank's operands.

        If the method works in place, the tensors stay, and the values of `operands` are copied into them.
        """
        if self.operand == self.result:
            for tensor, operand in zip(flat_tensors(self.operands(arguments)), operands, strict=True):
                tensor.copy_(operand)
            return list(arguments)
        held = _shaped_like(self.operands(arguments), iter(operands))
        return [held if place == self.operand else argument for place, argument in enumerate(arguments)]


def flat_tensors(held: Any) -> list[torch.Tensor]:
    if isinstance(held, torch.Tensor):
        return [held]
    return [tensor for part in held for tensor in flat_tensors(part)] if isinstance(held, list | tuple) else []


def _shaped_like(held: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if isinstance(held, torch.Tensor):
        return next(tensors)
    return [_shaped_like(part, tensors) for part in held]


def _copied(held: Any) -> Any:
    """Copies all tensors in nested lists, because an operand of FSDP2 shares memory with its result."""
    return _shaped_like(held, (tensor.clone() for tensor in flat_tensors(held)))


def _repeat(tensor: torch.Tensor, arguments: Arguments, size: int) -> None:
    """Changes the tensor to the reduction of `size` tensors that are equal to it."""
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
    """Returns the factor by which a PREMUL_SUM multiplies each operand.

    Source: torch/csrc/distributed/c10d/init.cpp, class ReduceOp (2.13.0). Only the pickled state of a ReduceOp has the
    factor.
    """
    return float(operation.__getstate__()[1])


def _by_operand(results: Any, num_operands: int) -> Sequence[Any]:
    """Returns the results as a sequence with one entry per operand.

    An entry is a tensor, or a list with one tensor for each rank.
    """
    return [results] if isinstance(results, torch.Tensor) or not num_operands else results


def _fill_with(result: Any, operand: torch.Tensor) -> None:
    """Copies the operand to every rank's part of a gathered result.

    If the result is a list, a part of another size than the operand is left out.
    """
    if isinstance(result, torch.Tensor):
        result.view(-1, max(1, operand.numel()))[:, : operand.numel()] = operand.reshape(-1)
        return
    for part in result:
        if part.numel() == operand.numel():
            part.copy_(operand.reshape(part.shape))


def _nothing(results: Any, operands: Any, rank: int) -> None:
    """Leaves the rank's tensors unchanged."""


def _own_of_list(results: Any, operands: Any, rank: int) -> None:
    """Copies the rank's operand to entry `rank` of each list of results.

    This is for all_gather and gather into lists. Only the root of a gather has lists.
    """
    for result, operand in zip(results, operands, strict=False):
        result[rank].copy_(operand)


def _own_part(result: Any, operand: Any, rank: int) -> None:
    """Copies the rank's operand to part `rank` of the result, for all_gather into one tensor."""
    start = rank * operand.numel()
    result.view(-1)[start : start + operand.numel()].copy_(operand.reshape(-1))


def _own_parts(results: Any, operands: Any, rank: int) -> None:
    for result, operand in zip(results, operands, strict=True):
        _own_part(result, operand, rank)


def _own_of_operands(results: Any, operands: Any, rank: int) -> None:
    """Copies entry `rank` of each list of operands to the rank's result.

    This is for reduce_scatter and scatter from lists. Only the root of a scatter has operands.
    """
    for result, operand in zip(results, operands, strict=False):
        result.copy_(operand[rank])


def _own_slice(result: Any, operand: Any, rank: int) -> None:
    """Copies part `rank` of the rank's operand to the result, for reduce_scatter from one tensor."""
    start = rank * result.numel()
    result.view(-1).copy_(operand.reshape(-1)[start : start + result.numel()])


def _own_slices(results: Any, operands: Any, rank: int) -> None:
    for result, operand in zip(results, operands, strict=True):
        _own_slice(result, operand, rank)


def _as_given(results: Any, operands: Any, rank: int) -> None:
    """Copies the rank's operands to its results, for all_to_all."""
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
"""Descriptions by name of the method; all_reduce and broadcast work in place, so the rank's tensor is its result."""
