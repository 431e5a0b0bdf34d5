"""Finds out which collectives a backend supports. There is one probe for each collective, world size and dtype."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from equivtest.base.lacking import NOT_RUN, PROBED, REDUCING, function_of
from equivtest.ranks.first_cause import first_cause
from equivtest.ranks.places import place_of
from equivtest.ranks.probe import PROBES
from equivtest.ranks.reply import Outcome, Reply

Kind = Literal["works", "refused", "wrong", "raised", "hung", "died"]
"""Result of a probe.

refused: every rank raised the backend's own refusal.  Every other kind except 'works' is a failure of the backend.
"""

_KIND_OF: dict[str, Kind] = {"timed_out": "hung", "lost": "died", "Wrong": "wrong"}
_OUTCOME_OF: dict[Kind, Outcome] = {"hung": "timed_out", "died": "lost"}
_VERBS: dict[Kind, str] = {
    "works": "works",
    "refused": "is refused",
    "wrong": "is wrong",
    "raised": "raises",
    "hung": "hangs",
    "died": "ends a rank",
}
REFUSED = "CollectiveRefused"
"""Error type of a rank on which a collective was refused that worked on other ranks or in its probe."""
_SINGLE = {
    "all_gather_single": "all_gather_into_tensor",
    "all_gather_tensor": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}


@dataclass(frozen=True)
class Finding:
    """The result of the probe of one collective.

    Attributes:
        said: Error text of the rank that failed first. If values are wrong, this is the error text of the lowest rank
            with a wrong value.
    """

    collective: str
    dtype: str
    world_size: int
    kind: Kind
    said: str = ""

    @property
    def is_fault(self) -> bool:
        """True if the backend is wrong. False if the collective works, or if the backend does not support it."""
        return self.kind not in ("works", "refused")

    @property
    def function(self) -> str:
        return function_of(self.collective)

    @property
    def name(self) -> str:
        """Name of the collective with its reduction, if it has one, such as 'all_reduce_sum' or 'broadcast'."""
        return f"{self.collective}_sum" if self.collective in REDUCING else self.collective

    def __str__(self) -> str:
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return f"{self.collective} of {self.dtype} on {ranks} {_VERBS[self.kind]}: {self.said}"


def conclude(collective: str, dtype: str, replies: Sequence[Reply]) -> Finding:
    cause = first_cause(replies)
    if cause is None:
        return Finding(collective, dtype, len(replies), "works")
    if all(reply.error_type == "Refused" for reply in replies):
        return Finding(collective, dtype, len(replies), "refused", cause.error_text)
    if cause.error_type == "Wrong":  # the order of arrival has no meaning here
        cause = next(reply for reply in replies if reply.error_type == "Wrong")
    kind = _KIND_OF.get(cause.outcome) or _KIND_OF.get(cause.error_type, "raised")
    lonely = "refused, and others did not: " if cause.error_type == "Refused" else ""
    return Finding(collective, dtype, len(replies), kind, f"rank {cause.rank}: {lonely}{cause.error_text}")


@dataclass
class Support:
    """Results of the probes of one dtype on one world size."""

    world_size: int
    dtype: str
    findings: dict[str, Finding] = field(default_factory=dict)

    @property
    def fatal(self) -> Finding | None:
        """The finding of a probe that hung or ended a rank. After such a probe no case of the dtype runs on this world
        size.
        """
        return next((finding for finding in self.findings.values() if finding.kind in _OUTCOME_OF), None)

    @property
    def unknown(self) -> list[str]:
        return [] if self.fatal else [name for name in PROBES if name not in self.findings]

    @property
    def refused(self) -> list[Finding]:
        return [finding for finding in self.findings.values() if finding.kind == "refused"]

    @property
    def faults(self) -> list[Finding]:
        return [finding for finding in self.findings.values() if finding.is_fault]

    @property
    def working(self) -> list[str]:
        return [f"{self.dtype}:{finding.name}" for finding in self.findings.values() if finding.kind == "works"]

    def in_short(self, name: str) -> str:
        """Returns 'dtype:name' of a refused collective, such as 'float16:reduce_avg'.

        If the backend refused the collective with every reduction, the name has no reduction, as in 'float16:reduce'.
        """
        kinds = {finding.kind for finding in self.findings.values() if finding.function == function_of(name)}
        return f"{self.dtype}:{function_of(name) if kinds == {'refused'} else name}"


def ended_by(finding: Finding, num_processes: int) -> list[Reply]:
    text = f"{NOT_RUN}: {finding}"
    outcome = _OUTCOME_OF[finding.kind]
    return [Reply(rank=rank, outcome=outcome, error_text=text, detail=text) for rank in range(num_processes)]


def as_supported(known: Sequence[Support], replies: list[Reply]) -> list[Reply]:
    """Corrects the outcomes of the replies to a case, and returns the replies.

    If the backend refused the same collective on all ranks that took part, the outcome becomes 'not_supported'. The
    outcome 'declined' stays if every rank that took part declined. Otherwise 'declined' becomes 'raised'.

    Args:
        known: Results of the probes for the case's dtypes.
    """
    if any(reply.outcome == "declined" for reply in replies):
        return _as_declined(replies)
    if any(reply.lacking for reply in replies):
        return _as_agreed(known, replies)
    return _as_refused(known, replies)


def _as_declined(replies: list[Reply]) -> list[Reply]:
    declining = [reply.rank for reply in replies if reply.outcome == "declined"]
    others = [reply.rank for reply in replies if reply.outcome not in ("declined", "not_in_mesh")]
    if not others:
        return replies
    who = f"raised on {', '.join(map(str, declining))}, not on {', '.join(map(str, others))}"
    return [
        replace(reply, outcome="raised", error_text=f"must be raised on every rank: {who}: {reply.error_text}")
        if reply.outcome == "declined"
        else reply
        for reply in replies
    ]


def _as_agreed(known: Sequence[Support], replies: list[Reply]) -> list[Reply]:
    """Returns the replies. If a refusal is not credible, the outcome of each reply that names it becomes 'raised'.

    A refusal is credible if all ranks name the same collectives and no probe of these collectives worked. The
    refusal of a collective that has no probe is credible too.
    """
    named = {reply.lacking for reply in replies if reply.outcome != "not_in_mesh"}
    lacking = sorted(set().union(*named))
    working = [name for support in known for name in support.working if name in lacking]
    if len(named) == 1 and not working:
        short = tuple(dict.fromkeys(_in_short(known, name) for name in lacking))
        return [replace(reply, lacking=short) if reply.lacking else reply for reply in replies]
    why = f"its probe on {len(replies)} ranks worked" if working else "not on every rank"
    return [
        replace(
            reply,
            outcome="raised",
            error_type=REFUSED,
            error_text=f"refused, but {why}: {reply.error_text}",
            lacking=(),
        )
        if reply.lacking
        else reply
        for reply in replies
    ]


def _in_short(known: Sequence[Support], name: str) -> str:
    dtype, _, collective = name.partition(":")
    return next((support.in_short(collective) for support in known if support.dtype == dtype), name)


def _as_refused(known: Sequence[Support], replies: list[Reply]) -> list[Reply]:
    """Returns the replies. All get 'not_supported' if each rank raised a refusal that a probe also raised.

    Ranks that took no part do not count. The traceback shows the collective. If the traceback does not show it, the
    error text names all collectives with this refusal.
    """
    refused = [finding for support in known for finding in support.refused]
    taking_part = [reply for reply in replies if reply.outcome != "not_in_mesh"]
    alike = [finding for finding in refused if taking_part and all(_says(finding, reply) for reply in taking_part)]
    if not alike:
        return replies
    place = place_of(taking_part[0].detail)
    called = _SINGLE.get(place.collective, place.collective) if place else ""
    named = [finding for finding in alike if finding.function == called]
    if called in PROBED and not named:  # the probe found another collective refused
        return replies
    named = named or alike
    names = tuple(dict.fromkeys(_in_short(known, f"{finding.dtype}:{finding.name}") for finding in named))
    text = f"{', '.join(name.replace(':', ' ') for name in names)}: {named[0].said}"
    return [
        reply
        if reply.outcome == "not_in_mesh"
        else replace(reply, outcome="not_supported", error_text=text, lacking=names)
        for reply in replies
    ]


def _says(finding: Finding, reply: Reply) -> bool:
    """True if a rank raised the text of the probe's refusal. Numbers in the text, such as sizes, may differ."""
    return reply.outcome == "raised" and _without_numbers(finding.said) in _without_numbers(reply.detail)


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "0", text)
