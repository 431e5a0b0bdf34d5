"""The one pool of a pytest process: made when first needed, closed however the run ends."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from equivtest.base import limits
from equivtest.errors import Misuse
from equivtest.pytest_plugin.options import settings_of
from equivtest.pytest_plugin.suite import is_shipped
from equivtest.ranks.surroundings import end_with_starter
from equivtest.report.handover import BackendFault

if TYPE_CHECKING:
    from collections.abc import Callable

    from equivtest.pytest_plugin.settings import Settings
    from equivtest.ranks.hosts.run_hub import RunHub
    from equivtest.ranks.launch import Server
    from equivtest.ranks.pool import Pool
    from equivtest.ranks.support import Finding

_pool_key = pytest.StashKey["Pool"]()
_server_key: pytest.StashKey[Server | None] = pytest.StashKey()
"""A server that was started before the pool."""
_gloo_key = pytest.StashKey["Pool"]()
_hub_key = pytest.StashKey["RunHub"]()
_slots_key = pytest.StashKey[dict[str, int]]()
_workers_key = pytest.StashKey[list[Any]]()


def pool_of(config: pytest.Config) -> Pool:
    """Returns this process's pool on the backend that the options name; its ranks have run no other file's programs."""
    if _pool_key not in config.stash:
        _end_orderly(config)
        from equivtest.ranks.pool import Pool

        server = config.stash.get(_server_key, None)
        config.stash[_pool_key] = Pool(settings_of(config).make_backend(), hub=hub_path(config), server=server)
        config.stash[_server_key] = None
    pool = config.stash[_pool_key]
    pool.serve(_running_file(config))
    return pool


def start_server(config: pytest.Config) -> None:
    """Starts the server that forks the pool's ranks, which imports torch while this process imports and collects."""
    _end_orderly(config)
    from equivtest.ranks.launch import Server, preloads

    backend = settings_of(config).make_backend()
    if not hub_path(config):
        config.stash[_server_key] = Server(backend.start, backend.imports, preloads(), {})


def _end_orderly(config: pytest.Config) -> None:
    """Prepares the end of this process, before it imports torch for seconds."""
    if hasattr(config, "workerinput"):
        # The worker's ranks then see its end of their pipes close and end too.  Without this a worker lives for
        # seconds after its controller was killed; so it does with a signal that it may ignore, as SIGHUP under nohup.
        end_with_starter()
    else:
        end_orderly_on_sigterm(config)


def gloo_of(config: pytest.Config) -> Callable[[], Pool] | None:
    """Returns a function that makes, once, this process's pool of gloo on the CPU; None if the run is on it."""
    if settings_of(config).is_gloo_on_cpu:
        return None

    def gloo() -> Pool:
        from equivtest.ranks.pool import Pool

        if _gloo_key not in config.stash:
            config.stash[_gloo_key] = Pool()
        pool = config.stash[_gloo_key]
        pool.serve(_running_file(config))
        return pool

    return gloo


def _running_file(config: pytest.Config) -> str:
    """Returns the path of the user's file whose test runs now; '' for properties and known failures of the package.

    Source: "PYTEST_CURRENT_TEST environment variable" of pytest's documentation (9.0).
    """
    path = config.rootpath / os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
    return str(path) if path.is_file() and not is_shipped(path) else ""


def open_hub(config: pytest.Config) -> None:
    """Listens for ranks on other hosts if the options request it; raises Misuse or BrokenSetup."""
    address = settings_of(config).listen
    if address is not None:
        from equivtest.ranks.hosts.run_hub import RunHub
        from equivtest.ranks.hosts.secret import read_secret

        config.stash[_hub_key] = RunHub(address, read_secret())


def _hub_of(config: pytest.Config) -> RunHub | None:
    return config.stash.get(_hub_key, None)


def hub_path(config: pytest.Config) -> str:
    """Returns the path of the run's hub, of this process or of its controller; '' if the run has none."""
    hub = _hub_of(config)
    return str(getattr(config, "workerinput", {}).get("equivtest_hub", "")) if hub is None else hub.path


