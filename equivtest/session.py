"""What the controller does: collects findings, reports every claim as a test, writes the report."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any, Literal

import pytest

from equivtest.errors import BrokenSetup, EquivtestError
from equivtest.machine import commit_of, machine_facts, own_commit, versions_of
from equivtest.options import settings_of, soak_seed
from equivtest.ranks.gloo import WORKERS
from equivtest.ranks.poison import poison_in_words
from equivtest.report import audits
from equivtest.report.files import begin_report, write_report
from equivtest.report.folder import ReportFolder
from equivtest.report.tally import CONCLUSIVE, ClaimResult, Tally
from equivtest.report.text import BEGUN, ENDED, on_faults, on_lacking, summarize
from equivtest.suite import version_of

FAILED_EXIT = 1
MISUSE_EXIT = 2


class Controller:
    """The findings of a session, in the process that prints; workers of xdist have none."""

    def __init__(self, config: pytest.Config, started_s: float) -> None:
        self.config = config
        self.tallies: dict[str, Tally] = {}
        self.known: list[dict[str, Any]] = []
        self.audits: dict[str, dict[str, Any]] = {}  # by the property's id
        self.lines: list[str] = []  # of verdicts.jsonl
        self.starts: set[str] = set()  # how ranks were started, in words
        self.reported: set[str] = set()
        self.stopped = False
        self.misused = 0  # items that ended so
        self.started_s = started_s
        self.faults: dict[str, dict[str, Any]] = {}  # by text: each xdist worker finds them
        self.absent: list[str] = []  # why properties were not run
        self.troubles: list[str] = []  # what makes the run no success besides failing tests
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

    def receive(self, payload: str) -> None:
        """Takes what one item has found.

        Raises:
            pytest.exit.Exception: no further item can run.
        """
        data = json.loads(payload)
        if "fatal" in data:
            self.stopped = True
            pytest.exit(f"equivtest: {data['fatal']}", returncode=MISUSE_EXIT)
        is_misused = "misuse" in data
        self.misused += is_misused
        self.faults |= {fault["text"]: fault for fault in data.get("faults", [])}
        if "absent" in data:
            self.absent.append(data["absent"])
        if "known" in data:
            self.known.append(data["known"])
        if "property" in data:
            self.starts.add(data["start"])
            tally = self.tally_of(data["property"])
            if data["part"]["label"] not in tally.done:
                ended = not is_misused or "audit" in data
                tally.add(data["part"]["label"], data["records"], data["failures"], ended=ended)
            if left_out := data.get("left_out"):
                tally.left_out.update(left_out)
                self.absent.append(f"{tally.meta['name']}: no case can be judged in {', '.join(left_out)}")
            if "audit" in data:
                self.audits[tally.id] = data["audit"] | {"property": tally.meta["name"]}
                tally.unshown = data["audit"]["problem"]
            if settings_of(self.config).report_dir is not None:
                self.lines += [json.dumps(record) for record in data["records"]]

    def tally_of(self, meta: dict[str, Any]) -> Tally:
        """The tally of a property, made where it is the first word of it."""
        tally = Tally({name: value for name, value in meta.items() if name != "planned"}, tuple(meta["planned"]))
        return self.tallies.setdefault(tally.id, tally)

    def add_manifest(self, properties: list[dict[str, Any]]) -> None:
        """Takes note of every property of the session, those that never began included."""
        for meta in properties:
            self.tally_of(meta)

    def report_claims(self, session: pytest.Session, *, at_end: bool = False) -> None:
        """Reports the claims of every property whose searches have all ended, each once."""
        if settings_of(self.config).profile.audits_alone:
            return
        for tally in list(self.tallies.values()):
            if tally.id in self.reported or not (at_end or tally.is_complete):
                continue
            self.reported.add(tally.id)
            for result in tally.claims():
                self._emit_claim(session, tally, result)
            settings = settings_of(self.config)
            if settings.profile.requires_cells and tally.is_complete:
                holes = tally.holes(settings.dtypes, settings.allowed)
                way_out = "--dtypes and --world-sizes leave out what a device or a module cannot hold or compute, "
                way_out += "--allow-unsupported names what a backend may refuse"
                text = "\n".join(["required cells without a conclusion:", *(f"  {hole}" for hole in holes), way_out])
                self._emit_claim(session, tally, ClaimResult("coverage", "failed" if holes else "passed", text))

    def _emit_claim(self, session: pytest.Session, tally: Tally, result: ClaimResult) -> None:
        self._emit(session, tally.meta["path"], tally.meta["name"], result)

    def _emit(self, session: pytest.Session, path: str, name: str, result: ClaimResult) -> None:
        """One claim as a test of its own: in the terminal, in JUnit, in the exit status."""
        node_id = f"{path}::{name}::{result.claim}"
        location = (path, None, f"{name}: {result.claim}")
        session.testscollected += 1  # or the terminal's progress would pass 100 %
        outcome: Literal["passed", "failed", "skipped"] = "passed"
        longrepr: str | tuple[str, int, str] | None = None
        extra: dict[str, Any] = {}
        if result.outcome == "failed":
            outcome, longrepr = "failed", result.text
        elif result.outcome == "skipped":
            outcome, longrepr = "skipped", (path, 0, f"Skipped: {result.text}")
        elif result.outcome == "xfailed":
            outcome, longrepr, extra = "skipped", result.text, {"wasxfail": result.text}
        now_s = time.time()
        for when in ("setup", "call", "teardown"):
            called = when == "call"
            report = pytest.TestReport(
                node_id, location, {}, outcome if called else "passed", longrepr if called else None, when,
                start=now_s, stop=now_s, **(extra if called else {}),
            )  # fmt: skip
            self.config.hook.pytest_runtest_logreport(report=report)

    def finish(self, session: pytest.Session, state: str, concluded: int) -> None:
        """Reports what is left, writes the report, and sets the exit status where nothing was proven.

        Args:
            state: ENDED, or what ended the run before its end.
            concluded: Tests of the session that passed, failed or fail as known, others' included.
        """
        self.troubles += on_faults(self.faults.values())
        if not self.stopped:
            self._conclude(session, concluded)
        if not self.write(state):
            session.exitstatus = MISUSE_EXIT

    def _conclude(self, session: pytest.Session, concluded: int) -> None:
        self.report_claims(session, at_end=True)
        if lacking := on_lacking(self.ordered(), settings_of(self.config).allowed):
            self._emit(session, "equivtest", "backend", ClaimResult("supports", "failed", lacking[0]))
            self.troubles += lacking
            session.exitstatus = session.exitstatus or FAILED_EXIT
        if self.misused and session.testsfailed == self.misused and not self.faults:  # no claim has failed
            session.exitstatus = MISUSE_EXIT
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
        return sorted(self.tallies.values(), key=lambda tally: tally.id)

    def ordered_known(self) -> list[dict[str, Any]]:
        """What the items of known failures reported, by id."""
        return sorted(self.known, key=lambda entry: str(entry["id"]))

    def ordered_audits(self) -> list[dict[str, Any]]:
        """What the audits have shown, by the properties' ids."""
        return [self.audits[name] for name in sorted(self.audits)]

    def summary(self, width: int) -> list[str]:
        """What stands at the end of the terminal's output."""
        if self.stopped:
            return []
        starts = [f"start   {start}" for start in sorted(self.starts) if "(" in start]
        if settings_of(self.config).profile.audits_alone:
            return starts + audits.table(self.ordered_audits())
        return starts + summarize(
            self.ordered(),
            seconds=time.time() - self.started_s,
            known=self.ordered_known(),
            audits=self.ordered_audits(),
            width=width,
            wants_cells=settings_of(self.config).profile.per_cell > 0,
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
            "start": "; ".join(sorted(self.starts)) or settings.start,
            "releases_of_imports": versions_of(settings.imports),
            "folder_commit": commit_of(Path.cwd()),
            "allow_unsupported": sorted(settings.allowed),
            "arithmetic": settings.arithmetic or "torch on the CPU, gloo",
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
    """What a run is about, in two lines above its first result."""
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
    ]


def _join(values: tuple[object, ...]) -> str:
    return " ".join(str(value) for value in values)
