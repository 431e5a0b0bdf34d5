"""Runs small collectives with known results on the ranks, to find out which collectives the backend supports."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from equivtest.base.refusal import in_short, is_refusal
from equivtest.errors import EquivtestError


class ProbeFailed(EquivtestError):
    """Raised if a collective does not work as documented."""


class Wrong(ProbeFailed):
    """Raised if a collective returned a wrong value."""


class Refused(ProbeFailed):
    """Raised if the backend said that it does not support a collective."""


class Raised(ProbeFailed):
    """Raised if a collective raised any other exception."""


def probe_sum(request_id: int, device: torch.device) -> None:
    """Adds up the request's id over all ranks with an all_reduce, and compares the sum with world size times the id.

    Raises:
        ProbeFailed: the sum is wrong because a rank answers another request, so the ranks are not at the same point.
    """
    total = torch.tensor([request_id], dtype=torch.int64, device=device)
    dist.all_reduce(total)
    expected = request_id * dist.get_world_size()
    if total.item() != expected:
        raise ProbeFailed(f"all_reduce: the ranks are out of step, expected {expected}, got {total.item()}")


def probe_collective(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Runs the probe PROBES[name] on this rank and checks its result.

    The values are integers that every floating dtype can represent.

    Raises:
        Wrong, Refused, Raised: the collective returned a wrong value, was refused, or raised another exception.
    """
    try:
        actual, expected = PROBES[name](dtype, device)
        actual, expected = actual.cpu().double(), expected.cpu().double()
    except Exception as error:  # a backend may raise anything
        raise (Refused if is_refusal(error) else Raised)(in_short(error)) from error
    if name.endswith("_avg"):  # a mean may be rounded
        actual = actual.round()
    if not torch.equal(actual, expected):
        raise Wrong(f"expected {expected.tolist()}, got {actual.tolist()}")


Probe = Callable[[torch.dtype, torch.device], tuple[torch.Tensor, torch.Tensor]]
"""A function that runs one collective and returns the actual and the expected value on this rank."""

# Renamed in torch 2.13, which warns about the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

UNTOUCHED = -7
"""Value that fills output tensors before a probe; no probe expects it."""


