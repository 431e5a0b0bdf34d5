"""Describes the result of a property's audit: which collectives the subject calls, and which the claims check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from equivtest.ranks.messages import FAULTS
from equivtest.ranks.observe.moves import WITHOUT_OPERAND_OF_ALL
from equivtest.report.handover import Audited, AuditRow

DECISIVE = FAULTS[:2]
"""Kinds of fault that make a result depend on the operands of fewer ranks, and change nothing else.

Other faults make a result too small, too large or NaN. A claim that rejects such a fault only shows that some claim
checks the result.  Example: every rank has the same batch.  Then the average of the gradients equals one rank's
gradient, and no claim notices if the operands of other ranks are missing.
"""


@dataclass(frozen=True)
class Site:
    """The calls of a subject that have the same kind of collective, phase (forward or backward) and group.

    Attributes:
        group: The group of the calls: 'mesh', the name of an axis of the mesh, or the number of ranks.
    """

    kind: str
    phase: str
    group: str

    def __str__(self) -> str:
        on = "" if self.group == "mesh" else f" on {self.group}"
        return f"{self.kind} in the {self.phase}{on}"


@dataclass
class Audit:
    """The result of a property's audit.

    Attributes:
        cases: Number of cases in which all claims held without a fault. Known failures do not count as failures.
        left_out: The first failure of each case in which a claim failed without a fault, as 'claim: kind in case'.
        declined: Reason for each case that the program does not support.
        rows: (site, kind of fault) -> number of runs with that fault, and number of these runs that a claim rejected.
        hung: The first site at which a fault hung the program, which ended the audit, or ''.
        without_collectives: The property's reason why the subject calls no collective, or ''.
    """

    subject: str
    without_collectives: str = ""
    cases: int = 0
    left_out: list[str] = field(default_factory=list)
    declined: list[str] = field(default_factory=list)
    rows: dict[tuple[Site, str], AuditRow] = field(default_factory=dict)
    hung: str = ""
    seconds: float = 0.0

    @property
    def sites(self) -> list[Site]:
        return list(dict.fromkeys(site for site, _ in self.rows))

    @property
    def seen(self) -> list[Site]:
        """Sites at which a claim rejected a decisive fault in some run."""
        return self._sites_of(row.rejected for row in self.rows.values())

    @property
    def unseen(self) -> list[Site]:
        """Sites at which some run had a decisive fault, and no claim rejected such a fault."""
        return [site for site in self._sites_of(row.runs for row in self.rows.values()) if site not in self.seen]

    def _sites_of(self, counts: Iterable[int]) -> list[Site]:
        found = zip(self.rows, counts, strict=True)
        return list(dict.fromkeys(site for (site, fault), count in found if count and fault in decisive(site.kind)))

    @property
    def waits(self) -> str:
        """The reason why the audit waits until the property holds, or '' if the property held in some case."""
        if self.cases or not self.left_out:
            return ""
        return (
            f"{self.subject}: not audited: it failed in all {len(self.left_out)} cases on several ranks that the audit "
            f"tried, first in {self.left_out[0]}. See equivtest check, or use --audit off"
        )

    @property
    def problem(self) -> str:
        """The reason why the claims show nothing although they hold, with a remedy, or ''."""
        if self.declined and not self.cases and not self.left_out:
            return (
                f"{self.subject}: not audited: the program supports none of the {len(self.declined)} cases that were "
                f"drawn on several ranks: {self.declined[0]}: draw cases that it supports, such as by "
                "world_sizes=, inputs= or sizes="
            )
        if not self.cases or (not self.rows and self.without_collectives):
            return ""
        held = f"{self.subject} held in {self.cases} case{'s' * (self.cases != 1)} on several ranks although"
        if not self.rows:
            return (
                f"{held} it called no collective: nothing shows that it is parallel. Check that the plan names parts "
                "that the module has and that its library found the process group; if no collective is needed, "
                "say why: without_collectives='...' of Judge or of Property"
            )
        if self.seen:
            return ""
        sites = ", ".join(map(str, self.sites))
        return (
            f"{held} its collectives ignored the other ranks ({sites}): each rank got its own operand in place of the "
            "others', and no claim failed. If every rank has the same batch, divide it: "
            "batch='mean of parts' or 'sum of parts'"
        )

    def as_data(self, name: str) -> Audited:
        return Audited(
            property=name,
            cases=self.cases,
            rows=tuple(self.rows.values()),
            unseen=tuple(map(str, self.unseen)),
            reason=self.without_collectives,
            problem=self.problem,
            waits=self.waits,
            hung=self.hung,
            seconds=round(self.seconds, 2),
        )


def unseen_in(audited: Audited) -> tuple[tuple[str, ...], bool]:
    """Returns (collectives that no claim checks, True if the property shows nothing because of these collectives)."""
    rows = [row for row in audited.rows if row.fault in decisive(row.collective.partition(" in the ")[0])]
    seen = {row.collective for row in rows if row.rejected}
    unseen = dict.fromkeys(row.collective for row in rows if row.runs and row.collective not in seen)
    is_empty = not audited.cases or (not audited.rows and bool(audited.reason))
    return tuple(unseen), not is_empty and not seen


def decisive(kind: str) -> tuple[str, ...]:
    """Returns the decisive kinds of fault for a kind of collective: see DECISIVE."""
    return ("dropped",) if kind in WITHOUT_OPERAND_OF_ALL else DECISIVE
