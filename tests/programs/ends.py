"""Programs of ranks whose parent is ended: they run a case, hang in Python, or hang in a collective."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from equivtest.families.linear.case import LinearCase
from equivtest.tensors import Placed

MARKS = "EQUIVTEST_BUSY_MARKS"
"""Environment variable: the directory in which each rank says that it is busy."""
RUN_S = 1.5
Given = Mapping[str, torch.Tensor]


def _tell_busy() -> None:
    (Path(os.environ[MARKS]) / str(os.getpid())).touch()


def runs(case: LinearCase, mesh: DeviceMesh, given: Given) -> dict[str, Placed]:
    """Goes from collective to collective for RUN_S, then answers."""
    _tell_busy()
    until_s = time.monotonic() + RUN_S
    done = torch.zeros(1)
    while not done.item():
        done.fill_(time.monotonic() > until_s)
        dist.all_reduce(done)
    return {}


def hangs_in_python(case: LinearCase, mesh: DeviceMesh, given: Given) -> dict[str, Placed]:
    _tell_busy()
    while True:
        time.sleep(0.01)


def hangs_in_collective(case: LinearCase, mesh: DeviceMesh, given: Given) -> dict[str, Placed]:
    """Rank 0 waits in an all-reduce, the others for a message that is never sent."""
    _tell_busy()
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    else:
        dist.recv(torch.ones(1), src=0)
    return {}


def nothing(case: LinearCase, mesh: DeviceMesh, given: Given) -> dict[str, Placed]:
    """One collective, and the answer."""
    dist.all_reduce(torch.ones(1))
    return {}
