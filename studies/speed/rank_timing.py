"""Measures times on ranks for the benchmarks of subjects, without the harness in between.  Imports no Hypothesis."""

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

NUM_TIMED = 10  # timings of each of the two ways, in turn
NUM_WARM = 2
FETCHES: dict[str, Fetcher] = {"all_gather": fetch_by_all_gather, "all_reduce": fetch_by_all_reduce}
FETCH_PARTS = ("submit", "wait", "total", "host")
"""Measured times of a fetch, in seconds.

submit: until the call returns. wait: from then until the results are there. total: both. host: CPU seconds of this
thread in both.
"""


def visit_timed(subject: str, case: Case, backend: Backend) -> tuple[Answer, ...] | None:
    """Calls `subject`, a function of the case and the mesh that returns seconds, and answers these under 'times'."""
    mesh = mesh_for(case, backend.device)
    if mesh is None:
        return None
    measure: Callable[[Case, DeviceMesh], torch.Tensor] = resolve(subject)  # type: ignore[assignment]
    return (Answer({"times": Placed(measure(case, mesh), replicated())}),)


def in_turns(timed: Mapping[str, Callable[[], list[float]]], num_timed: int) -> torch.Tensor:
    """Times each function several times, in turn, started together on all ranks.

    Returns:
        Seconds as float64 of shape (times, functions, parts).
    """
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
    """Parameters of one size that are fetched with one collective."""

    num_parameters: int = 1
    numel: int = 1
    num_timed: int = NUM_TIMED

    def describe_tensors(self) -> dict[str, CaseTensor]:
        return {}


def time_fetches(case: ManyParameters, mesh: DeviceMesh) -> torch.Tensor:
    """Returns the seconds of each of FETCH_PARTS for each of FETCHES, of shape (num_timed, 2, 4)."""
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
