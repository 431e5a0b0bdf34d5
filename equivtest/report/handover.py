"""Defines the data that an item of pytest sends to the controller of a run. An xdist worker sends the data as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from equivtest.verdicts.drawing import Drawing

if TYPE_CHECKING:
    from equivtest.property import Property

TORCHS = "fails on gloo and the CPU too"
"""Beginning of the reason for a failure that gloo on the CPU shows too, so that the backend is not to blame."""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of verdicts.jsonl: the verdicts of all claims on one draw.

    Attributes:
        schema: Version of this form.
        case: The case as `equivtest.cases.case.to_data` writes it.
        busy_s: The longest time that a rank spent on the case, in seconds.
        lacking: What the backend lacks. None if the backend supports the case.
        refused: 'dtype:function' of each collective that the backend refused.
        declined: The reason why the program does not support the case. None if the program supports the case.
        verdicts: Claim -> kind of its verdict.
        margins: Claim -> margin, the largest error divided by the allowed error.
        tensor_margins: Tensor -> margin.
        known: Claim -> reason of the known failure. The reason begins with TORCHS if gloo on the CPU fails too.
        parts: Boundary tensor of a submodule -> its margin, or None if there is no conclusion.
        begins: The first wrong tensor of `parts`, or ''.
        factors: Tensor -> factor between the ranks' gradient and the unsharded gradient. There are entries only if the
            program's backward applies such a factor and the program divides the factor out again later.
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
    """The smallest failing case of one claim and one kind of failure that a search has found.

    Attributes:
        fault: The cause, such as 'collective: ...'. It is '' if the cause was not searched for.
        history: What ran before the case failed, if the case alone does not fail. Otherwise ''.
        drawing: The elements of the first wrong tensor on each rank, if it is small and has wrong values.
    """

    subject: str
    claim: str
    kind: str
    message: str
    replay: str
    case: str
    fault: str = ""
    history: str = ""
    drawing: Drawing | None = None


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a property as plain data, for the list of a run's properties.

    Attributes:
        of_any_dtype: Claims that do not need verdicts in every dtype.
        conclusive_dtypes, conclusive_shards: Dtypes and shard kinds that need conclusions. If empty, all of them need
            conclusions.
        shards: False if the subject's tensors are not sharded, so that every case counts as even.
        requires_cells: False if no cell needs a conclusion.
        planned: Labels of the property's planned searches and audit.
        line: Line of the property in its file, counted from 0. None if the line is unknown.
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
    requires_cells: bool = True
    has_audit: bool = False
    planned: tuple[Annotated[str, msgspec.Meta(pattern=r"^(w\d{1,4}-|audit$)")], ...] = ()
    line: int | None = None

    @property
    def id(self) -> str:
        return f"{self.path}::{self.name}"


def listed_of(
    prop: Property, *, path: str, name: str, planned: tuple[str, ...], has_audit: bool, line: int | None = None
) -> Listed:
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
        requires_cells=not prop.incomplete,
        has_audit=has_audit,
        planned=planned,
        line=line,
    )


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The list of all properties of a session.

    Attributes:
        selection: Digest of all tests of the run, if the session runs a shard of these tests. It is '' without --shard.
    """

    properties: tuple[Listed, ...]
    selection: str = ""


class AuditRow(msgspec.Struct, kw_only=True):
    """Numbers of runs with one kind of fault in one collective.

    Attributes:
        by: Claim -> number of runs that the claim rejected. If the run itself failed, the key is the kind of failure.
    """

    collective: str
    fault: str
    runs: int = 0
    rejected: int = 0
    by: dict[str, int] = {}


class Audited(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the audit of one property, which plants faults in its collectives.

    Attributes:
        cases: Number of cases in which the subject held without a fault.
        unseen: Collectives that no claim checks. All claims hold even if such a collective ignores the other ranks.
        reason: The reason why the property calls no collective, or ''.
        problem: The reason why the property's claims show nothing although they hold, or ''.
        waits: The reason why the audit waits until the property holds, or ''.
        hung: The collective whose fault hung the program, or ''.
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


CaseState = Literal["judged", "known", "open"]
"""What a case has shown: a conclusion ('judged'), a known failure, or nothing ('open')."""


class CoveredRow(msgspec.Struct, frozen=True, kw_only=True):
    """The axis values of one case of a covering array, and the result of the case.

    Attributes:
        values: Pairs (axis, value), in the order in which axes are drawn.
    """

    state: CaseState
    values: tuple[tuple[str, str], ...]


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """The cases of a covering array that one search has run.

    A covering array is a list of cases in which every feasible combination of `strength` axis values occurs.

    Attributes:
        array: Name of the array. It is '' if all world sizes share one array.
        strength: Number of axes that the array combines.
    """

    array: str
    strength: int
    rows: tuple[CoveredRow, ...]
    infeasible: tuple[tuple[tuple[str, str], ...], ...]


class Searched(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one search or one audit of a property.

    Attributes:
        left_out: Dtype in which no case of the property can be judged -> the reason, which may be ''.
        coverage: Cases of the covering array that ran. None for an audit, and for a search of random cases.
        cut: Number of cases that were left out because the time budget was over.
        unbegun: True if the time budget was over before the search had made its cases.
    """

    listed: Listed
    label: str
    start: str
    records: tuple[Record, ...] = ()
    failures: tuple[Failure, ...] = ()
    left_out: dict[str, str] = msgspec.field(default_factory=dict)
    coverage: Coverage | None = None
    cut: int = 0
    unbegun: bool = False
    audit: Audited | None = None


STILL_FAILS, NO_LONGER, OTHERWISE = "still fails", "no longer fails", "fails otherwise"
HOLDS_HERE, NOT_SUPPORTED = "holds on this backend", "not supported"
OPEN, NOT_RUN = "open", "not run"


class KnownState(msgspec.Struct, frozen=True, kw_only=True):
    """A known failure, and the result of its smallest case."""

    id: str
    claim: str
    kind: str
    case: str
    reason: str
    link: str
    state: str


class BackendFault(msgspec.Struct, frozen=True):
    """A fault of the backend.

    Attributes:
        collective: The collective that a probe found wrong. It is '' if a rank died between two visits.
    """

    collective: str
    text: str


class Handover(msgspec.Struct, frozen=True, kw_only=True):
    """All data that one item of pytest sends to the controller.

    Attributes:
        fatal: The reason why no further item can run, or ''.
        misuse: The mistake that ended the item early, or ''.
        absent: The reason why the property did not run, or ''.
        incomplete: True if the property did not run because it is incomplete. The summary then says so.
        code: Path of each of your own files that was imported -> digest. Only a run with a report has digests, to check
            the files if the run is resumed.
    """

    fatal: str = ""
    misuse: str = ""
    absent: str = ""
    incomplete: bool = False
    faults: tuple[BackendFault, ...] = ()
    known: KnownState | None = None
    searched: Searched | None = None
    code: dict[str, str] = {}
