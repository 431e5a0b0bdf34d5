"""Runs the controller's part of a session: collects results, reports every claim as a test, and writes the report."""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from equivtest.base.users_code import digest_of
from equivtest.bundle.contents import suite_digest
from equivtest.bundle.manifest import differences, read_manifest
from equivtest.bundle.write import payload_of, write_bundle
from equivtest.errors import BrokenSetup, EquivtestError, reason_of
from equivtest.pytest_plugin.claim_reports import report_claim
from equivtest.pytest_plugin.machine import commit_of, machine_facts, own_commit, versions_of
from equivtest.pytest_plugin.options import settings_of, soak_seed
from equivtest.pytest_plugin.pools import host_events, hosts_of
from equivtest.pytest_plugin.resume import endings_key, endings_of, take
from equivtest.pytest_plugin.settings import SHIPPED_LIST
from equivtest.pytest_plugin.suite import properties_dir, shipped, version_of
from equivtest.ranks.gloo import WORKERS
from equivtest.ranks.poison import poison_in_words
from equivtest.report import audits, levels
from equivtest.report.files import begin_report, write_report
from equivtest.report.folder import ReportFolder
from equivtest.report.handover import Handover, Manifest
from equivtest.report.log import LOG, SCHEMA, Entry, RunLog, open_log
from equivtest.report.results import FAILED_EXIT, MISUSE_EXIT, Results
from equivtest.report.tally import ClaimResult, Tally
from equivtest.report.text import BEGUN, ENDED, on_faults, summarize


