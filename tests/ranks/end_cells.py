"""One forced end of a run: start it, end it while its ranks are busy, look at what is left and at the next run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from tests.programs.ends import MARKS
from tests.ranks.leftovers import Marked, marked_run, wait_until_nothing

ROOT = Path(__file__).parents[2]
BUSY = ("runs", "hangs_in_python", "hangs_in_collective")
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGKILL")
SHORTAGES = {
    "disk full": "resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))",
    "no descriptor": "resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')), 4096))",
}
"""Way to end everything -> shortage from the start of the run; later an outside process causes it."""
WORKERS = {"pytest": 0, "worker": 1, "controller": 2}
"""Victim of a signal -> xdist workers of its run."""
START_S = 90.0  # for the ranks of a run to be busy; a loaded machine takes long to import torch
END_S = 90.0  # for a run to end without further help
LEFT_S = 20.0  # for what is left to go; the table says how long it took
HANG_S = 1.0  # limit of a case if the run continues after it
SUITE = """
import os, resource
import pytest
from equivtest.families.linear.case import LinearCase
from equivtest.pytest_plugin.pools import pool_of

CASE = LinearCase(world_size=2, style="colwise")
{shortage}


def outcomes(config, subject, limit_s):
    replies = pool_of(config).run(f"tests.programs.ends:{{subject}}", CASE, limit_s=limit_s)
    return {{reply.outcome for reply in replies}}


@pytest.mark.parametrize("number", range({num_busy}))
def test_busy(pytestconfig, number):
    assert outcomes(pytestconfig, "{busy}", {limit_s}) == {{"{outcome}"}}


def test_next(pytestconfig):
    assert outcomes(pytestconfig, "nothing", None) == {{"answered"}}
"""


@dataclass(frozen=True)
class Cell:
    """The victim (a process, or all by a shortage), how it ends, and its ranks' state meanwhile ('': none yet)."""

    what: str
    how: str
    busy: str

    def __str__(self) -> str:
        return f"{self.what}, {self.how}, {self.busy or 'from the start'}"

    @property
    def goes_on(self) -> bool:
        """True if the run must end without further help."""
        return self.what in ("worker", "server", "everything")


@dataclass(frozen=True)
class End:
    """Result of a forced end.

    Attributes:
        to_end_s: Time from the signal to the end of its victim.
        left_s: Time from there until no process that it had started was left.
        said: Exit code and last line of the run.
        problems: Problems of the ended run and of the next one; none is a pass.
    """

    to_end_s: float
    left_s: float
    said: str
    problems: tuple[str, ...]


def cells() -> list[Cell]:
    ended = [Cell(what, how, busy) for what in WORKERS for how in SIGNALS for busy in BUSY]
    server = [Cell("server", "SIGKILL", busy) for busy in BUSY]
    return ended + server + [Cell("everything", how, busy) for how in SHORTAGES for busy in ("", *BUSY)]


def run_cell(cell: Cell, folder: Path) -> End:
    """Ends a run as the cell says, in `folder`, then starts another one there."""
    end = end_run(cell, folder)
    return replace(end, problems=(*end.problems, *problems_of_next_run(folder)))


def end_run(cell: Cell, folder: Path) -> End:
    """Ends a run as the cell says, in `folder`."""
    run = marked_run(folder)
    with _started(cell, run) as process:
        if cell.busy:
            _wait_until_busy(cell, run, process)
        return _end(cell, run, process)


def problems_of_next_run(folder: Path) -> list[str]:
    """Starts a run in the folder of ended ones, and returns its problems."""
    run = marked_run(folder)
    with _started(Cell("pytest", "", ""), run) as process:
        words = process.communicate(timeout=END_S)[0]
    problems = [f"the next run fails: {words}"] * (process.returncode != 0)
    return problems + [f"left by the next run: {line}" for line in wait_until_nothing(run.left, LEFT_S)[1]]


