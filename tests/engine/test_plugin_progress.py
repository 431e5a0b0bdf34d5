"""The line that shows how far a run is."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading

import hypothesis  # noqa: F401  (what runs in this process import is dropped behind each, and torch dies of it)
import pytest

import equivtest.pytest_plugin.collection
import equivtest.pytest_plugin.session
import equivtest.verdicts.claims  # noqa: F401
from equivtest.pytest_plugin import progress
from tests.engine.fake_suite import make_suite, plugin_args, run_suite

UNKNOWN = "--known-failures=none"
SIZES = "--world-sizes=1,2"
SHOWN = ("-p", "equivtest.pytest_plugin.progress", SIZES)


def test_progress_is_printed_as_a_line_per_interval_without_a_terminal(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make_suite(pytester, "a", "b_slow")
    monkeypatch.setattr(progress, "INTERVAL_S", 0.01)

    run_suite(pytester, *SHOWN, "-s")

    lines = [line for line in capfd.readouterr().out.splitlines() if "properties done" in line]
    assert any("1 of 2 properties done" in line and line.endswith("; now b_slow[w2-0]") for line in lines)


@pytest.mark.parametrize("no_color", ["", "1"])
def test_progress_is_one_line_that_is_rewritten_on_a_terminal(pytester: pytest.Pytester, no_color: str) -> None:
    make_suite(pytester, "a_wrong", "b_slow")

    shown = on_terminal(pytester, [*SHOWN, "--world-sizes=3,4", "-n0"], {"NO_COLOR": no_color})

    assert "1 failed" in shown.replace("\x1b[1;31m", "").replace("\x1b[1m", "") and "properties done" in shown
    assert "test_fake.py .." not in shown
    assert ("\x1b[1;31m1 failed" in shown) == (not no_color)


def on_terminal(pytester: pytest.Pytester, args: list[str], environment: dict[str, str]) -> str:
    """Returns the text that a run writes to a terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "pytest", *plugin_args(), "-p", "no:cacheprovider", "--import-mode=importlib"]
    variables = {**os.environ, "TERM": "xterm", **environment}
    shown: list[bytes] = []

    def read() -> None:
        try:
            while text := os.read(ours, 4096):
                shown.append(text)
        except OSError:  # the other side is closed
            return

    reader = threading.Thread(target=read)
    reader.start()
    options = [*args, "--audit=off", UNKNOWN]
    subprocess.run([*command, *options], cwd=pytester.path, stdin=theirs, stdout=theirs, stderr=theirs, env=variables)
    os.close(theirs)
    reader.join(10)
    os.close(ours)
    return b"".join(shown).decode(errors="replace")


def test_progress_line_shows_properties_cases_failures_and_remaining_time() -> None:
    state = progress.State(planned={"t::a[w1-0]", "t::a[w3-0]", "t::b[audit]", "t::test_other"}, started_s=0.0)
    state.ended, state.running, state.failed = {"t::a[w1-0]", "t::a[w3-0]"}, {"t::b[audit]": None}, {"t::a"}

    line = state.line(1200, 6.0)

    assert line == "1 of 2 properties done, 1,200 cases judged, 1 failed, about 4 s left; now b[audit]"
