"""Starts the rank processes of one world size, sends requests to them, waits for replies, and ends them."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from equivtest.base import limits
from equivtest.cases.case import Case, to_data
from equivtest.errors import BrokenSetup, HostLost
from equivtest.ranks.backend import Backend
from equivtest.ranks.first_cause import first_cause
from equivtest.ranks.inbox import Inbox
from equivtest.ranks.launch import VISIT
from equivtest.ranks.messages import (
    BY_MESSAGE,
    NO_FAULT,
    START_ID,
    Fault,
    Probe,
    Start,
    Stop,
    Support,
    Visit,
    encode_request,
    import_path,
)
from equivtest.ranks.observe.notes import file_of
from equivtest.ranks.process import Ending, Launcher, RankProcess
from equivtest.ranks.reply import Reply
from equivtest.ranks.scratch import Scratch, temporary_roots
from equivtest.ranks.support import Finding, conclude


class World:
    """All ranks of one process group. After the first failure the ranks accept no requests: see `wait`.

    Args:
        server: Launcher that starts the ranks.
        visit: 'package.module:function' that ranks call as visit(subject, case, backend).
        environment: Variables that every rank has besides the parent's.

    Raises:
        BrokenSetup: a rank cannot start. The message has the traceback of the first rank that cannot.
        HostLost: a rank lost its host before the rank had started.

    Attributes:
        cut_off: The reason why ranks lost their host in the last visit, or ''. The subject is not to blame for the loss
            of a host.
    """

    def __init__(
        self,
        world_size: int,
        backend: Backend,
        server: Launcher,
        *,
        visit: str = VISIT,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.world_size = world_size
        self._ended = False
        self._ids = itertools.count(START_ID + 1)
        self._noun = "rank"
        self._server = server
        self._scratch: list[Scratch] = []
        self._notes = ""
        self._begun: set[int] = set()  # visits without a call of `wait` so far
        self._last: tuple[str, Case] | None = None  # subject and case of the last visit
        self._ranks: list[RankProcess] = []
        self.cut_off = ""
        try:
            if server.is_local:
                self._scratch.append(Scratch())
                self._scratch.append(Scratch(temporary_roots()))
            self._start(backend, visit, environment or {})
        except BaseException:
            self.kill()
            raise

    def _start(self, backend: Backend, visit: str, environment: Mapping[str, str]) -> None:
        added = {os.fsencode(name): os.fsencode(value) for name, value in environment.items()}
        path = [os.fsencode(entry) for entry in import_path()]
        for rank, process in enumerate(self._server.fork_ranks(self.world_size, [each.path for each in self._scratch])):
            self._ranks.append(process)
            start = Start(
                rank=rank,
                world_size=self.world_size,
                backend=backend,
                visit=visit,
                scratch=str(process.place.scratch),
                environment=list({**process.place.environment, **added}.items()),
                sys_path=path,
                directory=os.fsencode(os.getcwd()),
                local_rank=process.place.local_rank,
                store=process.place.store,
            )
            with contextlib.suppress(OSError):  # it is gone, which `wait` will notice
                process.channel.send(encode_request(start))
        cause = first_cause(self._await_replies(START_ID, self._start_limit_s(), limits.GRACE_S))
        if cause is not None:
            self._with_losses([])
            raise (HostLost if self.cut_off else BrokenSetup)(
                f"rank {cause.rank} of {self.world_size} cannot start on backend {backend.name!r}, device "
                f"{backend.device!r}: {cause.error_type or cause.outcome}: {cause.error_text}\n{cause.detail}"
            )

    def _start_limit_s(self) -> float:
        ready = self._server.ready
        executes = ready is not None and ready.start == "spawn"
        return limits.START_S + (limits.EXECUTE_S * self.world_size if executes else 0.0)

    @property
    def alive(self) -> bool:
        """True if the world accepts requests. If so, no failure has happened so far, and every process runs."""
        return not self._ended and not any(process.wait(0.0) for process in self._ranks)

    @property
    def deaths(self) -> list[str]:
        """One line for each rank that ended after it had answered all requests.

        The list is empty if this process ended the ranks. It is also empty if a host was lost, because a rank on
        another host may end for that reason too.
        """
        if self._ended or self._begun or not self._server.alive or self.alive:
            return []
        try:
            endings = self._endings()
        except BrokenSetup:  # the hub is gone, which another call reports
            return []
        if any(ending.cut_off for ending in endings.values()):
            return []
        last = "after it had answered" + (f", last {self._last[0]} on {self._last[1]!r}" if self._last else "")
        where = {rank: self._ranks[rank].place.where for rank in endings}
        who = {rank: f"rank {rank} of {self.world_size}" + f" ({where[rank]})" * bool(where[rank]) for rank in endings}
        return [f"{who[rank]} {ending} {last}" for rank, ending in endings.items()]

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._ranks]

    def start_visit(self, subject: str, case: Case, fault: Fault = NO_FAULT, watch: str = "") -> int:
        """Makes every rank run `subject` on `case`. Returns the request's id, the argument of `wait`.

        Args:
            watch: Folder in which ranks note their operations and collectives. If '', there are no notes.
        """
        request_id = next(self._ids)
        self._noun = "process" if case.members else "rank"
        self._begun.add(request_id)
        self._last = subject, case
        self._notes = watch
        where = watch
        if watch and not self._server.is_local:
            where = BY_MESSAGE
            for rank in range(self.world_size):  # left by an earlier visit that lost a host
                file_of(Path(watch), rank).unlink(missing_ok=True)
        self._send(Visit(request_id, subject, type(case).__module__, to_data(case), fault, where))
        return request_id

    def wait(self, request_id: int, limit_s: float, grace_s: float, *, keep_if_all_raised: bool) -> list[Reply]:
        """Waits for the replies to a request of `start_visit`. Returns one reply per rank, in rank order.

        The method never waits for ever. If a rank is silent `limit_s` seconds from now, or `grace_s` seconds after the
        first failure, the rank has timed out. After any failure all ranks are ended. Their directories may still exist
        when the method returns. `kill` waits for the removal of the directories.

        Args:
            keep_if_all_raised: True if the ranks stay alive after each of them raised within `grace_s`, and a probe
                shows that they are at the same point.
        """
        self._begun.discard(request_id)
        replies = self._await_replies(request_id, limit_s, grace_s)
        if first_cause(replies) is None:
            all_declined = {reply.outcome for reply in replies} - {"not_in_mesh"} == {"declined"}
            if all_declined and not self._is_in_step():  # each may have declined at another point
                self._end(0.0, aside=True)
            return replies
        replies = self._with_losses(replies)
        all_raised = all(reply.outcome in ("raised", "misused", "not_in_mesh") for reply in replies)
        if not (keep_if_all_raised and all_raised and self._is_in_step()):
            self._end(0.0, aside=True)
        return replies

    def probe(self, collective: str, dtype: str, limit_s: float) -> Finding:
        """Runs one small collective with a known result on all ranks, and returns the finding on the collective.

        The ranks stay alive if they are still at the same point afterwards.

        Raises:
            HostLost: a rank lost its host, so the probe shows nothing.
        """
        request_id = next(self._ids)
        self._noun = "rank"
        self._send(Support(request_id, collective, dtype))
        replies = self.wait(request_id, limit_s, limits.PROBE_GRACE_S, keep_if_all_raised=True)
        if self.cut_off:
            raise HostLost(self.cut_off)
        return conclude(collective, dtype, replies)

    def stop(self) -> None:
        self._send(Stop())
        self._end(limits.STOP_S)

    def kill(self) -> None:
        """Ends the ranks immediately. A second call only waits for the removal of the directories."""
        self._end(0.0)

    def _is_in_step(self) -> bool:
        """True if all ranks take part in a collective and get the right value. Then the ranks are at the same point."""
        request_id = next(self._ids)
        self._send(Probe(request_id))
        replies = self._await_replies(request_id, limits.PROBE_S, limits.GRACE_S)
        return all(reply.outcome == "answered" for reply in replies)

    def _await_replies(self, request_id: int, limit_s: float, grace_s: float) -> list[Reply]:
        inbox = Inbox(self._ranks, request_id, self._server, grace_s, self._noun, self._notes)
        return inbox.await_replies(limit_s)

    def _with_losses(self, replies: Sequence[Reply]) -> list[Reply]:
        lost = {rank: ending for rank, ending in self._endings().items() if ending.cut_off}
        self.cut_off = next((ending.cut_off for ending in lost.values()), "")
        return [
            replace(reply, outcome="lost", error_text=str(ending), detail=str(ending), at_s=ending.at_s)
            if (ending := lost.get(reply.rank)) is not None
            else reply
            for reply in replies
        ]

    def _endings(self) -> dict[int, Ending]:
        """Returns how ranks ended, once each host's state is known. Peers may notice a lost host earlier."""
        self._server.await_certainty(self._ranks)
        ended = {rank: process for rank, process in enumerate(self._ranks) if process.wait(0.0)}
        return {rank: process.ending(time.monotonic()) for rank, process in ended.items()}

    def _send(self, request: Visit | Probe | Support | Stop) -> None:
        message = encode_request(request)
        for process in self._ranks:
            with contextlib.suppress(OSError):  # it is gone or hangs, which `wait` will notice
                process.channel.send(message)

    def _end(self, limit_s: float, *, aside: bool = False) -> None:
        """Waits `limit_s` for the ranks to end, kills the remaining ranks, and removes the ranks' directories.

        Args:
            aside: If True, the method starts the removal and does not wait for its end, because a hung disk must not
                delay a reply.
        """
        deadline_s = time.monotonic() + limit_s
        for process in self._ranks:
            if not process.wait(deadline_s - time.monotonic()) or not process.ending(deadline_s).is_certain:
                process.kill()
        for process in self._ranks:
            process.wait(limits.STOP_S)
            process.close()
        self._ranks = []
        for scratch in self._scratch:
            if aside:
                scratch.remove_aside()
            else:
                scratch.remove()
        self._ended = True
