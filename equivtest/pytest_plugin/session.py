"""What the controller does: collects findings, reports every claim as a test, writes the report."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from equivtest.errors import BrokenSetup, EquivtestError
from equivtest.pytest_plugin.claim_reports import report_claim
from equivtest.pytest_plugin.machine import commit_of, machine_facts, num_cores, own_commit, versions_of
from equivtest.pytest_plugin.options import settings_of, soak_seed
from equivtest.pytest_plugin.pools import host_events, hosts_of
from equivtest.pytest_plugin.suite import properties_dir, version_of
from equivtest.ranks.gloo import WORKERS
from equivtest.ranks.poison import poison_in_words
from equivtest.report import audits
from equivtest.report.files import begin_report, write_report
from equivtest.report.folder import ReportFolder
from equivtest.report.handover import Audited, BackendFault, Handover, KnownState, Listed, Searched
from equivtest.report.tally import ClaimResult, Tally
from equivtest.report.text import BEGUN, ENDED, on_declined, on_faults, on_lacking, summarize
from equivtest.verdicts.verdict import CONCLUSIVE

FAILED_EXIT = 1
MISUSE_EXIT = 2


class Controller:
    """The findings of a session, in the process that prints; workers of xdist have none."""

    def __init__(self, config: pytest.Config, started_s: float) -> None:
        self.config = config
        self.tallies: dict[str, Tally] = {}
        self.known: list[KnownState] = []
        self.audits: dict[str, Audited] = {}  # by the property's id
        self.lines: list[str] = []  # of verdicts.jsonl
        self.starts: set[str] = set()  # how ranks were started, in words
        self.reported: set[str] = set()
        self.stopped = False
        self.misused = 0  # items that ended so
        self.started_s = started_s
        self.faults: dict[str, BackendFault] = {}  # by text: each xdist worker finds them
        self.absent: list[str] = []  # why properties were not run
        self.left_out: set[str] = set()  # those of them that are incomplete, and why
        self.troubles: list[str] = []  # what makes the run no success besides failing tests
        self.host_events: list[str] = []  # of ranks on other hosts
        self.state = BEGUN
        self.folder: ReportFolder | None = None

    def begin(self) -> None:
        """Takes the folder of --report, if there is one: where an earlier report was, it says that this run began.

        Raises:
            Misuse, BrokenSetup: another run writes there, or this one cannot.
        """
        directory = settings_of(self.config).report_dir
        if directory is None:
            return
        folder = ReportFolder(directory)
        try:
            folder.clear()
            begin_report(directory, self.environment())
        except EquivtestError:
            folder.leave()
            raise
        self.folder = folder

    def leave(self) -> None:
        """Lets others have the folder, after the last word where the session never came to its end."""
        if self.folder is not None:
            if self.state == BEGUN:
                self.write("interrupted before anything was collected")
            self.folder.leave()

    def receive(self, handover: str) -> None:
        """Takes the `Handover` of one item, written as JSON.

        Raises:
            pytest.exit.Exception: no further item can run.
        """
        handed = msgspec.json.decode(handover, type=Handover)
        if handed.fatal:
            self.stopped = True
            pytest.exit(f"equivtest: {handed.fatal}", returncode=MISUSE_EXIT)
        self.misused += bool(handed.misuse)
        self.faults |= {fault.text: fault for fault in handed.faults}
        if handed.absent:
            self.absent.append(handed.absent)
            self.left_out |= {handed.absent} if handed.incomplete else set()
        if handed.known is not None:
            self.known.append(handed.known)
        if handed.searched is not None:
            self._add_findings(handed.searched, ended=not handed.misuse or handed.searched.audit is not None)

    def _add_findings(self, found: Searched, *, ended: bool) -> None:
        self.starts.add(found.start)
        tally = self.tally_of(found.listed)
        if found.label not in tally.done:
            tally.add(found.label, found.records, found.failures, ended=ended)
        if found.coverage is not None:
            tally.covered.add(found.coverage)
        tally.cut += found.cut
        if found.left_out:
            tally.left_out.update(found.left_out)
            self.absent.append(f"{found.listed.name}: no case can be judged in {', '.join(found.left_out)}")
        if found.audit is not None:
            self.audits[tally.listed.id] = found.audit
            tally.unshown = found.audit.problem or ("not audited" if found.audit.waits else "")
        if settings_of(self.config).report_dir is not None:
            self.lines += [json.dumps(msgspec.to_builtins(record)) for record in found.records]

    def tally_of(self, listed: Listed) -> Tally:
        """The tally of this property; created on first use."""
        return self.tallies.setdefault(listed.id, Tally(listed))

    def add_manifest(self, properties: list[Listed]) -> None:
        """Takes note of every property of the session, those that never began included."""
        for listed in properties:
            self.tally_of(listed)

    def report_claims(self, session: pytest.Session, *, at_end: bool = False) -> None:
        """Reports the claims of every property whose searches have all ended, each once."""
        if settings_of(self.config).profile.audits_alone:
            return
        for tally in list(self.tallies.values()):
            if tally.listed.id in self.reported or not (at_end or tally.is_complete):
                continue
            self.reported.add(tally.listed.id)
            for result in tally.claims():
                report_claim(session, tally.listed.path, tally.listed.name, result, tally.listed.line)
            settings = settings_of(self.config)
            if settings.profile.requires_cells and tally.is_complete:
                holes = tally.holes(settings.dtypes, settings.excused)
                way_out = "--dtypes and --world-sizes leave out what a device or a module cannot hold or compute, "
                way_out += "--allow-unsupported names what a backend may refuse"
                text = "\n".join(["required cells without a conclusion:", *(f"  {hole}" for hole in holes), way_out])
                result = ClaimResult("coverage", "failed" if holes else "passed", text)
                report_claim(session, tally.listed.path, tally.listed.name, result, tally.listed.line)

    def finish(self, session: pytest.Session, state: str, concluded: int) -> None:
        """Reports what is left, writes the report, and sets the exit status where nothing was proven.

        Args:
            state: ENDED, or what ended the run before its end.
            concluded: Tests of the session that passed, failed or fail as known, others' included.
        """
        self.troubles += on_faults(self.faults.values())
        self.host_events = host_events(self.config)
        if not self.stopped:
            self._conclude(session, concluded)
        if not self.write(state):
            session.exitstatus = MISUSE_EXIT

    def _conclude(self, session: pytest.Session, concluded: int) -> None:
        self.report_claims(session, at_end=True)
        if lacking := on_lacking(self.ordered(), settings_of(self.config).excused):
            report_claim(session, "equivtest", "backend", ClaimResult("supports", "failed", lacking[0]))
            self.troubles += lacking
            session.exitstatus = session.exitstatus or FAILED_EXIT
        if self.misused and session.testsfailed == self.misused and not self.faults:  # no claim has failed
            session.exitstatus = MISUSE_EXIT
        if declined := on_declined(self.ordered()):
            self.troubles += declined
            session.exitstatus = session.exitstatus or MISUSE_EXIT
        if waiting := self._failed_in_audits_alone():
            self.troubles += waiting
            session.exitstatus = session.exitstatus or MISUSE_EXIT
        if nothing := self._nothing_proven(concluded):
            self.troubles.append(nothing)
            session.exitstatus = session.exitstatus or MISUSE_EXIT

    def write(self, state: str) -> bool:
        """Writes the report; whether that could be done, or there is none to write."""
        self.state = state
        if self.folder is None:
            return True
        lines, known, audited = sorted(self.lines), self.ordered_known(), self.ordered_audits()
        try:
            write_report(self.folder.path, self.environment(), self.ordered(), lines, known, audited, self.troubles)
        except BrokenSetup as error:
            self.troubles.append(str(error))
            return False
        return True

    def _failed_in_audits_alone(self) -> list[str]:
        """Why nothing is shown of each property that failed in its audit and in no search."""
        if settings_of(self.config).profile.audits_alone:
            return []
        waiting = [(self.tallies[name], found.waits) for name, found in self.audits.items() if found.waits]
        return [f"nothing is shown: {why}" for tally, why in waiting if not tally.has_failed]

    def _nothing_proven(self, concluded: int) -> str:
        """Why this run says nothing of any property, or ''; other tests may have said something."""
        ran = [tally for tally in self.tallies.values() if tally.draws]
        if ran and not any(tally.total(*CONCLUSIVE) for tally in ran):
            return "no verdict of this run is conclusive: nothing is proven"
        if not ran and not concluded:
            return "; ".join(["nothing was judged: nothing is proven", *dict.fromkeys(self.absent)])
        return ""

    def ordered(self) -> list[Tally]:
        """The tallies by node id: arrival depends on xdist."""
        return sorted(self.tallies.values(), key=lambda tally: tally.listed.id)

    def ordered_known(self) -> list[KnownState]:
        """What the items of known failures reported, by id."""
        return sorted(self.known, key=lambda entry: entry.id)

    def ordered_audits(self) -> list[Audited]:
        """What the audits have shown, by the properties' ids."""
        return [self.audits[name] for name in sorted(self.audits)]

    def summary(self, width: int) -> list[str]:
        """What stands at the end of the terminal's output."""
        if self.stopped:
            return []
        starts = [f"host    {event}" for event in self.host_events]
        starts += [f"start   {start}" for start in sorted(self.starts) if "(" in start]
        if settings_of(self.config).profile.audits_alone:
            return starts + audits.table(self.ordered_audits())
        return starts + summarize(
            self.ordered(),
            seconds=time.time() - self.started_s,
            known=self.ordered_known(),
            audits=self.ordered_audits(),
            width=width,
            wants_cells=settings_of(self.config).profile.per_cell > 0,
            left_out=sorted(self.left_out),
            is_first_look=settings_of(self.config).profile.is_first_look,
        )

    @property
    def is_complete(self) -> bool:
        """Whether the run came to its end with every search that it was to make."""
        tallies = self.tallies.values()
        return self.state == ENDED and bool(tallies) and all(tally.is_complete for tally in tallies)

    def environment(self) -> dict[str, Any]:
        """What somebody else needs to know to compare this run with another."""
        settings = settings_of(self.config)
        return {
            "equivtest": version_of("equivtest"),
            "equivtest_commit": own_commit(),
            "torch": version_of("torch"),
            "hypothesis": version_of("hypothesis"),
            "pytest": version_of("pytest"),
            "python": platform.python_version(),
            **machine_facts(settings.device),
            "poison": poison_in_words(),
            **({"gloo_workers": WORKERS} if "gloo" in settings.backend else {}),
            "backend": settings.backend,
            "device": settings.device,
            "imports": list(settings.imports),
            "left_out": sorted(self.left_out),
            "start": "; ".join(sorted(self.starts)) or settings.start,
            "releases_of_imports": versions_of(settings.imports),
            "folder_commit": commit_of(Path.cwd()),
            "allow_unsupported": sorted(settings.allowed),
            **({"hosts": hosts_of(self.config), "host_events": self.host_events} if settings.listen else {}),
            "arithmetic": settings.arithmetic or "torch on the CPU, gloo",
            **({"declared": settings.declared} if settings.arithmetic else {}),
            "profile": settings.profile_name,
            "seeds": soak_seed(self.config) if settings.profile.repeats else "gate",
            "world_sizes": list(settings.world_sizes),
            "dtypes": list(settings.dtypes),
            "subjects": [f"{name}={subject}" if subject != name else name for name, subject in settings.subjects],
            "known_failures": ", ".join(settings.known_failures) or "none",
            "audit": "on" if settings.audits else "off",
            "command": sys.argv,
            "complete": self.is_complete,
            "state": self.state,
            "process": os.getpid(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.started_s)),
            "seconds": round(time.time() - self.started_s, 1),
        }


