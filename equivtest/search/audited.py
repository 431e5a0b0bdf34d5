"""Describes the result of a property's audit.

The result shows which collectives the subject calls, and which of these the claims check.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from equivtest.ranks.messages import FAULTS
from equivtest.ranks.observe.moves import WITHOUT_OPERAND_OF_ALL
from equivtest.report.handover import Audited, AuditRow

DECISIVE = FAULTS[:2]
"""Kinds of fault that make a result depend on the operands of fewer ranks, and change nothing else.

A claim that rejects a sum that is too small, too large or NaN only shows that some claim checks the result: if every
rank has the same batch, the average of equal gradients is equal to one rank's gradient, and no claim notices if the
others are missing.
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
        rows: (site, kind of fault) -> number of runs with that fault, and of the runs that a claim rejected.
        hung: The first site at which a fault hung the program, which ended the audit. It is '' if no fault hung the
            program.
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
        """Sites of the collectives that the subject called, in the order of their first call."""
        return list(dict.fromkeys(site for site, _ in self.rows))

    @property
    def unseen(self) -> list[Site]:
        """Sites that no claim checks. At such a site, no claim rejected a decisive fault in any run: see `decisive`."""
        return [site for site in self.sites if not any(self.is_rejected(site, kind) for kind in decisive(site.kind))]

    def is_rejected(self, site: Site, kind: str) -> bool:
        """True if some claim rejected this kind of fault at this site in some run."""
        row = self.rows.get((site, kind))
        return row is not None and row.rejected > 0

    @property
    def shows_nothing(self) -> bool:
        """True if the audit spoiled collectives and no claim rejected a decisive fault in any of these collectives."""
        return bool(self.rows) and self.unseen == self.sites

    @property
    def waits(self) -> str:
        """The reason why the audit waits until the property holds. It is '' if the property held in some case."""
        if self.cases or not self.left_out:
            return ""
        return (
            f"{self.subject}: not audited: it failed in all {len(self.left_out)} cases on several ranks that the audit "
            f"tried, first in {self.left_out[0]}. See equivtest check, or use --audit off"
        )

    @property
    def problem(self) -> str:
        """The reason why the claims show nothing although they hold, with a remedy.

        The text is '' if the claims show something or no case was tried.
        """
        if self.declined and not self.cases and not self.left_out:
            return (
                f"{self.subject}: not audited: the program supports none of the {len(self.declined)} cases that were "
                f"drawn on several ranks: {self.declined[0]}: draw cases that it supports, such as by "
                "world_sizes=, x_shapes= or sizes="
            )
        if not self.cases or (not self.rows and self.without_collectives):
            return ""
        held = f"{self.subject} held in {self.cases} case{'s' * (self.cases != 1)} on several ranks although"
        if not self.rows:
            return (
                f"{held} it called no collective: nothing shows that it is parallel. Check that the plan names parts "
                "that the module has and that its library found the process group; if no collective is needed, "
                "say why: without_collectives='...' of module_property or of Property"
            )
        if not self.shows_nothing:
            return ""
        sites = ", ".join(map(str, self.sites))
        return (
            f"{held} its collectives ignored the other ranks ({sites}): each rank got its own operand in place of the "
            "others', and no claim failed. If every rank has the same batch, divide it: module_property(..., "
            "batch='mean of parts') or 'sum of parts'"
        )

    def as_data(self, name: str) -> Audited:
        """Converts the audit of property `name` to plain data for the report."""
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
    sites = dict.fromkeys(row.collective for row in audited.rows)
    rejected = {(row.collective, row.fault) for row in audited.rows if row.rejected}
    unseen = tuple(
        site for site in sites if not any((site, kind) in rejected for kind in decisive(site.partition(" in the ")[0]))
    )
    is_empty = not audited.cases or (not sites and bool(audited.reason))
    return unseen, not is_empty and len(unseen) == len(sites)


def decisive(kind: str) -> tuple[str, ...]:
    """Returns the decisive kinds of fault for a kind of collective.

    If a claim rejects a decisive fault, the claim checks that results depend on other ranks' operands.
    """
    return ("dropped",) if kind in WITHOUT_OPERAND_OF_ALL else DECISIVE
