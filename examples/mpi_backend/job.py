"""Makes one MPI job of the processes of a torch world; each joins when it makes its first group.

torchrun, a harness or a notebook starts the processes and knows nothing of MPI.  MPI_Comm_connect between them fails
(MPICH 5.0.2: "Local and remote groups in MPI_Intercomm_create must not contain the same processes"), as each of them is
process 0 of a separate job.  So the first rank starts a server for the moment of joining (`pmi`), and MPI_Init finds
in the environment what mpiexec would have set.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

SERVER = Path(__file__).with_name("pmi.py")
SHARED = "/dev/shm/mpich_shm_"
"""Prefix of MPICH's shared memory."""


_joined: list[Any] = []


def world_of(options: Any) -> Any:
    """Returns COMM_WORLD, joined by all ranks of the world; their first call is for the group of all of them.

    Raises:
        NotImplementedError: they are on several hosts.
    """
    if _joined:
        return _joined[0]
    store, rank, size = options.store, options.group_rank, options.group_size
    store.set(f"host {rank}", socket.gethostname())
    hosts = {store.get(f"host {number}") for number in range(size)}
    if len(hosts) > 1:
        raise NotImplementedError("this example does not support ranks on several hosts")
    with contextlib.ExitStack() as joining:
        if rank == 0:
            command = [sys.executable, "-I", str(SERVER), uuid.uuid4().hex, str(size)]
            server = joining.enter_context(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )
            )
            assert server.stdout is not None and server.stdin is not None
            store.set("port", server.stdout.readline().strip())
            joining.callback(server.stdin.close)
        environment = {"PMI_PORT": f"127.0.0.1:{store.get('port').decode()}", "PMI_ID": str(rank)}
        world = _initialized(environment)
        world.Barrier()  # the server is needed no more, nor the names of what all have mapped
    for path in _mapped():
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    _joined.append(world)
    return world


def _initialized(environment: dict[str, str]) -> Any:
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False  # MPI_Finalize waits for ranks that may have been killed
    os.environ.update(environment)
    try:
        from mpi4py import MPI

        MPI.Init_thread(MPI.THREAD_MULTIPLE)  # a backward runs in another thread
    finally:
        for name in environment:
            del os.environ[name]
    return MPI.COMM_WORLD


def _mapped() -> set[Path]:
    """MPICH's shared memory that this process has mapped: MPI_Finalize would remove it."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {Path(line[line.index(SHARED) :]) for line in lines if SHARED in line and "(deleted)" not in line}
