"""Structs that an item of pytest sends to the controller; an xdist worker sends them as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from equivtest.property import Property

TORCHS = "fails on gloo and the CPU too"
"""Begins the reason of a failure on another backend that is torch's own: see `equivtest.search.differential`."""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One judged draw of a case: a line of verdicts.jsonl.

    Attributes:
        schema: Version of this form.
        case: Written by `equivtest.cases.case.to_data`.
        busy_s: The longest time that a rank spent on the visit.
        lacking, refused: What the backend lacks, and 'dtype:function' of each collective that it refused;
            None if it supports the case.
        declined: Why the program does not support the case; None if it does.
        verdicts: Claim -> kind of its verdict.
        margins, tensor_margins: Claim, or tensor -> largest error over its allowance.
        known: Claim -> reason of the known failure, or TORCHS.
        parts: Tensor within a module -> margin like `tensor_margins`, or None if nothing is concluded.
        begins: The first wrong tensor of `parts`, or ''.
        factors: See `equivtest.verdicts.verdict.Judgement`.
    """

    schema: int
    case: dict[str, Any]
    world_size: int
    dtype: str
    shard_kind: str
    refusal: str
    busy_s: float
    lacking: str | None = None
    refused: tuple[str, ...] | None = None
    declined: str | None = None
    subject: str
    draw: int
    mode: str
    seed: int
    verdicts: dict[str, str]
    margins: dict[str, float]
    tensor_margins: dict[str, float]
    known: dict[str, str]
    parts: dict[str, float | None] = {}
    begins: str = ""
    factors: dict[str, float] = {}


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The smallest failure of a claim and kind that a search has found.

    Attributes:
        message: The whole message.
        replay: Path of its replay file.
        case: The case as code.
        fault, history: Of the verdict (`equivtest.verdicts.verdict.Verdict`).
    """

    subject: str
    claim: str
    kind: str
    message: str
    replay: str
    case: str
    fault: str = ""
    history: str = ""


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """A property of the session.

    Attributes:
        path, name: Path of its file, and its name in the file.
        of_any_dtype: Claims that do not need verdicts in every dtype.
        conclusive_dtypes, conclusive_shards, shards: See `equivtest.property.Property`.
        has_audit: True if the run audits it.
        planned: Labels of its planned searches and audit.
        line: Of the property in its file, from 0; None if it is unknown.
    """

    path: str
    name: str
    subject: str
    statement: str
    source: str
    claims: tuple[str, ...]
    of_any_dtype: tuple[str, ...] = ()
    conclusive_dtypes: tuple[str, ...] = ()
    conclusive_shards: tuple[str, ...] = ()
    shards: bool = True
    has_audit: bool = False
    planned: tuple[str, ...] = ()
    line: int | None = None

    @property
    def id(self) -> str:
        """Node id under which pytest reports the property's claims."""
        return f"{self.path}::{self.name}"


def listed_of(
    prop: Property, *, path: str, name: str, planned: tuple[str, ...], has_audit: bool, line: int | None = None
) -> Listed:
    """Returns a property as a run lists it; see `Listed` for the arguments."""
    return Listed(
        path=path,
        name=name,
        subject=prop.subject,
        statement=prop.statement,
        source=prop.source,
        claims=tuple(claim.name for claim in prop.claims),
        of_any_dtype=tuple(claim.name for claim in prop.claims if not claim.by_dtype),
        conclusive_dtypes=tuple(prop.conclusive_dtypes),
        conclusive_shards=tuple(prop.conclusive_shards),
        shards=prop.shards,
        has_audit=has_audit,
        planned=planned,
        line=line,
    )


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a session.

    Attributes:
        selection: Digest of all tests of the run that the session is a shard of; '' without --shard.
    """

    properties: tuple[Listed, ...]
    selection: str = ""


class AuditRow(msgspec.Struct, kw_only=True):
    """Result of one fault of one collective; an audit counts in it.

    Attributes:
        runs, rejected: Number of visits with the fault, and of those that some claim rejected.
        by: Claim, or kind of failure if the run itself failed -> visits.
    """

    collective: str
    fault: str
    runs: int = 0
    rejected: int = 0
    by: dict[str, int] = {}


class Audited(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the audit of a property.

    Attributes:
        property: Its name.
        cases: Cases on which the subject held without a fault.
        unseen: Collectives whose results no claim checked against other ranks.
        reason: Why the property calls no collective, or ''.
        problem: Why its claims that hold show nothing; '' if they do show something.
        waits: Why the audit waits until the property holds; '' if it was audited.
        hung: The collective whose fault hung the program; '' if none did.
    """

    property: str
    cases: int
    rows: tuple[AuditRow, ...]
    unseen: tuple[str, ...]
    reason: str
    problem: str
    seconds: float
    waits: str = ""
    hung: str = ""


class CoveredRow(msgspec.Struct, frozen=True, kw_only=True):
    """One case of a covering array.

    Attributes:
        state: 'judged', 'known' if torch is known to get it wrong, or 'open' without a conclusion.
        values: Each axis with its value, in the order in which they are drawn.
    """

    state: str
    values: tuple[tuple[str, str], ...]


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """Says which part of its covering array a search has covered.

    Attributes:
        array: Its name; '' if all world sizes share one.
        strength: How many axes it combines.
        infeasible: Combinations that no case can have.
    """

    array: str
    strength: int
    rows: tuple[CoveredRow, ...]
    infeasible: tuple[tuple[tuple[str, str], ...], ...]


class Searched(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a search or an audit of a property.

    Attributes:
        label: Its label among the property's `planned`.
        start: How the ranks were started, in words.
        left_out: Dtypes of the run in which no case of the property can be judged, each with the reason or ''.
        coverage: None for an audit, and for a search of random cases.
        cut: Cases that were left out, because the budget was over.
        audit: None for a search.
    """

    listed: Listed
    label: str
    start: str
    records: tuple[Record, ...] = ()
    failures: tuple[Failure, ...] = ()
    left_out: dict[str, str] = msgspec.field(default_factory=dict)
    coverage: Coverage | None = None
    cut: int = 0
    audit: Audited | None = None


class KnownState(msgspec.Struct, frozen=True, kw_only=True):
    """A known failure, and the state of its smallest case.

    Attributes:
        case: The case as code.
        state: In words, such as 'still fails'.
    """

    id: str
    claim: str
    kind: str
    case: str
    reason: str
    link: str
    state: str


class BackendFault(msgspec.Struct, frozen=True):
    """A backend's fault in words, and the collective that a probe found wrong; '' if a rank died between two visits."""

    collective: str
    text: str


class Handover(msgspec.Struct, frozen=True, kw_only=True):
    """The data that one item sends.

    Attributes:
        fatal: Why no further item can run.
        misuse: The mistake that ended the item early.
        absent: Why the property did not run.
        incomplete: True if it did not run because it is incomplete, which the summary then says.
        code: Path of each imported file outside of packages -> digest; only for a report, which can be resumed.
    """

    fatal: str = ""
    misuse: str = ""
    absent: str = ""
    incomplete: bool = False
    faults: tuple[BackendFault, ...] = ()
    known: KnownState | None = None
    searched: Searched | None = None
    code: dict[str, str] = {}