def _given(values: list[int] | torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(values).to(dtype).to(device)


def _output(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(shape, UNTOUCHED, dtype=dtype, device=device)


def _sum(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (actual, expected) of a sum.

    Every rank has 1 in element 0, and rank r has r + 1 in element r + 1.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    own = torch.eye(ranks, dtype=torch.int64)[rank] * (rank + 1)
    tensor = _given([1, *own.tolist()], dtype, device)
    dist.all_reduce(tensor)
    return tensor, torch.tensor([ranks, *range(1, ranks + 1)])


def _average(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    tensor = _given(torch.eye(ranks)[rank] * ranks, dtype, device)
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    return tensor, torch.ones(ranks)


def _largest(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    tensor = _given([-dist.get_rank() - 1, dist.get_rank() + 1], dtype, device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor, torch.tensor([-1, dist.get_world_size()])


def _smallest(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    tensor = _given([-dist.get_rank() - 1, dist.get_rank() + 1], dtype, device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    return tensor, torch.tensor([-dist.get_world_size(), 1])


def _all_gather_into_tensor(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    output = _output((ranks,), dtype, device)
    _all_gather_single(output, _given([rank], dtype, device))
    return output, torch.arange(ranks)


def _all_gather(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    outputs = [_output((1,), dtype, device) for _ in range(ranks)]
    dist.all_gather(outputs, _given([rank], dtype, device))
    return torch.cat(outputs), torch.arange(ranks)


def _reduce_scatter_tensor(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (actual, expected) of a reduce_scatter of matrices. Rank r fills column r and receives row r."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    operand = torch.arange(1, ranks + 1)[:, None] * torch.eye(ranks, dtype=torch.int64)[rank]
    output = _output((1, ranks), dtype, device)
    _reduce_scatter_single(output, _given(operand, dtype, device))
    return output, torch.full((1, ranks), rank + 1)


def _reduce_scatter_average(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    operand = (torch.arange(ranks) % 3 + 1)[:, None] * torch.eye(ranks)[rank] * ranks
    output = _output((1, ranks), dtype, device)
    _reduce_scatter_single(output, _given(operand, dtype, device), op=dist.ReduceOp.AVG)
    return output, torch.full((1, ranks), rank % 3 + 1)


def _broadcast(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    last, first = _given([rank + 1], dtype, device), _given([rank + 1], dtype, device)
    dist.broadcast(last, src=ranks - 1)
    dist.broadcast(first, src=0)
    return torch.cat((last, first)), torch.tensor([ranks, 1])


def _reduce(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """On all ranks except the last, both results are one tensor, because the result of a reduce is undefined there."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    tensor = _given(torch.eye(ranks)[rank] * (rank + 1), dtype, device)
    dist.reduce(tensor, dst=ranks - 1)
    return tensor, torch.arange(1, ranks + 1) if rank == ranks - 1 else tensor


def _scatter(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    output = _output((1,), dtype, device)
    parts = [_given([number], dtype, device) for number in range(ranks)] if rank == ranks - 1 else None
    dist.scatter(output, parts, src=ranks - 1)
    return output, torch.tensor([rank])


def _all_to_all_single(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    operand = torch.stack((torch.full((ranks,), rank), torch.arange(ranks)), dim=1)
    output = _output((ranks, 2), dtype, device)
    dist.all_to_all_single(output, _given(operand, dtype, device))
    return output, operand.flip(1)


def _all_to_all(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    outputs = [_output((2,), dtype, device) for _ in range(ranks)]
    dist.all_to_all(outputs, [_given([rank, other], dtype, device) for other in range(ranks)])
    return torch.stack(outputs), torch.tensor([[other, rank] for other in range(ranks)])


def _gather(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    outputs = [_output((1,), dtype, device) for _ in range(ranks)] if rank == ranks - 1 else None
    dist.gather(_given([rank], dtype, device), outputs, dst=ranks - 1)
    return (torch.cat(outputs), torch.arange(ranks)) if outputs else (torch.zeros(1), torch.zeros(1))


def _reduce_scatter(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (actual, expected) of a reduce_scatter of lists.

    Rank r adds 1, 2 or 3 to element r % 8 of each rank's vector. On 64 ranks vectors with an element for each rank take
    gloo seven times as long.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    elements = torch.arange(ranks) % min(ranks, 8)
    operand = (torch.arange(ranks) % 3 + 1)[:, None] * torch.eye(ranks, dtype=torch.int64)[elements[rank], :8]
    output = _output(tuple(operand.shape[1:]), dtype, device)
    dist.reduce_scatter(output, list(_given(operand, dtype, device)))
    return output, torch.bincount(elements) * (rank % 3 + 1)


def _send_and_receive(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (actual, expected) after each rank sent its number to the next rank. A single rank sends nothing.

    Even ranks send first, odd ranks receive first. NCCL runs the messages between two ranks one after another, so two
    ranks that both send first would wait for each other (ProcessGroupNCCL.cpp, pointToPoint, 2.11.0).
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if ranks == 1:
        return torch.zeros(1), torch.zeros(1)
    number, output = _given([rank], dtype, device), _output((1,), dtype, device)
    for sends in (rank % 2 == 0, rank % 2 == 1):
        if sends:
            dist.send(number, (rank + 1) % ranks)
        else:
            dist.recv(output, (rank - 1) % ranks)
    return output, torch.tensor([(rank - 1) % ranks])


def _barrier(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    dist.barrier()
    return torch.zeros(1), torch.zeros(1)


PROBES: dict[str, Probe] = {
    "all_reduce": _sum,
    "all_reduce_avg": _average,
    "all_reduce_max": _largest,
    "all_reduce_min": _smallest,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "reduce_scatter_tensor_avg": _reduce_scatter_average,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce": _reduce,
    "scatter": _scatter,
    "all_to_all_single": _all_to_all_single,
    "all_to_all": _all_to_all,
    "gather": _gather,
    "reduce_scatter": _reduce_scatter,
    "send_and_receive": _send_and_receive,
    "barrier": _barrier,
}
"""Probes, by the collective's name in torch 2.12, with the reduction unless it is SUM; the most used come first."""
