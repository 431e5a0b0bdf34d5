"""Sets up the world for a program that needs it.

The world has the environment variables that torchrun sets, and the process groups that the program makes.

Source of the variables' names: "Environment Variables" of torch.distributed.run (2.13.0).
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, cast

from torch import distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from equivtest.base.importing import load_named, require_arguments
from equivtest.errors import Misuse, NotSupported
from equivtest.programs.case import ModuleCase

ADDRESS = "127.0.0.1"
"""The address of a world whose ranks are all on this machine."""
PORT_KEY, ARRIVAL_KEY = "equivtest/master_port", "equivtest/arrivals"

_set_up: set[str] = set()
"""Set-ups in this process that are never torn down."""
_visits = itertools.count()


@contextlib.contextmanager
def world_of(case: ModuleCase, mesh: DeviceMesh) -> Iterator[None]:
    """Sets up the world that the program needs. Afterwards tears the world down and restores the environment.

    If the program has no tear-down, the world is set up once. The ranks are then fresh, and run no other case.
    """
    if not case.world.needs_world:
        yield
        return
    before, told = dict(os.environ), _told()
    os.environ.update(_environment())
    try:
        try:
            if case.world.set_up not in _set_up:
                _call(case.world.set_up, "set_up", mesh)
            if not case.world.tear_down:
                _set_up.add(case.world.set_up)
            try:
                yield
            except BaseException:
                with contextlib.suppress(Exception):  # the program has failed already
                    _call(case.world.tear_down, "tear_down", mesh)
                raise
        finally:
            all_arrived = _arrive(told, mesh.size())  # after a failure too, because the other ranks wait
        told.wait([all_arrived])
        try:
            _call(case.world.tear_down, "tear_down", mesh)
        except NotSupported as error:
            raise Misuse(
                f"tear_down {case.world.tear_down!r} raised NotSupported, after the case had run: {error}: raise it "
                "earlier, in set_up, parallelize or the forward"
            ) from error
    finally:
        os.environ.clear()
        os.environ.update(before)


def _arrive(told: Any, num_ranks: int) -> str:
    """Records in the store `told` that this rank has finished the program. Returns the key that the last rank sets.

    No rank may tear down the world before. `torch.distributed.new_group` ends without a barrier, and if a rank releases
    a group of gloo while another rank still connects to it, `new_group` raises there (torch 2.13.0).
    """
    key = f"{ARRIVAL_KEY}/{next(_visits)}"
    if told.add(key, 1) == num_ranks:
        told.set(f"{key}/all", "")
    return f"{key}/all"


def _told() -> Any:
    return distributed_c10d._get_default_store()


def _call(name: str, what: str, mesh: DeviceMesh) -> None:
    if name:
        function = cast("Callable[[DeviceMesh], object]", load_named(name, what))
        require_arguments(function, f"{what} {name!r}", ("mesh",))
        function(mesh)


@cache
def _environment() -> dict[str, str]:
    """Returns the environment variables that torchrun sets. A rank on another host already has some of them."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    here = {"LOCAL_RANK": rank, "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": size}
    return (here if _host() is None else {name: os.environ[name] for name in here}) | {
        "RANK": rank,
        "WORLD_SIZE": size,
        "MASTER_ADDR": _host() or ADDRESS,
        "MASTER_PORT": str(_store().port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


@cache
def _store() -> Any:
    """Returns the store that listens at MASTER_PORT. Rank 0 serves the store until the process of rank 0 ends."""
    served = dist.TCPStore  # type: ignore[attr-defined]
    if dist.get_rank():
        return served(_host() or ADDRESS, int(_told().get(PORT_KEY)), is_master=False)
    store = served(_host() or ADDRESS, 0, is_master=True, wait_for_workers=False)
    _told().set(PORT_KEY, str(store.port))
    return store


def _host() -> str | None:
    """Returns the host at which ranks reach rank 0, or None if all ranks are on this machine and share a file."""
    store = _told()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None)
