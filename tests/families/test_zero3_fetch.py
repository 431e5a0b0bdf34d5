"""ZeRO-3's fetches: partitions, states, refusals, and who shares memory with whom."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from equivtest.families.zero3.fetch import subject as zero3_fetch
from equivtest.families.zero3.fetch.case import RefusedFetchCase
from equivtest.families.zero3.fetch.subject import (
    Fetch,
    Fetcher,
    PartitionedParameter,
    Status,
    fetch_by_all_gather,
    fetch_by_all_reduce,
    launch,
    padding_value,
    partition,
    release,
    run_fetch,
)
from equivtest.tensors import same_bits
from tests.replies import FETCH

SHAPES = ((5, 3), (2,), (), (0, 4))
PADDING = 99.0
both = pytest.mark.parametrize("fetch", [fetch_by_all_gather, fetch_by_all_reduce])


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[DeviceMesh]:
    """This process as one rank of a world whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield init_device_mesh("cpu", (world_size,))
    finally:
        dist.destroy_process_group()


def wholes(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Parameters of SHAPES, filled with 1, 2, 3, ..."""
    return [torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=dtype).reshape(shape) for shape in SHAPES]


def partitioned(mesh: DeviceMesh) -> list[PartitionedParameter]:
    return [partition(whole, mesh, padding=PADDING) for whole in wholes()]


def whole_of(parameter: PartitionedParameter) -> torch.Tensor:
    assert parameter.whole is not None
    return parameter.whole


def states(parameters: list[PartitionedParameter]) -> set[Status]:
    return {parameter.status for parameter in parameters}


# Partitions.


@pytest.mark.parametrize(
    ("numel", "world_size", "kept"),
    [
        (6, 3, [[1, 2], [3, 4], [5, 6]]),
        (5, 2, [[1, 2, 3], [4, 5, PADDING]]),
        (4, 3, [[1, 2], [3, 4], [PADDING, PADDING]]),
        (1, 3, [[1], [PADDING], [PADDING]]),
        (0, 2, [[], []]),
        (3, 1, [[1, 2, 3]]),
    ],
)
def test_partitions_of_a_parameter_have_equal_size_with_padding_at_the_end(
    numel: int, world_size: int, kept: list[list[float]]
) -> None:
    for rank in range(world_size):
        with as_rank(rank, world_size) as mesh:
            own = partition(torch.arange(1.0, numel + 1), mesh, padding=PADDING).partition
        assert own.tolist() == kept[rank]


def test_partition_records_shape_numel_and_requires_grad_of_its_parameter() -> None:
    with as_rank(1, 2) as mesh:
        found = partition(torch.arange(6.0).reshape(3, 2).T.requires_grad_(), mesh, padding=PADDING)

    assert (found.shape, found.numel, found.requires_grad) == ((2, 3), 6, True)
    assert found.partition.tolist() == [1, 3, 5] and not found.partition.requires_grad
    assert (found.whole, found.status) == (None, Status.NOT_AVAILABLE)


def test_partition_shares_no_memory_with_its_parameter(alone: DeviceMesh) -> None:
    whole = torch.ones(4)
    partition(whole, alone, padding=PADDING).partition.zero_()

    assert whole.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("padding", "is_right"), [("nan", torch.isnan), ("large", torch.isfinite)])
def test_padding_is_nan_or_a_number_far_from_every_drawn_value(
    padding: str, is_right: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    value = torch.tensor(padding_value(replace(FETCH, padding=padding), dtype), dtype=dtype)

    assert bool(is_right(value)) and (padding == "nan" or value > 1e4)


# States.


@both
def test_fetch_sets_the_status_to_in_flight_and_then_available(alone: DeviceMesh, fetch: Fetcher) -> None:
    """And a release back, with the partitions as they were."""
    parameters = partitioned(alone)
    kept = [parameter.partition.clone() for parameter in parameters]
    assert states(parameters) == {Status.NOT_AVAILABLE}
    fetching = fetch(parameters, alone)
    assert states(parameters) == {Status.IN_FLIGHT}
    fetching.wait()
    assert states(parameters) == {Status.AVAILABLE}
    release(parameters)

    assert states(parameters) == {Status.NOT_AVAILABLE} and all(p.whole is None for p in parameters)
    assert all(same_bits(p.partition, own) for p, own in zip(parameters, kept, strict=True))


@both
def test_fetched_tensor_equals_the_parameter(alone: DeviceMesh, fetch: Fetcher) -> None:
    parameters = partitioned(alone)
    fetch(parameters, alone).wait()

    assert all(same_bits(whole_of(p), whole) for p, whole in zip(parameters, wholes(), strict=True))


@both
def test_released_parameter_can_be_fetched_again(alone: DeviceMesh, fetch: Fetcher) -> None:
    parameters = partitioned(alone)
    fetch(parameters, alone).wait()
    first = [whole_of(parameter) for parameter in parameters]
    release(parameters)
    fetch(parameters, alone).wait()

    assert all(same_bits(whole_of(p), one) for p, one in zip(parameters, first, strict=True))
    assert whole_of(parameters[0]).data_ptr() != first[0].data_ptr()


@both
def test_fetch_of_an_empty_parameter_calls_no_collective(alone: DeviceMesh, fetch: Fetcher) -> None:
    empty = [partition(torch.ones(0, 2), alone, padding=PADDING)]
    fetching: Fetch = fetch(empty, alone)
    fetching.wait()

    assert fetching.work is None and states(empty) == {Status.AVAILABLE} and whole_of(empty[0]).shape == (0, 2)


# Refusals.


@both
def test_fetch_of_mixed_dtypes_is_refused(alone: DeviceMesh, fetch: Fetcher) -> None:
    parameters = [partition(torch.ones(2, dtype=dtype), alone, padding=0) for dtype in (torch.float64, torch.float16)]

    with pytest.raises(TypeError, match=r"one dtype, got torch\.float16, torch\.float64; fetch them separately"):
        fetch(parameters, alone)
    assert states(parameters) == {Status.NOT_AVAILABLE}


@both
def test_fetch_of_a_parameter_in_flight_is_refused(alone: DeviceMesh, fetch: Fetcher) -> None:
    parameters = partitioned(alone)
    fetching = fetch(parameters[1:], alone)

    with pytest.raises(RuntimeError, match="parameter 1 is IN_FLIGHT; only a NOT_AVAILABLE one can be fetched"):
        fetch(parameters, alone)
    assert parameters[0].status is Status.NOT_AVAILABLE
    fetching.wait()


def test_fetch_of_an_available_parameter_is_refused(alone: DeviceMesh) -> None:
    """It must be released first."""
    parameters = partitioned(alone)
    fetch_by_all_gather(parameters, alone).wait()

    with pytest.raises(RuntimeError, match="parameter 0 is AVAILABLE"):
        launch(parameters)


@both
def test_fetching_a_parameter_in_flight_raises_without_a_collective(fetch: Fetcher) -> None:
    case = RefusedFetchCase(world_size=3, misfit="in_flight")
    with as_rank(1, 3) as mesh, pytest.raises(RuntimeError, match="parameter 0 is IN_FLIGHT"):
        run_fetch(case, mesh, {"param.0": torch.ones(1)}, fetch)


# Memory.


def test_parameters_are_views_of_the_all_reduce_buffer_before_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    with as_rank(1, 2) as mesh:
        parameters = partitioned(mesh)
        monkeypatch.setattr(
            dist, "all_reduce", lambda buffer, **_: seen.append((buffer, [whole_of(p) for p in parameters]))
        )
        fetch_by_all_reduce(parameters, mesh)

    [(buffer, views)] = seen
    assert all(view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr() for view in views)
    assert all(view is parameter.whole for view, parameter in zip(views, parameters, strict=True))


def test_parameters_begin_at_padded_offsets_of_the_all_reduce_buffer() -> None:
    """15 elements are padded to 16, and 1 to 2, before the next parameter begins."""
    with as_rank(0, 2) as mesh:
        parameters = partitioned(mesh)
        fetch_by_all_reduce(parameters, mesh)

    assert [whole_of(parameter).storage_offset() for parameter in parameters] == [0, 16, 18, 20]


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_reduce_buffers_of_all_ranks_add_up_to_the_parameters(world_size: int) -> None:
    sums = [torch.zeros(shape) for shape in SHAPES]
    for rank in range(world_size):
        with as_rank(rank, world_size) as mesh:
            parameters = partitioned(mesh)
            fetch_by_all_reduce(parameters, mesh)
        sums = [total + whole_of(parameter) for total, parameter in zip(sums, parameters, strict=True)]

    assert all(torch.equal(total, whole) for total, whole in zip(sums, wholes(), strict=True))


@pytest.mark.parametrize("world_size", [2, 3])
def test_gathered_buffer_is_split_by_rank_and_parameter(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    own = []
    for rank in range(world_size):
        with as_rank(rank, world_size) as mesh:
            own.append(torch.cat([parameter.partition for parameter in partitioned(mesh)]))

    def gather(out: torch.Tensor, part: torch.Tensor, **_: object) -> None:
        out.copy_(torch.cat(own))

    monkeypatch.setattr(zero3_fetch, "all_gather", gather)
    with as_rank(1, world_size) as mesh:
        parameters = partitioned(mesh)
        fetch_by_all_gather(parameters, mesh).wait()

    assert all(same_bits(whole_of(p), whole) for p, whole in zip(parameters, wholes(), strict=True))


def test_no_parameter_is_available_before_its_all_gather_has_ended(alone: DeviceMesh) -> None:
    parameters = partitioned(alone)
    fetching = fetch_by_all_gather(parameters, alone)
    assert all(parameter.whole is None for parameter in parameters)
    fetching.wait()

    assert all(parameter.whole is not None for parameter in parameters)


def test_all_gather_gives_each_parameter_separate_memory(alone: DeviceMesh) -> None:
    parameters = partitioned(alone)[:3]
    fetch_by_all_gather(parameters, alone).wait()
    places = [tensor.untyped_storage().data_ptr() for p in parameters for tensor in (whole_of(p), p.partition)]

    assert len(set(places)) == 6


@both
def test_returned_parameters_have_the_requires_grad_of_the_case(alone: DeviceMesh, fetch: Fetcher) -> None:
    case = replace(FETCH, world_size=1)
    given = {"param.0": torch.ones(5, 3).requires_grad_(), "param.1": torch.ones(2)}
    answers = run_fetch(case, alone, given, fetch)

    assert tuple(sorted(answers)) == tuple(sorted(case.answer_names()))
    assert [answers[f"param.{index}"].local.requires_grad for index in (0, 1)] == [True, False]
    assert answers["partition.0"].layout == case.layouts()["partition.0"]