STOPS = {int(pytest.ExitCode.USAGE_ERROR): "mistaken options", int(pytest.ExitCode.INTERNAL_ERROR): "an internal error"}
"""Exit status of a session that did not end -> why, where no exception says it."""


def state_of(exitstatus: int, ended_by: BaseException | None) -> str:
    """ENDED, or what ended a session before its end: Ctrl-C, SIGTERM, or why pytest or xdist stopped."""
    if isinstance(ended_by, pytest.exit.Exception):
        return str(ended_by.msg)
    if ended_by is not None:
        text = str(ended_by) or "Ctrl-C"
        return f"interrupted by {text}" if text in ("Ctrl-C", "SIGTERM") else text
    return STOPS.get(int(exitstatus), ENDED)


def header(config: pytest.Config) -> list[str]:
    """Describes a run in two lines above its first result, and says how long the shipped properties take."""
    settings = settings_of(config)
    seeds = "fixed seeds"
    if settings.profile.repeats:
        seeds = f"fresh seed {soak_seed(config)}, {settings.max_time_s:.0f} s"
    on = f", imports {', '.join(settings.imports)}" if settings.imports else ""
    on += f", start {settings.start}" if settings.start != "auto" else ""
    known = len(settings.known.entries)
    audited = "" if settings.audits and max(settings.world_sizes) > 1 else "; not audited"
    return [
        f"equivtest {version_of('equivtest')}: torch {version_of('torch')}, "
        f"backend {settings.backend} on {settings.device}{on}, {known} known failure{'s' * (known != 1)}",
        f"equivtest profile {settings.profile_name}: {seeds}; world sizes {_join(settings.world_sizes)}; "
        f"dtypes {_join(settings.dtypes)}{audited}",
        *_duration(config),
    ]


def _duration(config: pytest.Config) -> list[str]:
    minutes = settings_of(config).profile.minutes
    if not minutes or str(properties_dir()) not in config.args:
        return []
    return [
        f"equivtest duration: about {minutes} minutes for all shipped properties on two quiet cores, as measured; "
        f"{num_cores()} cores here"
    ]


def _join(values: tuple[object, ...]) -> str:
    return " ".join(str(value) for value in values)
