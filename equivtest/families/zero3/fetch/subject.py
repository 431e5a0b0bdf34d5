"""Partitions parameters as ZeRO-3 does, and makes them whole by all_gather or by all_reduce.

A parameter of n elements is flattened, padded to a multiple A of the world size w, and partitioned: rank r has s = A /
w elements from r * s on. A real ZeRO never writes the padding. Here the padding has the case's fill value, so that code
that reads padding gets wrong results.

A fetch makes several parameters whole with one collective:

    all_gather   The buffer is rank-major, [rank][parameter]. The collective's result is narrowed and concatenated.
    all_reduce   The buffer is parameter-major, [parameter][rank], with zeros except in this rank's own partitions.
                 The parameters are views of the buffer, and the sum fills in their elements.

Source: DeepSpeed PR 5420 and deepspeed/runtime/zero/partition_parameters.py (0.19.8).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from equivtest.families.zero3.fetch.case import FetchCase, RefusedFetchCase
from equivtest.tensors import Placed

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""The all_gather of one tensor, by its name in torch 2.13 or by the old one, which torch 2.13 warns about."""


class StatusError(RuntimeError):
    """Raised if a parameter does not have the status that an operation needs."""


class DtypeError(TypeError):
    """Raised if the parameters of one fetch have several dtypes, which do not fit one flat buffer."""


class Status(enum.Enum):
    """State of a whole parameter on this rank."""

    NOT_AVAILABLE = enum.auto()
    IN_FLIGHT = enum.auto()
    AVAILABLE = enum.auto()


@dataclass
class PartitionedParameter:
    """A parameter under ZeRO-3, with this rank's partition, and with the whole parameter while it is fetched.

    Attributes:
        partition: This rank's part of the flattened and padded parameter, a tensor of one dim.
        whole: The whole parameter of shape `shape`. Its values are valid only while the status is AVAILABLE.
    """

    shape: torch.Size
    requires_grad: bool
    partition: torch.Tensor
    whole: torch.Tensor | None = None
    status: Status = Status.NOT_AVAILABLE

    @property
    def numel(self) -> int:
        return self.shape.numel()


@dataclass
class Fetch:
    """A fetch that has begun. The method `wait` ends the fetch."""

    parameters: Sequence[PartitionedParameter]
    work: dist.Work | None
    finish: Callable[[], None]

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        self.finish()
        for parameter in self.parameters:
            parameter.status = Status.AVAILABLE


