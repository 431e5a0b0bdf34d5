"""A plugin of `equivtest run` that prints the progress: one live line on a terminal, otherwise a new line every 30 s.

The thread that prints has its own copy of the terminal's file descriptor, because pytest captures the usual one while
an item runs.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

import pytest

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

INTERVAL_S = 30.0
LEAST_DONE = 0.05
"""Fraction of the work that must be done before the estimate of the time left is shown."""
MOST_RUNNING = 2
_ITEM = re.compile(r"(?P<name>.+)\[(?:w(?P<world_size>\d+)-.*|audit)\]")


@dataclass
class State:
    """The items of a run that are planned, running and ended.

    Attributes:
        running: Items that run now, in the order in which they began.
        failed: Properties that have failed.
        started_s: Time at which the first item began.
    """

    planned: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    running: dict[str, None] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    started_s: float = 0.0

    def line(self, cases: int, now_s: float) -> str:
        properties = {property_of(item) for item in self.planned} - {""}
        open_ = {property_of(item) for item in self.planned - self.ended}
        found = [f"{len(properties - open_)} of {len(properties)} properties done", f"{cases:,} cases judged"]
        found.append(f"{len(self.failed)} failed")
        if left := self._time_left(now_s):
            found.append(left)
        names = [item.rpartition("::")[2] for item in list(self.running)[:MOST_RUNNING]]
        more = f" and {len(self.running) - MOST_RUNNING} more" if len(self.running) > MOST_RUNNING else ""
        return ", ".join(found) + (f"; now {', '.join(names)}{more}" if names else "")

    def _time_left(self, now_s: float) -> str:
        total, done = (sum(map(weight_of, items)) for items in (self.planned, self.ended & self.planned))
        if not total or done < LEAST_DONE * total:
            return ""
        seconds = (now_s - self.started_s) * (total - done) / done
        return f"about {seconds / 60:.0f} min left" if seconds > 90 else f"about {seconds:.0f} s left"


def property_of(item: str) -> str:
    """Returns the property of a search or an audit, from its node id, or '' for any other item."""
    found = _ITEM.fullmatch(item)
    return found["name"] if found else ""


def weight_of(item: str) -> int:
    """Returns roughly how long an item takes, without a unit."""
    found = _ITEM.fullmatch(item)
    return 1 if found is None else 1 + int(found["world_size"] or 2)


def pytest_configure(config: pytest.Config) -> None:
    is_listed = config.option.collectonly or config.option.verbose != 0
    if not hasattr(config, "workerinput") and not is_listed:
        config.pluginmanager.register(Progress(config), "equivtest-progress")


class Progress:
    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.state = State()
        self.out: TextIO = os.fdopen(os.dup(sys.__stdout__.fileno()), "w") if sys.__stdout__ else sys.stdout
        self.is_live = self.out.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
        self.stop: Callable[[], None] | None = None

    @property
    def line(self) -> str:
        controller = getattr(self.config.pluginmanager.get_plugin("equivtest-controller"), "found", None)
        tallies = list(controller.results.tallies.values()) if controller is not None else []
        return self.state.line(sum(tally.layouts for tally in tallies), time.monotonic())

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.state.planned |= {item.nodeid for item in session.items}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Iterable[str]) -> None:
        self.state.planned |= set(ids)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self.stop is None:
            self.state.started_s = time.monotonic()
            self._start()
        self.state.running[nodeid] = None

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and property_of(report.nodeid):
            self.state.failed.add(property_of(report.nodeid))
        if report.when == "teardown" and report.nodeid in self.state.running:
            del self.state.running[report.nodeid]
            self.state.ended.add(report.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self, report: object) -> Generator[None, Any, Any]:
        """Hides the letters that pytest prints for tests while the live line is shown."""
        status = yield
        return (status[0], "", "") if self.is_live and status else status

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        if self.stop is not None:
            self.stop()
        self.out.close()

    def _start(self) -> None:
        if self.is_live:
            reporter: Any = self.config.pluginmanager.get_plugin("terminalreporter")
            reporter.ensure_newline()
            reporter.showfspath = False
            live = _live_line(self._render, self.out)
            live.start()
            self.stop = live.stop
            return
        over = threading.Event()
        thread = threading.Thread(target=self._print_lines, args=(over,), daemon=True)
        thread.start()

        def stop() -> None:
            over.set()
            thread.join()

        self.stop = stop

    def _print_lines(self, over: threading.Event) -> None:
        while not over.wait(INTERVAL_S):
            print(f"\nequivtest: {self.line}", file=self.out, flush=True)

    def _render(self) -> Text:
        from rich.text import Text

        line = Text(self.line, no_wrap=True, overflow="ellipsis")
        line.highlight_regex(r"\b[1-9]\d* failed", "bold red")
        return line


def _live_line(render: Callable[[], Text], out: TextIO) -> Live:
    """Returns a line on the terminal that shows the text of `render`. rich leaves out colours if NO_COLOR is set."""
    from rich.console import Console
    from rich.live import Live

    console = Console(file=out, force_terminal=True)
    return Live(get_renderable=render, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