def await_hosts(config: pytest.Config, tell: Callable[[str], object]) -> None:
    """Prints how slots connect to the run's hub, and waits until all are connected.

    Raises:
        BrokenSetup: they do not connect in time.
        Misuse: there are too few for the run.
    """
    hub = _hub_of(config)
    if hub is None:
        return
    tell(
        f"equivtest listens at port {hub.port}; on each host, within {limits.HOSTS_S:g} s: torchrun ... "
        f"-m equivtest.rank --connect HOST:{hub.port}"
    )
    slots = hub.slots()
    config.stash[_slots_key] = slots
    tell(f"equivtest hosts: {', '.join(f'{name} with {num}' for name, num in slots.items())}")
    num, largest = sum(slots.values()), max(settings_of(config).world_sizes)
    if largest > num:
        sizes = ",".join(str(size) for size in settings_of(config).world_sizes if size <= num)
        raise Misuse(
            f"--world-sizes: {largest} ranks are wanted, {num} are connected: start torchrun with more, or say {sizes}"
        )


def hosts_of(config: pytest.Config) -> dict[str, int]:
    """Returns how many slots each other host had when the run began; empty if ranks live on this machine."""
    return config.stash.get(_slots_key, {})


def host_events(config: pytest.Config) -> list[str]:
    """Returns losses, refusals and silences among the hosts of the run, one line each."""
    hub = _hub_of(config)
    return [] if hub is None else hub.events()


def close_hub(config: pytest.Config) -> None:
    """Disconnects the hosts."""
    hub = _hub_of(config)
    if hub is not None:
        del config.stash[_hub_key]
        hub.close()


def take_faults(config: pytest.Config) -> tuple[BackendFault, ...]:
    """Returns new faults that this process's pool has found in the backend, except known ones.

    It also returns the deaths of ranks that had answered: a fault that ends a process, such as in a thread of the
        backend,
    may show late.
    """
    pool = config.stash.get(_pool_key, None)
    if pool is None:
        return ()
    settings = settings_of(config)
    faults = [fault for fault in pool.take_faults() if not is_known_fault(fault, settings)]
    deaths = [BackendFault("", text) for text in pool.take_deaths()]
    return (*(BackendFault(fault.collective, str(fault)) for fault in faults), *deaths)


def is_known_fault(fault: Finding, settings: Settings) -> bool:
    """True if the probed collective is known to fail on the entry's backend."""
    entry = settings.known.of_fault(fault)
    return entry is not None and settings.expects(entry)


def close_pool(config: pytest.Config) -> None:
    """Ends every rank of this process's pools, or the server that waits for a pool."""
    server = config.stash.get(_server_key, None)
    if server is not None:
        config.stash[_server_key] = None
        server.close()
    for key in (_pool_key, _gloo_key):
        pool = config.stash.get(key, None)
        if pool is not None:
            del config.stash[key]
            pool.close()


def end_orderly_on_sigterm(config: pytest.Config) -> None:
    """Makes SIGTERM end the run as Ctrl-C in a terminal does, instead of leaving ranks behind.

    It acts only in the main thread, and only if SIGTERM has no other handler.  xdist's workers get
    the signal that a terminal would have sent: without it execnet first waits 5 s for them.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    signal.signal(signal.SIGTERM, lambda number, frame: _interrupt(config))
    config.add_cleanup(lambda: _restore(signal.SIGTERM))


def remember_worker(config: pytest.Config, node: Any) -> None:
    """Tells of an xdist worker that this process controls."""
    config.stash.setdefault(_workers_key, []).append(node)


def _interrupt(config: pytest.Config) -> NoReturn:
    for node in config.stash.get(_workers_key, []):
        process = getattr(getattr(node.gateway, "_io", None), "popen", None)  # from execnet 2.1; older releases wait
        if process is not None:
            process.send_signal(signal.SIGINT)
    raise KeyboardInterrupt("SIGTERM")


def _restore(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_DFL)
