"""What ranks run for the benchmarks.  Imported inside ranks: no Hypothesis here."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from equivtest.cases.case import Case, from_data, replicated, to_data
from equivtest.cases.case_tensor import CaseTensor
from equivtest.cases.names import Subject, resolve
from equivtest.families.linear.case import LinearCase
from equivtest.oracle import expect
from equivtest.ranks.backend import Backend
from equivtest.ranks.meshes import mesh_for, mesh_of
from equivtest.ranks.reply import Answer
from equivtest.ranks.visit import hand_out, take_answers, touched, visit, visit_draw
from equivtest.tensors import Placed, slice_local

Given = Mapping[str, torch.Tensor]

PARTS = ("hand out", "subject", "collect")
"""What a rank does in a visit; `timed_visit` answers seconds in this order, under 'times'."""
LONG_S = 60.0  # longer than any benchmark waits


@dataclass(frozen=True, kw_only=True)
class CaseList(Case):
    """Cases for ranks to run one after the other: no word to the parent until the last is done.

    Attributes:
        judged: Whether every rank compares what it holds with its part of the unsharded result.
    """

    written: tuple[str, ...] = ()
    judged: bool = False

    @classmethod
    def of(cls, world_size: int, cases: Sequence[Case], *, judged: bool = False) -> CaseList:
        return cls(world_size=world_size, written=tuple(json.dumps(to_data(case)) for case in cases), judged=judged)

    def __str__(self) -> str:
        return f"a list of {len(self.written)} cases on {self.world_size} ranks"

    def describe_tensors(self) -> dict[str, CaseTensor]:
        return {}


def visit_one_or_list(subject: str, case: Case, backend: Backend) -> tuple[Answer, ...] | None:
    """The harness's own visit; of a list the same for each case, judged where it says so, with nothing sent."""
    if not isinstance(case, CaseList):
        return visit(subject, case, backend)
    resolve(subject)  # which imports the class of its cases
    for text in case.written:
        listed = from_data(json.loads(text))
        if case.judged:
            judge_draws(subject, listed, range(len(listed.values)))
        else:
            visit(subject, listed, backend)
    return ()


def judge_draws(subject: str, case: Case, draws: Sequence[int]) -> None:
    """Runs the draws and compares every tensor, in this rank, as a test without a harness does.

    Raises:
        AssertionError: some element is further from the unsharded one than is allowed.
    """
    mesh = mesh_of("cpu", case.mesh_shape)
    assert mesh is not None  # of the whole world
    for draw in draws:
        expected = expect(case, draw)
        answer = visit_draw(resolve(subject), case, draw, mesh)
        for name, right in expected.tensors.items():
            placed = answer.tensors[name]
            place = (placed.layout, case.mesh_shape, dist.get_rank())
            value = slice_local(right.value, *place)
            allowed = torch.zeros(()) if right.allowed is None else slice_local(right.allowed, *place)
            actual = placed.local.double()
            assert bool(((actual == value) | ((actual - value).abs() <= allowed)).all()), (case, draw, name)


def timed_visit(subject: str, case: Case, backend: Backend) -> tuple[Answer, ...] | None:
    """As `equivtest.ranks.visit.visit`, with the seconds of each of PARTS in every answer."""
    function = resolve(subject)
    mesh = mesh_for(case, backend.device)
    if mesh is None:
        return None
    return tuple(_timed_draw(function, case, index, mesh) for index in range(len(case.values)))


def _timed_draw(function: Subject, case: Case, index: int, mesh: DeviceMesh) -> Answer:
    marks_s = [time.monotonic()]
    given = hand_out(case, index, mesh)
    before = {name: (tensor.detach().clone(), tensor.requires_grad) for name, tensor in given.items()}
    marks_s.append(time.monotonic())
    returned = function(case, mesh, given)
    marks_s.append(time.monotonic())
    answers, flags = take_answers(case, returned)
    changes = tuple(touched(given, before))
    marks_s.append(time.monotonic())
    times_s = torch.tensor(marks_s, dtype=torch.float64).diff()  # (len(PARTS),)
    return Answer({**answers, "times": Placed(times_s, replicated())}, flags, changes)


def tell_pid(case: LinearCase, mesh: DeviceMesh, given: Given) -> dict[str, Placed]:
    """A subject whose output is the process id of the rank."""
    return {"output": Placed(torch.tensor(os.getpid()), replicated())}


def wait_for_victim(case: LinearCase, mesh: DeviceMesh, given: Given) -> dict[str, Placed]:
    """A subject in which every rank waits, inside a collective, for the one that the seed names."""
    victim = case.values[0][1]
    if dist.get_rank() == victim:
        time.sleep(LONG_S)
    dist.all_reduce(torch.ones(1))
    return {}
