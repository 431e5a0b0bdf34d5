"""The example of a vendor's backend: MPI under a process group in Python."""

from __future__ import annotations

import socket
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec

import pytest

from equivtest.families.collectives.case import CALLS, CollectivesCase
from equivtest.ranks.backend import Backend
from equivtest.ranks.pool import Pool
from equivtest.verdicts.judging import judge
from examples.mpi_backend.pmi import Job
from examples.mpi_backend.work import Work, _begun, begun, no_result


def asked(job: Job, *lines: str) -> list[str]:
    """Returns the answers to a process that sends these lines."""
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=job.serve, args=(theirs,))
    thread.start()
    with ours, ours.makefile("r") as answers:
        ours.sendall("".join(f"{line}\n" for line in lines).encode())
        ours.shutdown(socket.SHUT_WR)
        found = answers.read().splitlines()
    thread.join()
    return found


class Memory:
    """Memory for MPI's results."""


class Request:
    """A request of MPI, which ends on command."""

    is_over = False

    def Test(self) -> bool:
        return self.is_over


def test_memory_of_a_call_without_a_wait_is_kept_until_mpi_ends() -> None:
    request, memory = Request(), Memory()
    is_kept = weakref.ref(memory)
    begun(Work([request], no_result, [], memory))
    del memory

    begun(Work([], no_result, [], None))
    assert is_kept()

    request.is_over = True
    begun(Work([], no_result, [], None))
    assert not is_kept()


def test_memory_of_a_call_that_was_waited_for_is_not_kept() -> None:
    memory = Memory()
    is_kept = weakref.ref(memory)
    work = begun(Work([], no_result, [], memory))
    del memory

    work.wait()

    assert not is_kept()
    assert not _begun


def test_process_that_joins_an_mpi_job_gets_its_rank_and_the_world_size() -> None:
    hello = asked(Job("of a test", 4), "cmd=initack pmiid=2", "cmd=init pmi_version=1 pmi_subversion=1")

    assert hello[1:3] == ["cmd=set size=4", "cmd=set rank=2"]
    assert hello[-1] == "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"


def test_value_stored_by_one_process_is_read_after_a_barrier() -> None:
    """The first waits there for the second, so that it has not read too early."""
    job = Job("of a test", 2)
    gets = ["cmd=barrier_in", "cmd=get kvsname=x key=theirs", "cmd=get kvsname=x key=nobody's"]

    with ThreadPoolExecutor() as threads:
        first = threads.submit(asked, job, "cmd=put kvsname=x key=mine value=1 a=b", *gets)
        second = threads.submit(asked, job, "cmd=put kvsname=x key=theirs value=2 c=d", *gets)

    assert first.result() == second.result()
    assert first.result()[2:] == ["cmd=get_result rc=0 msg=- value=2 c=d", "cmd=get_result rc=-1 msg=- value="]


@pytest.mark.ranks
@pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_every_collective_of_the_mpi_backend_is_right() -> None:
    """Runs if mpi4py and an MPI are installed, which no test needs; torch has monitored barriers only on gloo."""
    names = tuple(name for name in CALLS if name != "monitored_barrier")
    case = CollectivesCase(world_size=2, collectives=names, numels=(3, 8), values=(("special", 0),))
    with Pool(Backend("mpi4py", imports=("examples.mpi_backend",))) as pool:
        for waits in ("at_once", "backwards"):
            verdicts = judge("collectives", replace(case, waits=waits), pool)
            assert {verdict.kind for verdict in verdicts} == {"holds"}, verdicts
