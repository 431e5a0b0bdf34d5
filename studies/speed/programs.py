"""Defines programs that ranks run for the benchmarks.  Ranks import this module, so it does not import Hypothesis."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from equivtest.cases.case import Case, from_data, replicated, to_data
from equivtest.cases.case_tensor import CaseTensor
from equivtest.cases.names import Subject, resolve
from equivtest.ranks.backend import Backend
from equivtest.ranks.meshes import mesh_for
from equivtest.ranks.reply import Answer
from equivtest.ranks.visit import hand_out, take_answers, touched, visit
from equivtest.tensors import Placed

Given = Mapping[str, torch.Tensor]

PARTS = ("hand out", "subject", "collect")
"""Parts of a rank's work on a case.  `timed_visit` returns their seconds in this order, under 'times'."""


@dataclass(frozen=True, kw_only=True)
class CaseList(Case):
    """A list of cases that ranks run one after the other.  The ranks reply only once, after the last case."""

    written: tuple[str, ...] = ()

    @classmethod
    def of(cls, world_size: int, cases: Sequence[Case]) -> CaseList:
        return cls(world_size=world_size, written=tuple(json.dumps(to_data(case)) for case in cases))

    def __str__(self) -> str:
        return f"a list of {len(self.written)} cases on {self.world_size} ranks"

    def describe_tensors(self) -> dict[str, CaseTensor]:
        return {}


def visit_one_or_list(subject: str, case: Case, backend: Backend) -> tuple[Answer, ...] | None:
    """Runs a case, or each case of a `CaseList`, as the harness does.  A list returns no tensors."""
    if not isinstance(case, CaseList):
        return visit(subject, case, backend)
    resolve(subject)  # which imports the class of its cases
    for text in case.written:
        visit(subject, from_data(json.loads(text)), backend)
    return ()


def timed_visit(subject: str, case: Case, backend: Backend) -> tuple[Answer, ...] | None:
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