class Controller:
    """Collects the results of a session, in the process that prints. An xdist worker has no controller."""

    def __init__(self, config: pytest.Config, started_s: float) -> None:
        self.config = config
        settings = settings_of(config)
        self.results = Results(
            keeps_records=settings.report_dir is not None or bool(settings.bundle or settings.manifest)
        )
        self.reported: set[str] = set()
        self.stopped = False
        self.started_s = started_s
        self.troubles: list[str] = []  # reasons besides failing tests why the run is no success
        self.host_events: list[str] = []  # losses, refusals and silences of other hosts
        self.state = BEGUN
        self.unclaimed: list[str] = []  # collectives that hold, and that the manifest does not claim
        self.bundled = ""  # line that says where the bundle is
        self.folder: ReportFolder | None = None
        self.log: RunLog | None = None
        self.selection = ""  # see `Manifest`
        self.concluded = self.failed = 0  # tests of any plugin

    def begin(self) -> None:
        """Reserves the folder of --report, if there is one, and replaces an earlier report by a report on a begun run.

        Raises:
            Misuse, BrokenSetup: another run writes into the folder, or this run cannot write into it.
        """
        directory = settings_of(self.config).report_dir
        if directory is None:
            return
        folder = ReportFolder(directory)
        try:
            environment = self.environment()
            resumed = settings_of(self.config).resumed_dir
            taken = take(resumed, environment) if resumed is not None else ()
            folder.clear()
            begin_report(directory, environment)
            self.log = open_log(directory)
            self._log(Entry(environment=environment))
            self._add_taken(taken)
        except EquivtestError:
            folder.leave()
            raise
        self.folder = folder

    def _add_taken(self, taken: tuple[Handover, ...]) -> None:
        self.config.stash[endings_key] = endings_of(taken)
        for handover in taken:
            self.results.add(handover)
            self._log(Entry(handover=handover))

    def leave(self) -> None:
        """Releases the folder of the report.  If the session did not end, the report first gets the reason."""
        if self.folder is not None:
            if self.state == BEGUN:
                self.write("interrupted before anything was collected")
            self.folder.leave()

    def receive(self, handover: str) -> None:
        """Adds a `Handover`, which one item sends as JSON.

        Raises:
            pytest.exit.Exception: no further item can run.
        """
        handed = msgspec.json.decode(handover, type=Handover)
        if handed.fatal:
            self.stopped = True
            pytest.exit(f"equivtest: {handed.fatal}", returncode=MISUSE_EXIT)
        self.results.add(handed)
        self._log(Entry(handover=handed))

    def _log(self, entry: Entry, *, is_last: bool = False) -> None:
        """Appends a line to the log of the report, unless an earlier line could not be written."""
        if self.log is None:
            return
        try:
            self.log.add(entry)
            if is_last:
                self.log.close()
        except OSError as error:
            self.log = None
            self.troubles.append(f"cannot write {LOG}: {reason_of(error)}")

    def add_manifest(self, manifest: Manifest) -> None:
        """Adds the list of all properties of the session, so that the report also shows properties that never began."""
        self.selection = manifest.selection
        self.results.add_properties(manifest.properties)
        self._log(Entry(properties=manifest.properties))

    def report_claims(self, session: pytest.Session, *, at_end: bool = False) -> None:
        """Reports, once, the claims of every property whose searches have all ended."""
        if settings_of(self.config).profile.audits_alone:
            return
        for tally in list(self.results.tallies.values()):
            if tally.listed.id in self.reported or not (at_end or tally.is_complete):
                continue
            self.reported.add(tally.listed.id)
            for result in tally.claims():
                report_claim(session, tally.listed.path, tally.listed.name, result, tally.listed.line)
            settings = settings_of(self.config)
            if settings.profile.requires_cells and tally.is_complete:
                holes = self._holes(tally)
                way_out = "use --dtypes and --world-sizes to leave out what a device or a module cannot hold or "
                way_out += "compute, and --allow-unsupported for what a backend may refuse"
                text = "\n".join(
                    ["these required cells have no conclusive verdict:", *(f"  {hole}" for hole in holes), way_out]
                )
                result = ClaimResult("coverage", "failed" if holes else "passed", text)
                report_claim(session, tally.listed.path, tally.listed.name, result, tally.listed.line)

    def finish(self, session: pytest.Session, state: str, concluded: int) -> None:
        """Reports the remaining claims, writes the report, and sets the exit status if nothing was proven.

        Args:
            state: ENDED, or the reason why the run ended early.
            concluded: Number of the session's tests that passed, failed, or are known failures. It includes tests of
                other plugins.
        """
        self.host_events = host_events(self.config)
        self.concluded = concluded
        if self.stopped:
            self.troubles += on_faults(self.results.faults.values())
        else:
            self._conclude(session, concluded)
        if not (self.write(state) and self.write_bundle()):
            session.exitstatus = MISUSE_EXIT

    def _conclude(self, session: pytest.Session, concluded: int) -> None:
        self.report_claims(session, at_end=True)
        settings = settings_of(self.config)
        if lacking := self.results.lacking(settings.excused):
            report_claim(session, "equivtest", "backend", ClaimResult("supports", "failed", lacking[0]))
        self.failed = session.testsfailed
        status, audits_alone = int(session.exitstatus), settings.profile.audits_alone
        session.exitstatus, reasons = self.results.conclude(
            status, self.failed, concluded, settings.excused, audits_alone=audits_alone
        )
        self.troubles += reasons
        if settings.manifest is not None:
            records = self.results.records
            self.unclaimed, unjudged = differences(read_manifest(settings.manifest), records)
            if unjudged and settings.profile.requires_cells and not settings.subjects:
                self.troubles.append(f"the manifest claims these, but no verdict is on them: {', '.join(unjudged)}")
                session.exitstatus = session.exitstatus or FAILED_EXIT
        if expired := settings.known.expired:
            self.troubles += [
                f"the known failure {entry.id} expired on {entry.expires}: {entry.reason}" for entry in expired
            ]
            session.exitstatus = session.exitstatus or FAILED_EXIT

    def write(self, state: str) -> bool:
        """Writes the report.  Returns False if the report could not be written."""
        self.state = state
        if self.folder is None:
            return True
        environment = self.environment()
        self._log(Entry(environment=environment), is_last=True)
        try:
            write_report(self.folder.path, environment, self.results, self.troubles)
        except BrokenSetup as error:
            self.troubles.append(str(error))
            return False
        return self.log is not None

    def write_bundle(self) -> bool:
        """Writes the bundle.  Returns False if the bundle could not be written."""
        settings = settings_of(self.config)
        if settings.bundle is None:
            return True
        environment = self.environment()
        try:
            files = payload_of(environment, self.results, self.troubles, self._holes)
            digest = write_bundle(settings.bundle, environment, files)
        except BrokenSetup as error:
            self.troubles.append(str(error))
            return False
        self.bundled = f"bundle  {settings.bundle}: digest {digest}; equivtest verify {settings.bundle.name}"
        return True

    def _holes(self, tally: Tally) -> list[str]:
        """Returns the required cells without a conclusion.  A property with searches still to end has none."""
        settings = settings_of(self.config)
        if not (settings.profile.requires_cells and tally.is_complete):
            return []
        return tally.holes(settings.dtypes, settings.excused)

    def _levels(self) -> list[str]:
        """Returns lines on the levels that a run of all shipped properties in the profile `conformance` has reached."""
        settings = settings_of(self.config)
        is_part = settings.shard is not None or str(properties_dir()) not in self.config.args
        if not settings.profile.requires_cells or is_part or self.state == BEGUN:
            return []
        tallies = self.results.ordered()
        holes = {tally.listed.name: self._holes(tally) for tally in tallies}
        return list(levels.in_lines(levels.levels_of(tallies, levels.required_of(shipped()), holes)))

    def summary(self) -> list[str]:
        """Returns the lines of the summary for the terminal: without tables unless pytest's option is -v."""
        if self.stopped:
            return []
        starts = [f"report  {self.folder.path}/report.html"] if self.folder is not None else []
        starts += [self.bundled] * bool(self.bundled) + [f"host    {event}" for event in self.host_events]
        starts += [f"claims  hold, although the manifest does not claim them: {', '.join(self.unclaimed)}"] * bool(
            self.unclaimed
        )
        starts += [f"start   {start}" for start in sorted(self.results.starts) if "(" in start]
        if settings_of(self.config).profile.audits_alone:
            return starts + audits.table(self.results.ordered_audits())
        return starts + summarize(
            self.results.ordered(),
            seconds=time.time() - self.started_s,
            known=self.results.ordered_known(),
            audits=self.results.ordered_audits(),
            is_brief=self.config.option.verbose <= 0,
            wants_cells=settings_of(self.config).profile.per_cell > 0,
            left_out=sorted(self.results.left_out),
            is_first_look=settings_of(self.config).profile.is_first_look,
            levels=self._levels(),
        )

    def environment(self) -> dict[str, Any]:
        settings = settings_of(self.config)
        return {
            "schema": SCHEMA,
            "equivtest": version_of("equivtest"),
            "equivtest_commit": own_commit(),
            "suite_digest": suite_digest(),
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
            "left_out": sorted(self.results.left_out),
            "start": "; ".join(sorted(self.results.starts)) or settings.start,
            "releases_of_imports": versions_of(settings.imports),
            "folder": os.getcwd(),
            "folder_commit": commit_of(Path.cwd()),
            "python_path": os.environ.get("PYTHONPATH", ""),
            "allow_unsupported": sorted(settings.allowed),
            "excused": sorted(settings.excused),
            **({"shard": "/".join(map(str, settings.shard)), "selection": self.selection} if settings.shard else {}),
            **({"hosts": hosts_of(self.config), "host_events": self.host_events} if settings.listen else {}),
            "arithmetic": settings.arithmetic or "torch on the CPU, gloo",
            **({"declared": settings.declared} if settings.arithmetic else {}),
            "profile": settings.profile_name,
            "seeds": soak_seed(self.config) if settings.profile.repeats else "gate",
            "world_sizes": list(settings.world_sizes),
            "dtypes": list(settings.dtypes),
            "subjects": [f"{name}={subject}" if subject != name else name for name, subject in settings.subjects],
            "manifest": str(settings.manifest or ""),
            "known_failures": ", ".join(settings.known_failures) or "none",
            "own_lists": {name: digest_of(name) for name in settings.known_failures if name != SHIPPED_LIST},
            "audit": "on" if settings.audits else "off",
            "command": sys.argv,
            "rootdir": str(self.config.rootpath),
            "failed": self.failed,
            "concluded": self.concluded,
            **({"levels": reached} if (reached := self._levels()) else {}),
            "complete": self.state == ENDED and self.results.are_complete,
            "state": self.state,
            "process": os.getpid(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.started_s)),
            "seconds": round(time.time() - self.started_s, 1),
        }


STOPS = {int(pytest.ExitCode.USAGE_ERROR): "mistaken options", int(pytest.ExitCode.INTERNAL_ERROR): "an internal error"}
"""Exit status of a session that no exception ended -> the reason why it ended early."""


def state_of(exitstatus: int, ended_by: BaseException | None) -> str:
    if isinstance(ended_by, pytest.exit.Exception):
        return str(ended_by.msg)
    if ended_by is not None:
        text = str(ended_by) or "Ctrl-C"
        return f"interrupted by {text}" if text in ("Ctrl-C", "SIGTERM") else text
    return STOPS.get(int(exitstatus), ENDED)