def partition(parameter: torch.Tensor, mesh: DeviceMesh, *, padding: float) -> PartitionedParameter:
    """Returns this rank's partition. `padding` fills up the flattened parameter, so that partitions are equal."""
    size = -(-parameter.numel() // mesh.size())
    start = min(mesh.get_local_rank() * size, parameter.numel())
    stop = min(start + size, parameter.numel())
    own = parameter.new_full((size,), padding)
    own[: stop - start] = parameter.detach().reshape(-1)[start:stop]
    return PartitionedParameter(parameter.shape, parameter.requires_grad, own)


def release(parameters: Sequence[PartitionedParameter]) -> None:
    """Drops the whole parameters, but not the partitions."""
    for parameter in parameters:
        parameter.whole, parameter.status = None, Status.NOT_AVAILABLE


def launch(parameters: Sequence[PartitionedParameter]) -> None:
    """Marks the parameters IN_FLIGHT.

    Raises:
        StatusError: a parameter is not NOT_AVAILABLE, or is listed twice.
        DtypeError: the parameters have several dtypes.
    """
    for index, parameter in enumerate(parameters):
        if parameter.status is not Status.NOT_AVAILABLE:
            raise StatusError(f"parameter {index} is {parameter.status.name}; only a NOT_AVAILABLE one can be fetched")
        if any(parameter is other for other in parameters[:index]):
            raise StatusError(f"parameter {index} comes twice; one fetch takes each parameter once")
    dtypes = {str(parameter.partition.dtype) for parameter in parameters}
    if len(dtypes) > 1:
        raise DtypeError(f"one fetch needs one dtype, got {', '.join(sorted(dtypes))}; fetch them separately")
    for parameter in parameters:
        parameter.status = Status.IN_FLIGHT


@contextmanager
def launching(parameters: Sequence[PartitionedParameter]) -> Iterator[None]:
    """Marks the parameters IN_FLIGHT for the block, and NOT_AVAILABLE again if the block raises."""
    launch(parameters)
    try:
        yield
    except BaseException:
        release(parameters)
        raise


def fetch_by_all_gather(parameters: Sequence[PartitionedParameter], mesh: DeviceMesh) -> Fetch:
    """Starts one all_gather of all partitions. `Fetch.wait` copies the whole parameters from the gathered buffer."""
    with launching(parameters):
        own = torch.cat([parameter.partition for parameter in parameters])
        gathered = own.new_empty((mesh.size(), own.numel()))  # (rank, its partitions one after the other)
        work = None
        if own.numel():
            work = all_gather(gathered.view(-1), own, group=mesh.get_group(), async_op=True)

    def finish() -> None:
        start = 0
        for parameter in parameters:
            size = parameter.partition.numel()
            flat = torch.cat([gathered[rank].narrow(0, start, size) for rank in range(mesh.size())])
            parameter.whole = flat[: parameter.numel].view(parameter.shape)
            start += size

    return Fetch(parameters, work, finish)


def zeros(like: torch.Tensor, numel: int) -> torch.Tensor:
    """Returns a flat buffer of zeros: an all_reduce adds zeros to the elements of other ranks' partitions."""
    return like.new_zeros((numel,))


def fetch_by_all_reduce(
    parameters: Sequence[PartitionedParameter],
    mesh: DeviceMesh,
    make_buffer: Callable[[torch.Tensor, int], torch.Tensor] = zeros,
) -> Fetch:
    """Starts one all_reduce of one flat buffer. The whole parameters are views of the buffer from the start.

    `make_buffer` gets a partition, whose dtype and device the buffer has, and the buffer's number of elements.
    """
    padded = [parameter.partition.numel() * mesh.size() for parameter in parameters]
    with launching(parameters):
        buffer = make_buffer(parameters[0].partition, sum(padded))
        start = 0
        for parameter, padded_numel in zip(parameters, padded, strict=True):
            size = parameter.partition.numel()
            buffer.narrow(0, start + mesh.get_local_rank() * size, size).copy_(parameter.partition)
            parameter.whole = buffer.narrow(0, start, parameter.numel).view(parameter.shape)
            start += padded_numel
        work = dist.all_reduce(buffer, group=mesh.get_group(), async_op=True) if buffer.numel() else None
    return Fetch(parameters, work, lambda: None)


Fetcher = Callable[[Sequence[PartitionedParameter], DeviceMesh], Fetch]


def run_fetch(
    case: FetchCase, mesh: DeviceMesh, given: Mapping[str, torch.Tensor], fetch: Fetcher
) -> dict[str, Placed]:
    wholes = [given[name] for name in case.given_names()]
    parameters = [partition(whole, mesh, padding=padding_value(case, whole.dtype)) for whole in wholes]
    fetching = fetch(parameters, mesh)
    if isinstance(case, RefusedFetchCase) and case.misfit == "in_flight":
        fetch(parameters, mesh)
    fetching.wait()
    contract = case.layouts()
    answers: dict[str, Placed] = {}
    for index, parameter in enumerate(parameters):
        assert parameter.whole is not None and parameter.status is Status.AVAILABLE
        parameter.whole.requires_grad_(parameter.requires_grad)
        answers[f"param.{index}"] = Placed(parameter.whole, contract[f"param.{index}"])
        answers[f"partition.{index}"] = Placed(parameter.partition, contract[f"partition.{index}"])
    return answers


def padding_value(case: FetchCase, dtype: torch.dtype) -> float:
    """Returns the fill value of padding, which stands for uninitialised memory."""
    return float("nan") if case.padding == "nan" else torch.finfo(dtype).max / 4


def zero3_fetch_all_gather(case: FetchCase, mesh: DeviceMesh, given: Mapping[str, torch.Tensor]) -> dict[str, Placed]:
    return run_fetch(case, mesh, given, fetch_by_all_gather)


def zero3_fetch_all_reduce(case: FetchCase, mesh: DeviceMesh, given: Mapping[str, torch.Tensor]) -> dict[str, Placed]:
    return run_fetch(case, mesh, given, fetch_by_all_reduce)
