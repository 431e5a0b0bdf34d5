"""Keeps running rank processes for reuse, in one world for each world size.

A world is one process group with its ranks.  Every visit, which is one run of one case on all ranks, goes through a
pool.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import TracebackType

from equivtest.base import limits
from equivtest.base.users_code import digest_of
from equivtest.cases.case import Case
from equivtest.errors import HostLost, Misuse
from equivtest.ranks.backend import Backend
from equivtest.ranks.first_cause import first_cause
from equivtest.ranks.hosts.hub_messages import Config
from equivtest.ranks.hosts.remote import HubServer
from equivtest.ranks.launch import VISIT, Server, preloads
from equivtest.ranks.messages import NO_FAULT, Fault, Ready
from equivtest.ranks.process import Launcher
from equivtest.ranks.reply import Reply
from equivtest.ranks.support import Finding, Support, as_supported, ended_by
from equivtest.ranks.world import World


@dataclass(frozen=True)
class _Outstanding:
    """A visit that was sent to the ranks and not yet answered, or that was not sent because a probe failed.

    Attributes:
        subject, fault, watch: Arguments of `World.start_visit`, to send the visit again.
        known: Results of the probes of collectives in the case's dtypes.
        ended: The failed probe, if the visit was not sent because a probe hung or ended a rank on this world size.
        may_raise: Same as in `Pool.run`.
    """

    subject: str
    case: Case
    fault: Fault | None = None
    watch: str = ""
    world: World | None = None
    request_id: int = 0
    known: tuple[Support, ...] = ()
    ended: Finding | None = None
    may_raise: bool = False

    @property
    def cut_off(self) -> str:
        return "" if self.world is None else self.world.cut_off

    def wait(self, limit_s: float) -> list[Reply]:
        if self.ended is not None:
            return ended_by(self.ended, self.case.num_processes)
        assert self.world is not None
        refuses = bool(self.case.refusal) or any(support.refused for support in self.known)
        grace_s = limits.REFUSAL_GRACE_S if refuses else limits.GRACE_S
        replies = self.world.wait(self.request_id, limit_s, grace_s, keep_if_all_raised=refuses or self.may_raise)
        judged = as_supported(self.known, replies)
        if first_cause(judged) is not None and first_cause(replies) is None:  # ranks may be at different points
            self.world.kill()
        if self.case.sets_up_its_ranks and any(reply.outcome == "declined" for reply in judged):
            self.world.kill()
        if self.case.needs_fresh_ranks:
            self.world.stop()
        return judged


class Pool:
    """Starts, reuses and ends the rank processes of one backend.

    Args:
        max_worlds: Largest number of worlds (process groups with their ranks) that live at once. To make room, the pool
            ends the least recently used world.
        visit: 'package.module:function' that every rank calls for a case: see `World`.
        environment: Variables added to the environment of the ranks, such as GLIBC_TUNABLES.
        beside: An open pool whose server also forks the ranks of this pool, because a server takes seconds to start. Do
            not use this if `environment` has variables that a process reads only at its start.
        hub: Path of the socket of a hub (`equivtest.ranks.hosts.run_hub`) that provides ranks on other hosts. If '',
            the ranks are on this machine.
        server: Server or hub connection that was started earlier for the same backend. The pool ends this server.

    Attributes:
        code: Path of each of your own files that ranks imported -> digest of the file when a rank first named it.

    Raises:
        Misuse: torch does not know the backend, or this machine lacks the device.
    """

    def __init__(
        self,
        backend: Backend | None = None,
        max_worlds: int = limits.MAX_WORLDS,
        *,
        visit: str = VISIT,
        environment: Mapping[str, str] | None = None,
        beside: Pool | None = None,
        hub: str = "",
        server: Launcher | None = None,
    ) -> None:
        self.backend = backend or Backend()
        self._hub = hub
        if not hub:
            self.backend.validate()
        self._max_worlds = max_worlds
        self._visit = visit
        self._environment = {**self.backend.environment, **(environment or {})}
        self._worlds: dict[int, World] = {}  # by world size, the most recently used one last
        self._faulty: World | None = None  # the ranks whose groups can spoil collectives; in addition to `_worlds`
        self._support: dict[tuple[int, str], Support] = {}  # by world size and dtype
        self._deaths: list[str] = []  # not yet returned by `take_deaths`
        self._told: set[Finding] = set()  # faults that `take_faults` has returned
        self.code: dict[str, str] = {}
        self._modules: set[str] = set()  # modules of equivtest that ranks imported after their fork
        self._owner = ""  # owner of the programs that ranks run, see `serve`
        self._pid = os.getpid()
        self._closed = False
        self._lender = beside
        self._server: Launcher = beside._server if beside is not None else server or self._start_server()
        atexit.register(self.close)

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self,
        subject: str,
        case: Case,
        *,
        limit_s: float | None = None,
        may_raise: bool = False,
        fault: Fault | None = None,
    ) -> list[Reply]:
        """Runs `subject` on `case` on all ranks and returns one reply per rank, in rank order.

        Args:
            limit_s: Seconds that the ranks may take. If None, this is limits.CASE_S. On the CPU more than MANY_RANKS
                ranks get more time.
            may_raise: True if the ranks stay alive after each of them raised within limits.GRACE_S. After a case that
                should be refused they stay alive anyway, if each of them raised within limits.REFUSAL_GRACE_S.
            fault: Fault to plant in one collective. With a fault, the case runs in a separate world, whose process
                groups record calls. If None, the case runs on the bare backend.

        Raises:
            BrokenSetup: ranks cannot start.
            Misuse: the pool is closed, or belongs to another process.
        """
        return self._finish(replace(self._begin(subject, case, fault), may_raise=may_raise), limit_s)

    def watch(self, subject: str, case: Case, folder: str, limit_s: float) -> list[Reply]:
        """Runs `case` like `run`, and makes each rank write its operations and collectives to a file in `folder`."""
        return self._finish(self._begin(subject, case, NO_FAULT, folder), limit_s)

    def _finish(self, outstanding: _Outstanding, limit_s: float | None) -> list[Reply]:
        """Waits for the replies to a visit and returns them. Repeats a visit during which ranks lost their host."""
        case = outstanding.case
        limit_s = self.visit_limit_s(limits.CASE_S if limit_s is None else limit_s, case.num_processes)
        try:
            replies = outstanding.wait(limit_s)
            for _ in range(limits.HOST_TRIES - 1):
                if not outstanding.cut_off:
                    break
                again = self._begin(outstanding.subject, case, outstanding.fault, outstanding.watch)
                outstanding = replace(again, may_raise=outstanding.may_raise)
                replies = outstanding.wait(limit_s)
            self._modules.update(*(reply.modules for reply in replies))
            for file in {file for reply in replies for file in reply.imported} - self.code.keys():
                self.code[file] = digest_of(file)
            return replies
        except BaseException:  # Ctrl-C: the ranks may be anywhere
            self._abandon(outstanding)
            raise

    def run_all(
        self, subject: str, cases: Iterable[Case], *, limit_s: float | None = None
    ) -> Iterator[tuple[Case, list[Reply]]]:
        """Yields each case with its replies, in order.

        The ranks already run the next case while the caller judges the replies of a case.
        """
        remaining = iter(cases)
        case = next(remaining, None)
        outstanding = None if case is None else self._begin(subject, case)
        try:
            while outstanding is not None:
                following = next(remaining, None)
                done = outstanding
                replies = self._finish(done, limit_s)
                outstanding = None
                if following is not None:
                    outstanding = self._begin(subject, following)
                yield done.case, replies
        finally:
            if outstanding is not None:
                self._abandon(outstanding)

    @property
    def start(self) -> str:
        """How ranks start: 'forkserver' or 'spawn', or 'auto' before the first rank.

        If 'auto' became 'spawn', the text says why.
        """
        ready = self._server.ready or Ready(self.backend.start)
        return f"{ready.start} (a fork runs no backward: {ready.reason})" if ready.reason else ready.start

    @property
    def faults(self) -> list[Finding]:
        """Findings on the collectives whose probe hung, ended a rank, raised or gave a wrong value."""
        return [fault for known in self._support.values() for fault in known.faults]

    def faults_of(self, case: Case) -> list[Finding]:
        cells = {(case.num_processes, dtype) for dtype in case.dtypes_sent}
        return [fault for fault in self.faults if (fault.world_size, fault.dtype) in cells]

    def take_faults(self) -> list[Finding]:
        new = [fault for fault in self.faults if fault not in self._told]
        self._told.update(new)
        return new

    def take_deaths(self) -> list[str]:
        """Returns one line for each rank that ended between two visits since the last call of this method.

        No reply shows such an end.
        """
        for world in self._worlds.values():
            self._note_deaths(world)
        deaths, self._deaths = self._deaths, []
        return deaths

    def _note_deaths(self, world: World) -> None:
        if deaths := world.deaths:
            self._deaths += deaths
            world.kill()

    def serve(self, owner: str) -> None:
        """Ends all ranks if another owner, such as a test file, used them, and may have changed shared modules."""
        if owner != self._owner:
            self._end_faulty()
            for world_size in list(self._worlds):
                self.renew(world_size)
        self._owner = owner

    def renew(self, world_size: int) -> None:
        world = self._worlds.pop(world_size, None)
        if world is not None:
            self._note_deaths(world)
            world.stop()

    def close(self) -> None:
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        atexit.unregister(self.close)
        try:
            self._end_faulty()
            for world in self._worlds.values():
                world.stop()
        finally:
            self._worlds.clear()
            self._close_server()

    def _begin(self, subject: str, case: Case, fault: Fault | None = None, watch: str = "") -> _Outstanding:
        for _ in range(limits.HOST_TRIES - 1):
            with contextlib.suppress(HostLost):
                return self._try_to_begin(subject, case, fault, watch)
        return self._try_to_begin(subject, case, fault, watch)

    def _try_to_begin(self, subject: str, case: Case, fault: Fault | None, watch: str) -> _Outstanding:
        support = tuple(self.probe(case.num_processes, dtype) for dtype in case.dtypes_sent)
        if ended := self._hung or next((known.fatal for known in support if known.fatal), None):
            return _Outstanding(subject, case, ended=ended)
        if case.needs_fresh_ranks:
            if fault is None:
                self.renew(case.num_processes)
            else:
                self._end_faulty()
        world = self._world(case.num_processes) if fault is None else self._faulty_world(case.num_processes)
        request_id = world.start_visit(subject, case, fault or NO_FAULT, watch)
        return _Outstanding(subject, case, fault, watch, world, request_id, support)

    def probe(self, world_size: int, dtype: str) -> Support:
        """Runs the probe of each collective that has no result yet for `dtype`. Returns all results."""
        known = self._support.setdefault((world_size, dtype), Support(world_size, dtype))
        while not self._hung and (unknown := known.unknown):
            world = self._world(world_size)
            try:
                known.findings[unknown[0]] = world.probe(unknown[0], dtype, self._probe_limit_s(world_size))
            except BaseException:  # Ctrl-C: the ranks may be anywhere
                world.kill()
                raise
        return known

    @property
    def _hung(self) -> Finding | None:
        """The finding of a collective that hung in its probe, or None if no probe hung.

        After such a probe no visit starts, on any world size and in any dtype. Nothing shows which cases call the
        collective, and each such case would use its whole time limit.
        """
        return next((fault for fault in self.faults if fault.kind == "hung"), None)

    def visit_limit_s(self, limit_s: float, world_size: int) -> float:
        """Returns seconds for a visit. Many ranks share the cores of the CPU, so they get more time."""
        if self.backend.device != "cpu":
            return limit_s
        return min(limits.on_many_ranks(limit_s, world_size), limits.COLLECTIVE_S / 2)

    def _probe_limit_s(self, world_size: int) -> float:
        """Returns seconds for a probe. An accelerator's first collective may take as long as starting the ranks."""
        on_cpu = self.backend.device == "cpu"
        return limits.on_many_ranks(limits.PROBE_S, world_size) if on_cpu else limits.START_S

    def _world(self, world_size: int) -> World:
        self._check_usable()
        world = self._worlds.pop(world_size, None)
        if world is None or not world.alive:
            if world is not None:
                self._note_deaths(world)
                world.kill()
            self._make_room()
            world = self._start_world(world_size)
        self._worlds[world_size] = world
        return world

    def _faulty_world(self, world_size: int) -> World:
        self._check_usable()
        if self._faulty is None or not self._faulty.alive or self._faulty.world_size != world_size:
            self._end_faulty()
            self._faulty = self._start_world(world_size, replace(self.backend, faults=True))
        return self._faulty

    def _end_faulty(self) -> None:
        world, self._faulty = self._faulty, None
        if world is not None and world.alive:
            world.stop()
        elif world is not None:
            world.kill()

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            raise Misuse(f"this pool belongs to process {self._pid}, not to {os.getpid()}: make one in each process")
        if self._closed:
            raise Misuse("this pool is closed: make a new one")

    def _make_room(self) -> None:
        for size, world in list(self._worlds.items()):
            if not world.alive:
                self._note_deaths(world)
                self._worlds.pop(size).kill()
        while len(self._worlds) >= self._max_worlds:
            self._worlds.pop(next(iter(self._worlds))).stop()

    def _start_world(self, world_size: int, backend: Backend | None = None) -> World:
        if not self._server.alive:
            self._close_server()
            self._lender, self._server = None, self._start_server()
        self._server.preload(self._modules)
        return World(
            world_size,
            backend or self.backend,
            self._server,
            visit=self._visit,
            environment=self._environment,
        )

    def _start_server(self) -> Launcher:
        preload = preloads(self._visit)
        if self._hub:
            environment = tuple(self._environment.items())
            return HubServer(self._hub, Config(self.backend, preload, environment))
        return Server(self.backend, preload, self._environment)

    def _close_server(self) -> None:
        if self._lender is None:
            self._server.close()

    def _abandon(self, outstanding: _Outstanding) -> None:
        if outstanding.world is not None:
            outstanding.world.kill()
