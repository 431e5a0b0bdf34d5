"""Says where the time of a run of pytest goes: `python -m pytest -n auto --dist loadfile -p studies.spent`.

Counts the CPU time of each test with that of every process below it, ranks included: wall time depends on what else the
machine does, and a test that waits is seen by the difference between the two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator

import psutil
import pytest

NUM_TESTS = 50  # shown, the slowest first


class Spent:
    """Seconds of each test, of processors and of the clock."""

    def __init__(self) -> None:
        self._before_s = cpu_s()
        self._of: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Hangs the CPU time of a phase of the test on its report, which xdist sends to the controller."""
        report = yield
        now_s = cpu_s()
        report.cpu_s, self._before_s = max(0.0, now_s - self._before_s), now_s
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        of = self._of[report.nodeid]
        of[0] += getattr(report, "cpu_s", 0.0)  # the result of a claim is of no phase of a test
        of[1] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints the sum, then each file, then the slowest tests; those that took the most time of processors first."""
        if not self._of:
            return
        files: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0])
        for nodeid, spent in self._of.items():
            of = files[nodeid.partition("::")[0]]
            of[:] = of[0] + spent[0], of[1] + spent[1], of[2] + 1
        write = terminalreporter.write_line
        terminalreporter.section("CPU seconds, seconds")
        total = [sum(column) for column in zip(*files.values(), strict=True)]
        write(f"{total[0]:8.1f} {total[1]:8.1f}  all {total[2]} tests")
        for name, of in sorted(files.items(), key=lambda item: -item[1][0]):
            write(f"{of[0]:8.1f} {of[1]:8.1f}  {of[2]:4d} tests  {name}")
        for name, of in sorted(self._of.items(), key=lambda item: -max(item[1]))[:NUM_TESTS]:
            write(f"{of[0]:8.1f} {of[1]:8.1f}  {name}")


def cpu_s() -> float:
    """CPU seconds of this process and of all below it, those that have ended and were waited for included."""
    total = 0.0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.Error:  # has ended since it was listed
            continue
    return total


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Spent(), "spent")
