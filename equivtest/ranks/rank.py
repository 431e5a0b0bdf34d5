"""Runs a rank process, which joins the process group and then answers its parent's requests, one after the other."""

from __future__ import annotations

import importlib
import io
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from equivtest.base import limits
from equivtest.base.refusal import is_missing
from equivtest.base.users_code import files_imported_first, imported_after, users_files
from equivtest.cases.case import Case, from_data
from equivtest.errors import Misuse, NotSupported, Unsupported
from equivtest.ranks.backend import Backend, choose_device
from equivtest.ranks.channel import Channel
from equivtest.ranks.failure import describe_exception, in_one_line
from equivtest.ranks.gloo import let_senders_finish, use_few_workers
from equivtest.ranks.messages import (
    BY_MESSAGE,
    START_ID,
    Probe,
    Serve,
    Start,
    Stop,
    Support,
    Task,
    Visit,
    decode_request,
)
from equivtest.ranks.observe import faults
from equivtest.ranks.observe.notes import file_of
from equivtest.ranks.probe import probe_collective, probe_sum
from equivtest.ranks.reply import Answer, Outcome, Reply
from equivtest.ranks.stacks import output_file, stacks_file
from equivtest.ranks.surroundings import Output, die_with_parent, enter, write_stacks_on_signal
from equivtest.ranks.wire import encode_notes, encode_reply

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

Answers = tuple[Answer, ...] | None
"""The answers to a visit, one per draw; None from a rank that takes no part."""

VisitFunction = Callable[[str, Case, Backend], Answers]


def live(channel: Channel) -> int:
    """Serves the parent at the other end of `channel` until the parent sends `Stop`. Returns the exit code.

    Every exception of a subject, such as SystemExit, becomes a reply.
    """
    try:
        store = None
        start = decode_request(channel.receive())
        if isinstance(start, Serve):
            store = serve_store(start.host)
            channel.send(str(store.port).encode())
            start = decode_request(channel.receive())
        assert isinstance(start, Start)
        _serve(channel, start, store)
    except EOFError:
        return 0
    except BaseException:  # Ctrl-C, or a defect of this module: seen in the rank's output
        traceback.print_exc()
        return 1
    return 0


def _serve(channel: Channel, start: Start, store: Any) -> None:
    scratch = Path(start.scratch)
    output = Output(output_file(scratch, start.rank))
    die_with_parent(channel, output)
    write_stacks_on_signal(stacks_file(scratch, start.rank))
    rank = Rank(start, channel)
    channel.send(rank.answer(START_ID, lambda: rank.join(store)))
    while not isinstance(request := decode_request(channel.receive()), Stop):
        assert isinstance(request, Task)
        output.clear()
        channel.send(rank.answer(request.id, lambda task=request: rank.work(task)))  # type: ignore[misc]
    dist.destroy_process_group()


