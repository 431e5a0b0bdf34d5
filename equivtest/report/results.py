"""Collects the data that a run's items send, and computes the result of the run."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from equivtest.report.handover import Audited, BackendFault, Handover, KnownState, Listed, Record, Searched
from equivtest.report.tally import Tally
from equivtest.report.text import on_declined, on_faults, on_lacking
from equivtest.verdicts.verdict import CONCLUSIVE

FAILED_EXIT = 1
MISUSE_EXIT = 2


@dataclass
class Results:
    """The collected results of a run.

    Attributes:
        tallies: Counts by the property's id.
        known: States of the known failures, in order of arrival.
        audits: Audits by the property's id.
        records: Verdicts in order of arrival. Empty unless `keeps_records` is True.
        searches: (property's name, search's label) -> verdicts. Empty unless `keeps_records` is True.
        starts: Descriptions of the ways in which ranks were started.
        misused: Number of items that ended with a Misuse.
        faults: Faults of the backend by their text, because several xdist workers may find the same fault.
        absent: Reasons why properties did not run.
        left_out: The reasons in `absent` that concern incomplete properties.
    """

    keeps_records: bool = True
    tallies: dict[str, Tally] = field(default_factory=dict)
    known: list[KnownState] = field(default_factory=list)
    audits: dict[str, Audited] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    searches: dict[tuple[str, str], tuple[Record, ...]] = field(default_factory=dict)
    starts: set[str] = field(default_factory=set)
    misused: int = 0
    faults: dict[str, BackendFault] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    left_out: set[str] = field(default_factory=set)

    def add(self, handover: Handover) -> None:
        self.misused += bool(handover.misuse)
        self.faults |= {fault.text: fault for fault in handover.faults}
        if handover.absent:
            self.absent.append(handover.absent)
            self.left_out |= {handover.absent} if handover.incomplete else set()
        if handover.known is not None:
            self.known.append(handover.known)
        if handover.searched is not None:
            self._add_searched(handover.searched, ended=not handover.misuse or handover.searched.audit is not None)

    def _add_searched(self, found: Searched, *, ended: bool) -> None:
        self.starts.add(found.start)
        tally = self.tally_of(found.listed)
        if found.label not in tally.done:
            tally.add(found.label, found.records, found.failures, ended=ended)
        if found.coverage is not None:
            tally.covered.add(found.coverage)
        tally.cut += found.cut
        tally.unbegun += found.unbegun
        if found.left_out:
            tally.left_out.update(found.left_out)
            self.absent.append(f"{found.listed.name}: no case can be judged in {', '.join(found.left_out)}")
        if found.audit is not None:
            self.audits[tally.listed.id] = found.audit
            tally.unshown = found.audit.problem or ("not audited" if found.audit.waits else "")
        if self.keeps_records:
            self.records += found.records
        if self.keeps_records and found.audit is None:
            self.searches.setdefault((found.listed.name, found.label), found.records)

    def tally_of(self, listed: Listed) -> Tally:
        """Returns the counts of a property.  `listed` replaces a description without planned searches."""
        tally = self.tallies.setdefault(listed.id, Tally(listed))
        if not tally.listed.planned:
            tally.listed = listed
        return tally

    def add_properties(self, properties: Iterable[Listed]) -> None:
        """Adds every property of the session, so that a property counts even if none of its items began."""
        for listed in properties:
            self.tally_of(listed)

    def ordered(self) -> list[Tally]:
        """Returns the tallies in order of node id, because the order of arrival depends on xdist."""
        return sorted(self.tallies.values(), key=lambda tally: tally.listed.id)

    def ordered_known(self) -> list[KnownState]:
        return sorted(self.known, key=lambda entry: entry.id)

    def ordered_audits(self) -> list[Audited]:
        return [self.audits[name] for name in sorted(self.audits)]

    @property
    def are_complete(self) -> bool:
        return bool(self.tallies) and all(tally.is_complete for tally in self.tallies.values())

    def lacking(self, allowed: Collection[str]) -> list[str]:
        return on_lacking(self.ordered(), allowed)

    def conclude(
        self, code: int, failed: int, concluded: int, allowed: Collection[str], *, audits_alone: bool = False
    ) -> tuple[int, list[str]]:
        """Returns the run's exit code, and the reasons, other than failing tests, why the run is no success.

        Args:
            concluded: Number of tests that passed, failed, or are known failures. It includes tests of other plugins.
            allowed: Names of the dtypes and collectives that the backend may lack: see --allow-unsupported.
        """
        lacking = self.lacking(allowed)
        code = code or (FAILED_EXIT if lacking else 0)
        if self.misused and failed == self.misused and not self.faults:  # no claim has failed
            code = MISUSE_EXIT
        nothing = on_declined(self.ordered())
        nothing += [] if audits_alone else self._failed_in_audits_alone()
        nothing += self._nothing_proven(concluded)
        return code or (MISUSE_EXIT if nothing else 0), [*on_faults(self.faults.values()), *lacking, *nothing]

    def _failed_in_audits_alone(self) -> list[str]:
        waiting = [(self.tallies[name], found.waits) for name, found in self.audits.items() if found.waits]
        return [f"nothing is shown: {why}" for tally, why in waiting if not tally.has_failed]

    def _nothing_proven(self, concluded: int) -> list[str]:
        ran = [tally for tally in self.tallies.values() if tally.draws]
        if ran and not any(tally.total(*CONCLUSIVE) for tally in ran):
            return ["no verdict of this run is conclusive: nothing is proven"]
        if not ran and not concluded:
            return ["; ".join(["nothing was judged: nothing is proven", *dict.fromkeys(self.absent)])]
        return []