def _end(cell: Cell, run: Marked, process: subprocess.Popen[str]) -> End:
    """Hits the run and waits for its end; if the run continues, for the end of the victim."""
    victim = _victim(cell, run, process)
    members = {victim.pid, *(child.pid for child in victim.children(recursive=True))}
    begun_s = time.monotonic()
    _strike(cell, run, process, victim)
    if victim.pid == process.pid:
        words = process.communicate(timeout=END_S)[0]
        ended_s = time.monotonic()
        left_s, left = wait_until_nothing(run.left, LEFT_S)
    else:
        wait_until_nothing(lambda: run.left_of({victim.pid}), END_S)  # whenever its parent buries it
        ended_s = time.monotonic()
        left_s, left = wait_until_nothing(lambda: run.left_of(members), LEFT_S)
        words = process.communicate(timeout=END_S)[0]
        left += wait_until_nothing(run.left, LEFT_S)[1]
    problems = [f"left: {line}" for line in left] + _judge(cell, process.returncode, words)
    return End(ended_s - begun_s, left_s, _said(process.returncode, words), tuple(problems))


def _victim(cell: Cell, run: Marked, process: subprocess.Popen[str]) -> psutil.Process:
    run.processes()  # so that it knows its family
    first = psutil.Process(process.pid)
    if cell.what == "worker":
        return first.children()[0]
    if cell.what == "server":
        return next(child for child in first.children() if "equivtest.ranks.server" in " ".join(child.cmdline()))
    return first


def _strike(cell: Cell, run: Marked, process: subprocess.Popen[str], victim: psutil.Process) -> None:
    """Sends the signal, or takes from every process what it may still open or write."""
    if cell.what == "everything":
        for member in run.processes() if cell.busy else []:
            limit = psutil.RLIMIT_FSIZE if cell.how == "disk full" else psutil.RLIMIT_NOFILE
            value = 0 if cell.how == "disk full" else member.num_fds()
            member.rlimit(limit, (value, member.rlimit(limit)[1]))
    elif cell.how == "SIGINT" and cell.what != "worker":
        os.killpg(process.pid, signal.SIGINT)  # Ctrl-C goes to all of a shell's job
    else:
        victim.send_signal(signal.Signals[cell.how])


def _judge(cell: Cell, code: int, words: str) -> list[str]:
    """Returns problems in the output of a run that must continue, or an exit code of 0 after an end."""
    if cell.goes_on:
        expected = {"worker": "1 failed, 1 passed", "server": "2 passed"}.get(cell.what, r"2 passed|ulimit .*-n")
        if (cell.what, cell.how) == ("worker", "SIGINT"):  # which xdist takes for the user's
            expected = "received keyboard-interrupt"
        return [f"does not say {expected!r}: {words}"] * (not re.search(expected, words))
    return ["its exit code is 0"] * (code == 0)


def _said(code: int, words: str) -> str:
    lines = [line.strip("= ") for line in words.splitlines() if line.strip("= ")]
    return f"{code}: {lines[-1] if lines else ''}"


@contextmanager
def _started(cell: Cell, run: Marked) -> Iterator[subprocess.Popen[str]]:
    """The first process of a run, leader of its session as in a shell; what is left of the run ends with the block."""
    marks = Path(f"{run.temporary}-marks")
    marks.mkdir()
    folder = run.temporary.parent
    (folder / "conftest.py").write_text("from equivtest.options import pytest_addoption\n")
    (folder / "test_ends.py").write_text(_suite(cell))
    workers = WORKERS.get(cell.what, 0)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", str(workers), "test_ends.py"]
    environment = {**os.environ, **run.environment, MARKS: str(marks), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=folder, env=environment, start_new_session=True, text=True, stdin=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            for found in run.processes():
                found.kill()


def _suite(cell: Cell) -> str:
    passes = cell.busy == "runs"
    limit_s = HANG_S if cell.what in ("server", "everything") and not passes else 600
    num_busy = max(WORKERS.get(cell.what, 0), 1) if cell.busy else 0
    shortage = SHORTAGES[cell.how] if cell.what == "everything" and not cell.busy else ""
    outcome = "answered" if passes else "timed_out"
    return SUITE.format(busy=cell.busy, num_busy=num_busy, limit_s=limit_s, outcome=outcome, shortage=shortage)


def _wait_until_busy(cell: Cell, run: Marked, process: subprocess.Popen[str]) -> None:
    marks = Path(f"{run.temporary}-marks")
    num_ranks = 2 * max(WORKERS.get(cell.what, 0), 1)
    deadline_s = time.monotonic() + START_S
    while len(list(marks.iterdir())) < num_ranks:
        if process.poll() is not None or time.monotonic() > deadline_s:
            process.kill()
            raise AssertionError(f"its ranks do not come up: {process.communicate()[0]}")
        time.sleep(0.01)
    time.sleep(0.1)  # each rank has reached its hang