class Rank:
    """The state of one rank process, and its methods to answer requests.

    Args:
        channel: Connection to the parent. If the parent is on another host, a watched rank also sends its notes over
            this connection.
    """

    def __init__(self, start: Start, channel: Channel | None = None) -> None:
        self._start = start
        self._channel = channel
        self._scratch = Path(start.scratch)
        self._shared = self._scratch if start.store is None else None
        self._device = torch.device("cpu")
        self._visit: VisitFunction | None = None
        self._last_module = next(reversed(sys.modules))  # before the first request
        self._files = files_imported_first()
        self._modules: tuple[str, ...] = ()

    def join(self, store: Any = None) -> Answers:
        """Imports the backend's modules and joins the process group of the world. The result is empty.

        Args:
            store: Store that this rank serves for ranks on several hosts. None if this rank serves no store.
        """
        start = self._start
        enter(start)
        torch.set_num_threads(1)
        for module in start.backend.imports:
            importlib.import_module(module)
        self._device = choose_device(start.backend, start.local_rank)
        use_few_workers()
        let_senders_finish()
        dist.init_process_group(
            self._backend_name(),
            store=store or self._open_store(),
            rank=start.rank,
            world_size=start.world_size,
            timeout=timedelta(seconds=limits.COLLECTIVE_S),
        )
        self._visit = _import_function(start.visit)
        return ()

    def _open_store(self) -> Any:
        """Opens a file as the store if all ranks are on one host, and otherwise the TCP store of rank 0."""
        if self._start.store is None:
            return dist.FileStore(str(self._scratch / "rendezvous"), self._start.world_size)  # type: ignore[attr-defined]
        host, port = self._start.store
        limit = timedelta(seconds=limits.START_S)
        return dist.TCPStore(host, port, is_master=False, timeout=limit)  # type: ignore[attr-defined]

    def _backend_name(self) -> str:
        backend = self._start.backend
        return faults.register(backend.name, backend.device) if backend.faults else backend.name

    def work(self, task: Task) -> Answers:
        """Carries out one request, which is to run the subject on a case or to probe a collective.

        Returns:
            The tensors that the subject returned, or None if the rank is in no mesh of the case. If the request is a
            probe, ().

        Raises:
            Exception: any exception of the subject.
        """
        if isinstance(task, Probe):
            probe_sum(task.id, self._device)
            return ()
        if isinstance(task, Support):
            probe_collective(task.collective, getattr(torch, task.dtype), self._device)
            return ()
        assert self._visit is not None
        faults.plan(task.fault)
        with faults.watched(self._open_notes(task.watch)):
            return self._visit(task.subject, _read_case(task), self._start.backend)

    def _open_notes(self, watch: str) -> IO[bytes] | None:
        if watch == BY_MESSAGE:
            assert self._channel is not None
            return SentNotes(self._channel)
        return file_of(Path(watch), self._start.rank).open("wb") if watch else None

    def answer(self, request_id: int, work: Callable[[], Answers]) -> bytes:
        begun_s = time.monotonic()
        try:
            answers = work()
            now_s = time.monotonic()
            self._note_imports()
            outcome: Outcome = "not_in_mesh" if answers is None else "answered"
            reply = Reply(
                rank=self._start.rank,
                outcome=outcome,
                answers=answers or (),
                at_s=now_s,
                busy_s=now_s - begun_s,
                imported=self._files,
                modules=self._modules,
            )
            return encode_reply(request_id, reply, self._shared)
        except BaseException as error:  # SystemExit too, and CheckpointException of torch is no Exception
            return encode_reply(request_id, self._failed(error, begun_s), self._shared)

    def _note_imports(self) -> None:
        new = imported_after(self._last_module)
        self._files = (*files_imported_first(), *users_files(new))
        self._modules = tuple(sorted(name for name in new if name.startswith("equivtest.")))

    def _failed(self, error: BaseException, begun_s: float) -> Reply:
        now_s = time.monotonic()
        self._note_imports()
        outcome: Outcome = "misused" if isinstance(error, Misuse) else "raised"
        lacking: tuple[str, ...] = ()
        if isinstance(error, Unsupported):
            outcome, lacking = "not_supported", error.lacking
        elif isinstance(error, NotSupported):
            outcome = "declined"
        error_type, error_text, detail = describe_exception(error)
        if is_missing(error, torch.__version__):
            outcome, error_text = "not_supported", f"not supported by torch {torch.__version__}: {error_text}"
        if outcome == "declined":
            error_text = in_one_line(error_text) or f"{error_type} without a reason"
        return Reply(
            rank=self._start.rank,
            outcome=outcome,
            error_type=error_type,
            error_text=error_text,
            detail=detail,
            at_s=now_s,
            busy_s=now_s - begun_s,
            lacking=lacking,
            imported=self._files,
            modules=self._modules,
        )


class SentNotes(io.BytesIO):
    """A file object that sends each written note to the parent as a message, and stores nothing."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel
        self._size_bytes = 0

    def write(self, part: Buffer, /) -> int:
        notes = bytes(part)
        self._channel.send(encode_notes(notes))
        self._size_bytes += len(notes)
        return len(notes)

    def tell(self) -> int:
        return self._size_bytes


def serve_store(host: str) -> Any:
    limit = timedelta(seconds=limits.START_S)
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)  # type: ignore[attr-defined]


def _read_case(task: Visit) -> Case:
    if task.case_module != "__main__":
        importlib.import_module(task.case_module)
    return from_data(task.case)


def _import_function(name: str) -> VisitFunction:
    module, _, function = name.partition(":")
    found: VisitFunction = getattr(importlib.import_module(module), function)
    return found


def main(fd: int) -> None:
    """Runs a rank on the socket `fd` and ends the process."""
    import socket

    code = live(Channel(socket.socket(fileno=fd)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # skips exit handlers of the server and of a subject
