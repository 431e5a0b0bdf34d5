"""Waits for one reply per rank to one request, within a time limit, even if ranks die or hang."""

from __future__ import annotations

import selectors
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from equivtest.base import limits
from equivtest.ranks.failure import clip
from equivtest.ranks.first_cause import first_cause
from equivtest.ranks.observe.notes import file_of
from equivtest.ranks.places import describe_places
from equivtest.ranks.process import Launcher, RankProcess
from equivtest.ranks.reply import Reply
from equivtest.ranks.stacks import tidy
from equivtest.ranks.wire import decode_message

BROKE_OFF = ("raised", "misused", "lost", "declined")
"""Outcomes of a rank after which the other ranks have only the grace period left to answer."""


def silence(limit_s: float) -> str:
    return f"no answer within {limit_s:g} s"


class Inbox:
    """Collects the replies of all ranks to one request as they arrive.

    Args:
        request_id: Id of the request. Replies to other requests are dropped.
        server: Launcher that started the ranks.
        grace_s: Seconds that the other ranks have after the first failure.
        noun: Name of a process in messages: see `describe_places`.
        notes: Folder for the notes that watched ranks on other hosts send.
    """

    def __init__(
        self,
        ranks: Sequence[RankProcess],
        request_id: int,
        server: Launcher,
        grace_s: float,
        noun: str = "rank",
        notes: str = "",
    ) -> None:
        self._ranks = ranks
        self._request_id = request_id
        self._server = server
        self._grace_s = grace_s
        self._notes = Path(notes)
        self._noun = noun
        self._replies: dict[int, Reply] = {}
        self._closed: set[int] = set()  # ranks with a closed connection

    def await_replies(self, limit_s: float) -> list[Reply]:
        """Returns one reply per rank, in rank order.

        Ranks that are silent after `limit_s`, or after the grace period that a failure begins, have the outcome
        'timed_out'.  One rank failed first. The `detail` of its reply has the lines of code in which the other ranks
        were.
        """
        deadline_s = time.monotonic() + limit_s
        failed = False
        with selectors.PollSelector() as selector:  # unlike epoll it needs no descriptor
            for rank, process in enumerate(self._ranks):
                selector.register(process.channel, selectors.EVENT_READ, rank)
                selector.register(process.end, selectors.EVENT_READ, rank)
            while len(self._replies) < len(self._ranks):
                ready = selector.select(min(max(deadline_s - time.monotonic(), 0.0), limits.WATCH_S))
                for process in self._ranks:
                    process.bound_output()
                if not ready and time.monotonic() >= deadline_s:
                    break
                for key, _ in ready:
                    self._listen(selector, key)
                if not failed and (first := self._first_failure()):
                    failed = True
                    if first.lacking or first.outcome == "declined":  # every rank should say so itself
                        self._grace_s = limits.in_proportion(limits.REFUSAL_GRACE_S, limit_s)
                    deadline_s = min(deadline_s, time.monotonic() + self._grace_s)
        self._give_up(limit_s)
        self._explain()
        return [self._replies[rank] for rank in range(len(self._ranks))]

    def _first_failure(self) -> Reply | None:
        return next((reply for reply in self._replies.values() if reply.outcome in BROKE_OFF or reply.lacking), None)

    def _listen(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
        """Reads a rank's messages or records its end. If the server has died, the closed connection shows the end."""
        rank: int = key.data
        process = self._ranks[rank]
        if rank not in self._closed:
            try:
                self._receive(rank)
            except EOFError:
                self._closed.add(rank)
                selector.unregister(process.channel)
        if key.fd == process.end:
            selector.unregister(process.end)
        ended = process.end not in selector.get_map()
        if ended and (rank in self._closed or process.ending(time.monotonic()).is_certain):
            self._replies.setdefault(rank, self._lost(rank))

    def _receive(self, rank: int) -> None:
        process = self._ranks[rank]
        for message in process.channel.receive_available():
            try:
                found = decode_message(message)
            except (ValueError, OSError, msgspec.DecodeError) as error:
                self._replies.setdefault(rank, _unreadable(rank, error))
                continue
            if isinstance(found, bytes):
                with file_of(self._notes, rank).open("ab") as notes:
                    notes.write(found)
            elif found[0] == self._request_id:
                self._replies.setdefault(rank, replace(found[1], at_s=process.to_parents_clock(found[1].at_s)))

    def _lost(self, rank: int) -> Reply:
        process = self._ranks[rank]
        ending = process.ending(time.monotonic())
        words = f"{ending} ({process.place.where})" if process.place.where else str(ending)
        parts = [words]
        output, stacks = process.last_words()
        if text := output.strip():
            parts.append(f"its output:\n{text}")
        if text := tidy(stacks):
            parts.append(f"its stacks:\n{text}")
        return Reply(rank=rank, outcome="lost", error_text=words, detail=clip("\n".join(parts)), at_s=ending.at_s)

    def _give_up(self, limit_s: float) -> None:
        for rank in self._silent():
            process = self._ranks[rank]
            closed = rank in self._closed
            ended = process.wait(limits.STOP_S if closed else 0.0)  # it may be ending now
            if ended and (closed or process.ending(time.monotonic()).is_certain):
                self._replies[rank] = self._lost(rank)
        silent = self._silent()
        if not silent:
            return
        failed = self._first_failure()
        text = silence(limit_s)
        if failed is not None:
            what = "declined" if failed.outcome == "declined" else "failed"
            text = f"no answer within {self._grace_s:g} s after {self._noun} {failed.rank} had {what}"
        stacks = self._server.take_stacks({rank: self._ranks[rank] for rank in silent})
        now_s = time.monotonic()
        for rank in silent:
            self._replies[rank] = Reply(
                rank=rank, outcome="timed_out", error_text=text, detail=stacks[rank], at_s=now_s
            )

    def _silent(self) -> list[int]:
        return [rank for rank in range(len(self._ranks)) if rank not in self._replies]

    def _explain(self) -> None:
        replies = list(self._replies.values())
        cause = first_cause(replies)
        if cause is None:
            return
        waited = cause.error_text if cause.outcome == "timed_out" else ""
        where = self._ranks[cause.rank].place.where
        who = f"{self._noun} {cause.rank} is {where}" if where and cause.outcome != "lost" else ""
        parts = [waited, who, describe_places(replies, self._noun), cause.detail]
        self._replies[cause.rank] = replace(cause, detail="\n".join(part for part in parts if part))


def _unreadable(rank: int, error: Exception) -> Reply:
    text = f"sent a message that cannot be read: {type(error).__name__}: {error}"
    return Reply(rank=rank, outcome="lost", error_text=text, detail=text, at_s=time.monotonic())
