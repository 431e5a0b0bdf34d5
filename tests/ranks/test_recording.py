"""Recording: a rank's calls, on every road to the backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from equivtest.base import limits
from equivtest.cases.case import Case
from equivtest.families.linear.case import LinearCase
from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.families.zero3.fetch.subject import all_gather
from equivtest.oracle.collectives import expected_collectives
from equivtest.ranks.observe.recording import Recorder
from equivtest.ranks.pool import Pool
from equivtest.tensors import same_bits
from tests.ranks.test_visit import as_rank

FETCHED = FetchCase(
    world_size=2, parameters=((5,), (3,)), requires_grad=(True, True), collective="all_reduce", records=True
)
LAYER = LinearCase(
    world_size=2,
    style="colwise",
    leading=(3,),
    in_features=5,
    out_features=7,
    bias=True,
    input_layout="shard(0)",
    x_is_dtensor=True,
    requires_grad=("x", "weight", "bias"),
    records=True,
)
"""Nothing divides by two: every collective of it is padded."""


def seen(mesh: DeviceMesh, call: Any, members: Sequence[int] = (0, 1)) -> list[str]:
    with Recorder(members) as recorder:
        call(mesh)
    return [str(collective) for collective in recorder.found]


def backward(mesh: DeviceMesh) -> None:
    x = torch.ones(2, 2, requires_grad=True)
    DTensor.from_local(x, mesh, [Shard(0)]).redistribute(placements=[Replicate()]).sum().backward()


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda mesh: dist.all_reduce(torch.ones(3)), ["forward all_reduce of 12 bytes"]),
        (lambda mesh: dist.all_reduce(torch.ones(3), async_op=True).wait(), ["forward all_reduce of 12 bytes"]),
        (lambda mesh: all_gather(torch.empty(4), torch.ones(2)), ["forward all_gather of 8 bytes"]),
        (lambda mesh: dist.barrier(), ["forward barrier of 0 bytes"]),
        (lambda mesh: dist.broadcast(torch.ones(2), 0), ["forward broadcast of 8 bytes"]),
        (lambda mesh: functional.all_reduce(torch.ones(2), "sum", mesh) + 1, ["forward all_reduce of 8 bytes"]),
        (
            lambda mesh: DTensor.from_local(torch.ones(4), mesh, [Partial()]).redistribute(placements=[Shard(0)]) + 1,
            ["forward reduce_scatter of 16 bytes"],
        ),
        (backward, ["forward all_gather of 16 bytes"]),
        (lambda mesh: torch.ones(3) @ torch.ones(3), []),
    ],
    ids=["dist", "async", "all_gather", "barrier", "broadcast", "functional", "DTensor", "autograd", "none"],
)
def test_collective_called_through_any_torch_api_is_recorded_once(call: Any, expected: list[str]) -> None:
    """Through c10d, functional collectives and DTensor; a wait is no collective."""
    with as_rank(0, (2,)) as mesh:
        assert seen(mesh, call) == expected


def test_collective_is_recorded_with_its_phase_forward_or_backward() -> None:
    def call(mesh: DeviceMesh) -> None:
        x = torch.ones(2, requires_grad=True)
        replicated = DTensor.from_local(x, mesh, [Replicate()])
        replicated.to_local(grad_placements=[Partial()]).sum().backward()

    with as_rank(0, (2,)) as mesh:
        assert seen(mesh, call) == ["backward all_reduce of 8 bytes"]


def test_record_of_a_collective_names_the_processes_of_a_group_other_than_the_mesh() -> None:
    with as_rank(0, (3,)) as mesh:
        assert seen(mesh, lambda mesh: dist.all_reduce(torch.ones(1)), (0, 2)) == [
            "forward all_reduce of 4 bytes on processes 0, 1, 2"
        ]


def test_number_of_recorded_collectives_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_COLLECTIVES", 3)
    with as_rank(0, (2,)) as mesh:
        assert len(seen(mesh, lambda mesh: [dist.all_reduce(torch.ones(1)) for _ in range(5)])) == 3


# On ranks.


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("subject", "case"),
    [("zero3_fetch_all_reduce", FETCHED), ("rowwise_linear", replace(LAYER, style="rowwise"))],
)
def test_recording_collectives_changes_no_value(subject: str, case: Case, pool: Pool) -> None:
    recorded, plain = pool.run(subject, case), pool.run(subject, replace(case, records=False))

    for one, other in zip(recorded, plain, strict=True):
        assert one.answers[0].collectives and other.answers[0].collectives is None
        for name, placed in one.answers[0].tensors.items():
            assert same_bits(placed.local, other.answers[0].tensors[name].local)


@pytest.mark.ranks
def test_ranks_of_a_colwise_linear_call_the_documented_collectives(pool: Pool) -> None:
    for reply in pool.run("colwise_linear", LAYER):
        assert reply.answers[0].collectives == expected_collectives(LAYER, reply.rank)
