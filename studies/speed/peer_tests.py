"""The peers: torch's own two bases for tests on several processes, each judging the cases that it is handed.

Every rank draws the values, runs forward and backward and compares what it holds with its part
of the unsharded result.  A spawned rank imports this module again and finds the cases in its
environment; `with_cases` gives the classes for other ones.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import unittest
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import ModuleType

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.testing._internal.common_distributed import MultiProcContinuousTest, MultiProcessTestCase

from equivtest.cases.case import Case, from_data, to_data
from studies.speed.programs import judge_draws

logging.getLogger("torch.testing._internal.common_distributed").setLevel(logging.WARNING)  # a line per process
_CASES = "EQUIVTEST_BENCH_CASES"
_SUBJECT, _WRITTEN = json.loads(os.environ.get(_CASES, '["", []]'))
_WORK: list[Case] = [from_data(data) for data in _WRITTEN]
_WORLD_SIZE = _WORK[0].world_size if _WORK else 1
Test = Callable[[unittest.TestCase], None]


def with_cases(subject: str, cases: Sequence[Case]) -> ModuleType:
    """This module, its classes about `cases`, which are of one world size."""
    os.environ[_CASES] = json.dumps([subject, [to_data(case) for case in cases]])
    return importlib.reload(sys.modules[__name__])


class ProcessTest(MultiProcessTestCase):
    """New processes for every test; one draw each."""

    @property
    def world_size(self) -> int:
        return _WORLD_SIZE

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def join(self) -> None:
        """As torch's tests on gloo begin."""
        store = FileStore(self.file_name, _WORLD_SIZE)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=_WORLD_SIZE)


class _SameProcesses(MultiProcContinuousTest):
    """The same processes for all tests of the class."""

    world_size = _WORLD_SIZE
    timeout = timedelta(seconds=120)

    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    @classmethod
    def device_type(cls) -> str:
        return "cpu"

    def join(self) -> None:
        """The class has."""


class ContinuousTest(_SameProcesses):
    """One draw for each test."""


class BatchedTest(_SameProcesses):
    """All draws of a case for each test."""


def _test_of(case: Case, draws: Sequence[int]) -> Test:
    def test(self: unittest.TestCase) -> None:
        self.join()  # type: ignore[attr-defined]
        torch.set_num_threads(1)
        judge_draws(_SUBJECT, case, draws)

    return test


def _fill(cls: type[unittest.TestCase], *, batched: bool) -> None:
    for number, case in enumerate(_WORK):
        every = range(len(case.values))
        for draws in [list(every)] if batched else [[draw] for draw in every]:
            setattr(cls, f"test_{number:04}_{draws[0]}", _test_of(case, draws))


_fill(ProcessTest, batched=False)
_fill(ContinuousTest, batched=False)
_fill(BatchedTest, batched=True)
