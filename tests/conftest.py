"""Shares ranks among test files, since starting their server takes as long as most files' work with them.

xdist's controller loads this module and runs no test, so the module itself does not import torch.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from equivtest.pytest_plugin.pools import pool_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from equivtest.ranks.pool import Pool
    from tests.commands import Command

gc.set_threshold(50_000)  # a search makes so many short-lived objects that a tenth of its time went into looking

LONG = ("module", "data_parallel", "steps")
"""Files of properties that take half a minute or more, and would be among the last."""


@pytest.hookimpl(trylast=True)  # behind the plugin, which puts properties behind all others
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files come first: xdist hands out whole files, and a worker with nothing left waits for the other."""
    files = tuple(f"properties/test_{name}.py" for name in LONG)
    items.sort(key=lambda item: not item.nodeid.startswith(files))


def pytest_collection_finish() -> None:
    """Gives torch one thread. Freezes all imported and collected objects, so that the garbage collector skips them."""
    import torch

    torch.set_num_threads(1)  # the others would wait for work in a loop, see `equivtest.verdicts.judging.one_thread`
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pool(pytestconfig: pytest.Config) -> Pool:
    """The pool of this process, which the properties use too; its worlds may have run anything."""
    return pool_of(pytestconfig)


@pytest.fixture
def command(pool: Pool, capsys: pytest.CaptureFixture[str]) -> Command:
    """Calls `equivtest` in this process."""
    from tests.commands import Command

    return Command(pool, capsys)


@pytest.fixture
def alone() -> Iterator[DeviceMesh]:
    """This process as the only rank of a gloo group."""
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()
