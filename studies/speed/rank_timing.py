"""Timings that ranks take for the benchmarks of subjects, with no harness in between.  No Hypothesis here."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from equivtest.cases.case import Case, replicated
from equivtest.cases.case_tensor import CaseTensor
from equivtest.cases.names import resolve
from equivtest.families.zero3.fetch.subject import Fetcher, fetch_by_all_gather, fetch_by_all_reduce, partition, release
from equivtest.ranks.backend import Backend
from equivtest.ranks.meshes import mesh_for
from equivtest.ranks.reply import Answer
from equivtest.tensors import Placed

NUM_TIMED = 10  # of each of the two that are compared, turn by turn
NUM_WARM = 2
FETCHES: dict[str, Fetcher] = {"all_gather": fetch_by_all_gather, "all_reduce": fetch_by_all_reduce}
FETCH_PARTS = ("submit", "wait", "total", "host")
"""Seconds until the fetch has returned, from there until it has been waited for, both; of this thread's CPU in both."""


def visit_timed(subject: str, case: Case, backend: Backend) -> tuple[Answer, ...] | None:
    """Answers the times of `subject`, a function of the case and the mesh: one tensor of seconds, under 'times'."""
    mesh = mesh_for(case, backend.device)
    if mesh is None:
        return None
    measure: Callable[[Case, DeviceMesh], torch.Tensor] = resolve(subject)  # type: ignore[assignment]
    return (Answer({"times": Placed(measure(case, mesh), replicated())}),)


def in_turns(timed: Mapping[str, Callable[[], list[float]]], num_timed: int) -> torch.Tensor:
    """Times each function repeatedly, started together on all ranks: (times, functions, parts), float64."""
    found = []
    for number in range(-NUM_WARM, num_timed):
        row = {}
        for name in timed if number % 2 == 0 else reversed(tuple(timed)):
            dist.barrier()
            row[name] = timed[name]()
        if number >= 0:
            found.append([row[name] for name in timed])
    return torch.tensor(found, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True, repr=False)
class ManyParameters(Case):
    """Parameters of one size, fetched with one collective.

    Attributes:
        num_parameters: How many.
        numel: Elements of each.
        num_timed: How often each fetch is timed.
    """

    num_parameters: int = 1
    numel: int = 1
    num_timed: int = NUM_TIMED

    def describe_tensors(self) -> dict[str, CaseTensor]:
        return {}


def time_fetches(case: ManyParameters, mesh: DeviceMesh) -> torch.Tensor:
    """Seconds of each of FETCH_PARTS by each of FETCHES: (num_timed, 2, 4)."""
    whole = torch.arange(case.numel, dtype=torch.float32)
    parameters = [partition(whole, mesh, padding=0.0) for _ in range(case.num_parameters)]

    def timed(fetch: Fetcher) -> list[float]:
        begun_s, host_s = time.perf_counter(), time.thread_time()
        fetching = fetch(parameters, mesh)
        submitted_s = time.perf_counter()
        fetching.wait()
        done_s = time.perf_counter()
        host_s = time.thread_time() - host_s
        assert all(parameter.whole is not None for parameter in parameters)
        release(parameters)
        return [submitted_s - begun_s, done_s - submitted_s, done_s - begun_s, host_s]

    return in_turns({name: partial(timed, fetch) for name, fetch in FETCHES.items()}, case.num_timed)
