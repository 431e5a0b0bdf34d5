"""What an item of pytest hands to the controller: structs that an xdist worker sends as JSON."""

from __future__ import annotations

from typing import Any

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One draw of a case that was judged: a line of verdicts.jsonl.

    Attributes:
        schema: Version of this form.
        case: As `equivtest.cases.case.to_data` writes it.
        busy_s: The longest that a rank spent on the visit.
        lacking, refused: What the backend could not do, and 'dtype:function' of each collective that it refused;
            None where it could.
        declined: Why the program does not support the case; None where it does.
        verdicts: Claim -> kind of its verdict.
        margins, tensor_margins: Claim, or tensor -> largest error over its allowance.
        known: Claim -> reason of the known failure.
        parts: What parts of a module held -> as `tensor_margins`, None where nothing is concluded; `begins` is the
            first that is wrong, '' where none is.
        factors: As of `equivtest.verdicts.verdict.Judgement`.
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
        message: In full.
        replay: Path of its replay file.
        case: As code.
    """

    subject: str
    claim: str
    kind: str
    message: str
    replay: str
    case: str


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """A property of the session.

    Attributes:
        path, name: Of its file, and its own there.
        of_any_dtype: Claims of which verdicts are not wanted in every dtype.
        conclusive_dtypes, conclusive_shards, shards: As of `equivtest.property.Property`.
        has_audit: True if the run audits it.
        planned: Labels of the searches that are to run, and of its audit.
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

    @property
    def id(self) -> str:
        """Node id under which the property's claims are reported."""
        return f"{self.path}::{self.name}"


class AuditRow(msgspec.Struct, kw_only=True):
    """What came of one fault of one collective; an audit counts in it.

    Attributes:
        runs, rejected: Visits with the fault, and those of them that some claim rejected.
        by: Claim, or kind of failure where the run itself failed -> visits.
    """

    collective: str
    fault: str
    runs: int = 0
    rejected: int = 0
    by: dict[str, int] = {}


class Audited(msgspec.Struct, frozen=True, kw_only=True):
    """What the audit of a property has shown.

    Attributes:
        property: Its name.
        cases: Cases on which the subject held without a fault.
        unseen: Collectives of which no claim saw whether other ranks had a part in them.
        reason: Why the property calls no collective, or ''.
        problem: Why its claims that hold show nothing; '' where they do.
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


class Searched(msgspec.Struct, frozen=True, kw_only=True):
    """What a search or an audit of a property has found.

    Attributes:
        label: Which of the property's `planned`.
        start: How the ranks were started, in words.
        left_out: Dtypes of the run that no case of the property can be judged in, each with the reason or ''.
        audit: None for a search.
    """

    listed: Listed
    label: str
    start: str
    records: tuple[Record, ...] = ()
    failures: tuple[Failure, ...] = ()
    left_out: dict[str, str] = msgspec.field(default_factory=dict)
    audit: Audited | None = None


class KnownState(msgspec.Struct, frozen=True, kw_only=True):
    """A known failure, and what became of its smallest case.

    Attributes:
        case: As code.
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
    """A collective that a probe found wrong, '' where a rank died between two visits, and the fault in words."""

    collective: str
    text: str


class Handover(msgspec.Struct, frozen=True, kw_only=True):
    """What one item hands over.

    Attributes:
        fatal: Why no further item can run.
        misuse: The mistake that ended the item before its end.
        absent: Why the property was not run.
        incomplete: Whether that is for its being incomplete, which the summary then says.
    """

    fatal: str = ""
    misuse: str = ""
    absent: str = ""
    incomplete: bool = False
    faults: tuple[BackendFault, ...] = ()
    known: KnownState | None = None
    searched: Searched | None = None
