"""Small collectives with known answers, which show what the ranks and their backend can do."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from equivtest.errors import EquivtestError
from equivtest.tensors import dtype_name


class ProbeFailed(EquivtestError):
    """A collective raised, or gave a wrong value."""


def probe_sum(request_id: int, device: torch.device) -> None:
    """Adds up `request_id` over all ranks.

    Raises:
        ProbeFailed: some rank added something else: the ranks are not at the same point.
    """
    total = torch.tensor([request_id], dtype=torch.int64, device=device)
    dist.all_reduce(total)
    expected = request_id * dist.get_world_size()
    if total.item() != expected:
        raise ProbeFailed(f"all_reduce: the ranks are out of step, expected {expected}, got {total.item()}")


def probe_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Tries the collectives that subjects need, on values that are exact in any floating dtype.

    Raises:
        ProbeFailed: naming the first collective that raises or is wrong.
    """
    for collective in (_all_reduce, _all_gather_into_tensor, _reduce_scatter_tensor):
        name = collective.__name__.removeprefix("_")
        try:
            actual, expected = _on_cpu(collective, dtype, device)
        except Exception as error:  # a backend may raise anything
            raise ProbeFailed(f"{name} of {dtype_name(dtype)} raised {type(error).__name__}: {error}") from error
        if not torch.equal(actual, expected):
            raise ProbeFailed(
                f"{name} of {dtype_name(dtype)} is wrong: expected {expected.tolist()}, got {actual.tolist()}"
            )


Collective = Callable[[torch.dtype, torch.device], tuple[torch.Tensor, torch.Tensor]]

# Renamed in torch 2.13, which warns of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _on_cpu(collective: Collective, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(actual, expected) in float64 on the CPU."""
    actual, expected = collective(dtype, device)
    return actual.cpu().double(), expected.cpu().double()


def _all_reduce(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts the ranks; the last rank alone adds a 1 to the second element."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    tensor = torch.tensor([1, int(rank == ranks - 1)], dtype=dtype, device=device)
    dist.all_reduce(tensor)
    return tensor, torch.tensor([ranks, 1])


def _all_gather_into_tensor(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Collects every rank's number."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    output = torch.zeros(ranks, dtype=dtype, device=device)
    _all_gather(output, torch.tensor([rank], dtype=dtype, device=device))
    return output, torch.arange(ranks)


def _reduce_scatter_tensor(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Hands each rank its own number, given by rank 0 alone, and the count of the ranks."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    given = torch.arange(ranks) * int(rank == 0)
    operand = torch.stack((given, torch.ones_like(given)), dim=1).to(dtype).to(device)
    output = torch.zeros(1, 2, dtype=dtype, device=device)
    _reduce_scatter(output, operand)
    return output, torch.tensor([[rank, ranks]])
