"""The one pool of a pytest process: made when first needed, closed however the run ends."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from equivtest.handover import BackendFault
from equivtest.options import settings_of

if TYPE_CHECKING:
    from equivtest.ranks.pool import Pool

_pool_key = pytest.StashKey["Pool"]()
_workers_key = pytest.StashKey[list[Any]]()
_PR_SET_PDEATHSIG = 1  # of prctl(2)


def pool_of(config: pytest.Config) -> Pool:
    """This process's pool, on the backend that the options name."""
    if _pool_key not in config.stash:
        if hasattr(config, "workerinput"):
            _end_with_controller()  # first: what follows imports torch for seconds
        else:
            end_orderly_on_sigterm(config)
        from equivtest.ranks.pool import Pool

        config.stash[_pool_key] = Pool(settings_of(config).make_backend())
    return config.stash[_pool_key]


def take_faults(config: pytest.Config) -> tuple[BackendFault, ...]:
    """What this process's pool has found wrong with the backend since the last call."""
    pool = config.stash.get(_pool_key, None)
    return tuple(BackendFault(fault.collective, str(fault)) for fault in pool.take_faults()) if pool else ()


def close_pool(config: pytest.Config) -> None:
    """Ends every rank of this process's pool, if there is one."""
    pool = config.stash.get(_pool_key, None)
    if pool is not None:
        del config.stash[_pool_key]
        pool.close()


def end_orderly_on_sigterm(config: pytest.Config) -> None:
    """Makes SIGTERM end the run as Ctrl-C in a terminal does, instead of leaving ranks behind.

    Only in the main thread, and only where nobody else handles the signal.  xdist's workers get
    what a terminal would have sent them: without it execnet first waits 5 s for what they do.
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
        process = getattr(getattr(node.gateway, "_io", None), "popen", None)  # of execnet 2.1; elsewhere it waits
        if process is not None:
            process.send_signal(signal.SIGINT)
    raise KeyboardInterrupt("SIGTERM")


def _restore(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_DFL)


def _end_with_controller() -> None:
    """Asks the kernel to end this xdist worker when the controller dies, however it dies.

    The worker's ranks then see its end of their pipes close and end too.  Without this a worker
    lives for seconds after its controller was killed; so it does with a signal that it may ignore, as
    SIGHUP under nohup.  Source: prctl(2), Linux.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
