"""Keeps the one pool of rank processes of a pytest process, from its first use to the end of the run."""

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
"""A server for ranks that was started before the pool."""
_gloo_key = pytest.StashKey["Pool"]()
_hub_key = pytest.StashKey["RunHub"]()
_slots_key = pytest.StashKey[dict[str, int]]()
_workers_key = pytest.StashKey[list[Any]]()


def pool_of(config: pytest.Config) -> Pool:
    """Returns this process's pool of ranks.  First replaces ranks that have run the programs of another test file."""
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
    """Starts the server that forks the pool's ranks, so that it imports torch while this process collects tests."""
    _end_orderly(config)
    from equivtest.ranks.launch import Server, preloads

    backend = settings_of(config).make_backend()
    if not hub_path(config):
        config.stash[_server_key] = Server(backend, preloads(), backend.environment)


def _end_orderly(config: pytest.Config) -> None:
    """Makes an xdist worker end when its controller ends, and any other process end its ranks at SIGTERM.

    This function is called before torch is imported, because that import takes seconds.
    """
    if hasattr(config, "workerinput"):
        # The worker's ranks then see its end of their pipes close and end too.  Without this a worker lives for
        # seconds after its controller was killed; so it does with a signal that it may ignore, as SIGHUP under nohup.
        end_with_starter()
    else:
        end_orderly_on_sigterm(config)


def gloo_of(config: pytest.Config) -> Callable[[], Pool] | None:
    """Returns a function that makes a pool of ranks on gloo and the CPU, or None if the run itself uses them."""
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


def code_of_ranks(config: pytest.Config) -> dict[str, str]:
    pools = [config.stash.get(key, None) for key in (_gloo_key, _pool_key)]
    return {file: digest for pool in pools if pool is not None for file, digest in pool.code.items()}


def _running_file(config: pytest.Config) -> str:
    """Returns the path of your test file whose test runs now, or '' for shipped properties and known failures.

    Source: "PYTEST_CURRENT_TEST environment variable" of pytest's documentation (9.0).
    """
    path = config.rootpath / os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
    return str(path) if path.is_file() and not is_shipped(path) else ""


def open_hub(config: pytest.Config) -> None:
    """Starts to listen for ranks on other hosts if --listen is given.  Raises Misuse or BrokenSetup if that fails."""
    address = settings_of(config).listen
    if address is not None:
        from equivtest.ranks.hosts.run_hub import RunHub
        from equivtest.ranks.hosts.secret import read_secret

        config.stash[_hub_key] = RunHub(address, read_secret())


def _hub_of(config: pytest.Config) -> RunHub | None:
    return config.stash.get(_hub_key, None)


def hub_path(config: pytest.Config) -> str:
    """Returns the path of the socket of the run's hub, which this process or its controller has started, or ''."""
    hub = _hub_of(config)
    return str(getattr(config, "workerinput", {}).get("equivtest_hub", "")) if hub is None else hub.path


def await_hosts(config: pytest.Config, tell: Callable[[str], object]) -> None:
    """Prints the command that connects another host to the run's hub, and waits until all slots are connected.

    Raises:
        BrokenSetup: the slots do not connect in time.
        Misuse: there are too few slots for the run's world sizes.
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
            f"--world-sizes: {largest} ranks are needed, but {num} are connected: start torchrun with more, or "
            f"pass {sizes}"
        )


def hosts_of(config: pytest.Config) -> dict[str, int]:
    return config.stash.get(_slots_key, {})


def host_events(config: pytest.Config) -> list[str]:
    """Returns one line for each slot on another host that was lost, refused or silent."""
    hub = _hub_of(config)
    return [] if hub is None else hub.events()


def close_hub(config: pytest.Config) -> None:
    """Ends the hub, if there is one, so that other hosts know that the run is over."""
    hub = _hub_of(config)
    if hub is not None:
        del config.stash[_hub_key]
        hub.close()


def take_faults(config: pytest.Config) -> tuple[BackendFault, ...]:
    """Returns the backend's faults, except known faults, that this process's pool has found since the last call.

    Ranks that ended between two cases count as faults too, because a mistake in the backend, such as in one of its
    threads, may end a process some time after the case that caused it.
    """
    pool = config.stash.get(_pool_key, None)
    if pool is None:
        return ()
    settings = settings_of(config)
    faults = [fault for fault in pool.take_faults() if not is_known_fault(fault, settings)]
    deaths = [BackendFault("", text) for text in pool.take_deaths()]
    return (*(BackendFault(fault.collective, str(fault)) for fault in faults), *deaths)


def is_known_fault(fault: Finding, settings: Settings) -> bool:
    entry = settings.known.of_fault(fault)
    return entry is not None and settings.expects(entry)


def close_pool(config: pytest.Config) -> None:
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

    This has an effect only in the main thread, and only if SIGTERM has no other handler.  A terminal sends Ctrl-C to
    the workers of xdist too.  Without that signal execnet first waits 5 s for the workers.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    signal.signal(signal.SIGTERM, lambda number, frame: _interrupt(config))
    config.add_cleanup(lambda: _restore(signal.SIGTERM))


def remember_worker(config: pytest.Config, node: Any) -> None:
    """Records an xdist worker, so that SIGTERM can interrupt it."""
    config.stash.setdefault(_workers_key, []).append(node)


def _interrupt(config: pytest.Config) -> NoReturn:
    for node in config.stash.get(_workers_key, []):
        process = getattr(getattr(node.gateway, "_io", None), "popen", None)  # from execnet 2.1; older releases wait
        if process is not None:
            process.send_signal(signal.SIGINT)
    raise KeyboardInterrupt("SIGTERM")


def _restore(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_DFL)
