"""What test files share: ranks, since starting their server takes as long as all that most files do with them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from equivtest.pools import pool_of
from equivtest.ranks.pool import Pool
from tests.commands import Command


@pytest.fixture(scope="session")
def pool(pytestconfig: pytest.Config) -> Pool:
    """The pool of this process, which the properties use too; its worlds may have run anything."""
    return pool_of(pytestconfig)


@pytest.fixture
def command(pool: Pool, capsys: pytest.CaptureFixture[str]) -> Command:
    """Calls `equivtest` in this process."""
    return Command(pool, capsys)


@pytest.fixture
def alone() -> Iterator[DeviceMesh]:
    """This process as the only rank of a gloo group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()
