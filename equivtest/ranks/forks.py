"""Tests if a process that is forked from this process can run a backward on a device.

Once the autograd engine has started a thread in this process, torch raises for each backward in a fork of this process.
The first backward of a process starts a thread for each device except the CPU, also for a vendor's device.  A backward
that calls another backward about sixty levels deep starts a thread as well.  Source: Engine::start_device_threads and
Engine::add_thread_pool_task of torch/csrc/autograd/engine.cpp (2.13.0).

If this process has initialized an accelerator, the accelerator raises in a fork of this process.  Source: "CUDA in
multiprocessing" of torch's notes "Multiprocessing best practices", and _lazy_init of torch/cuda/__init__.py (2.13.0).
"""

from __future__ import annotations

import os
import signal
from typing import NoReturn

from equivtest.base import limits
from equivtest.ranks.failure import describe_exception

_DONE = "done"


def why_forks_fail(device: str) -> str:
    """Forks this process and lets the fork run a backward. Returns the reason why that fails, or '' if it works.

    The reason includes the number of threads of this process.  If the fork hangs, a timer in the fork kills it after
    limits.FORK_S. The timer is in the fork because this process may end first.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        _try_backward(write, device)
    os.close(write)
    with open(read, "rb") as pipe:
        said = pipe.read().decode()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if said == _DONE:
        return ""
    return f"{said or _ended(code)}; {_num_threads()} in the process it was forked from"


def _try_backward(write: int, device: str) -> NoReturn:
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        signal.setitimer(signal.ITIMER_REAL, limits.FORK_S)
        os.write(write, _run_backward(device).encode())
    finally:
        os._exit(0)


def _run_backward(device: str) -> str:
    import torch

    try:
        x = torch.ones(2, 2, device=device, requires_grad=True)
        torch.autograd.backward((x @ x).sum())
    except Exception as error:  # from torch or from a vendor's module
        kind, text, _ = describe_exception(error)
        return f"{kind}: {text}"
    return _DONE


def _ended(code: int) -> str:
    if code == -signal.SIGALRM:
        return f"it had no end within {limits.FORK_S:g} s"
    return f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"it exited with code {code}"


def _num_threads() -> str:
    import psutil

    number = psutil.Process().num_threads()
    return f"{number} thread{'s' * (number != 1)}"
