"""The life of a rank process: join the group, answer one request after the other."""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from equivtest import limits
from equivtest.errors import Misuse, Unsupported
from equivtest.kit.case import Case, from_data
from equivtest.ranks import faults
from equivtest.ranks.backend import Backend, choose_device
from equivtest.ranks.channel import Channel
from equivtest.ranks.failure import describe_exception
from equivtest.ranks.gloo import let_senders_finish, use_few_workers
from equivtest.ranks.messages import START_ID, Probe, Start, Stop, Support, Task, Visit, decode_request
from equivtest.ranks.probe import probe_collective, probe_sum
from equivtest.ranks.reply import Answer, Outcome, Reply
from equivtest.ranks.surroundings import Output, die_with_parent, enter, write_stacks_on_signal
from equivtest.ranks.wire import encode_reply

Answers = tuple[Answer, ...] | None
"""One per draw; None from a rank that takes no part."""

VisitFunction = Callable[[str, Case, Backend], Answers]


def live(channel: Channel) -> int:
    """Serves the parent at the other end of `channel` until it says stop; gives the exit code.

    Whatever a subject raises becomes a reply.  SystemExit and the like end the process, as
    they would without the harness.
    """
    try:
        start = decode_request(channel.receive())
        assert isinstance(start, Start)
        _serve(channel, start)
    except EOFError:
        return 0
    except SystemExit as end:
        return _exit_code(end)
    except BaseException:  # KeyboardInterrupt, or a defect of this module: seen in the rank's output
        traceback.print_exc()
        return 1
    return 0


def _exit_code(end: SystemExit) -> int:
    """What the interpreter makes of a SystemExit."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)  # noqa: T201  (as the interpreter does)
    return 1


def _serve(channel: Channel, start: Start) -> None:
    scratch = Path(start.scratch)
    output = Output(scratch / f"output-{start.rank}")
    die_with_parent(channel, output)
    write_stacks_on_signal(scratch / f"stacks-{start.rank}")
    rank = Rank(start)
    channel.send(rank.answer(START_ID, rank.join))
    while not isinstance(request := decode_request(channel.receive()), Stop):
        assert isinstance(request, Task)
        output.clear()
        channel.send(rank.answer(request.id, lambda task=request: rank.work(task)))  # type: ignore[misc]
    dist.destroy_process_group()


class Rank:
    """One rank of a world: what it is asked, it answers."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._scratch = Path(start.scratch)
        self._device = torch.device("cpu")
        self._visit: VisitFunction | None = None

    def join(self) -> Answers:
        """Imports what the backend needs, then joins the process group of the world."""
        start = self._start
        enter(start)
        torch.set_num_threads(1)
        for module in start.backend.imports:
            importlib.import_module(module)
        self._device = choose_device(start.backend, start.rank)
        use_few_workers()
        let_senders_finish()
        dist.init_process_group(
            self._backend_name(),
            store=dist.FileStore(str(self._scratch / "rendezvous"), start.world_size),  # type: ignore[attr-defined]
            rank=start.rank,
            world_size=start.world_size,
            timeout=timedelta(seconds=limits.COLLECTIVE_S),
        )
        self._visit = _import_function(start.visit)
        return ()

    def _backend_name(self) -> str:
        """What to ask torch for."""
        backend = self._start.backend
        return faults.register(backend.name, backend.device) if backend.faults else backend.name

    def work(self, task: Task) -> Answers:
        """Does what a request asks; raises what the subject raises."""
        if isinstance(task, Probe):
            probe_sum(task.id, self._device)
            return ()
        if isinstance(task, Support):
            probe_collective(task.collective, getattr(torch, task.dtype), self._device)
            return ()
        assert self._visit is not None
        faults.plan(task.fault)
        with faults.watched(task.watch, self._start.rank):
            return self._visit(task.subject, _read_case(task), self._start.backend)

    def answer(self, request_id: int, work: Callable[[], Answers]) -> bytes:
        """The reply to one request, as a message."""
        begun_s = time.monotonic()
        try:
            answers = work()
            now_s = time.monotonic()
            outcome: Outcome = "not_in_mesh" if answers is None else "answered"
            reply = Reply(
                rank=self._start.rank, outcome=outcome, answers=answers or (), at_s=now_s, busy_s=now_s - begun_s
            )
            return encode_reply(request_id, reply, self._scratch)
        except Exception as error:  # an arbitrary subject's
            return encode_reply(request_id, self._failed(error, begun_s), self._scratch)

    def _failed(self, error: Exception, begun_s: float) -> Reply:
        now_s = time.monotonic()
        outcome: Outcome = "misused" if isinstance(error, Misuse) else "raised"
        lacking: tuple[str, ...] = ()
        if isinstance(error, Unsupported):
            outcome, lacking = "not_supported", error.lacking
        error_type, error_text, detail = describe_exception(error)
        return Reply(
            rank=self._start.rank,
            outcome=outcome,
            error_type=error_type,
            error_text=error_text,
            detail=detail,
            at_s=now_s,
            busy_s=now_s - begun_s,
            lacking=lacking,
        )


def _read_case(task: Visit) -> Case:
    """The case, once the module of its class is imported."""
    if task.case_module != "__main__":
        importlib.import_module(task.case_module)
    return from_data(task.case)


def _import_function(name: str) -> VisitFunction:
    """The function that 'package.module:function' names."""
    module, _, function = name.partition(":")
    found: VisitFunction = getattr(importlib.import_module(module), function)
    return found


def main(fd: int) -> None:
    """Entry of a rank, forked or executed; never returns."""
    import socket

    code = live(Channel(socket.socket(fileno=fd)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing of the server's, or of a subject's, is to run at exit
