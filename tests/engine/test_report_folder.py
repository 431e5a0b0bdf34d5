"""The folder of --report belongs to one run, from its first second."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis  # noqa: F401  (what runs in this process import is dropped behind each, and torch dies of it)
import pytest

import equivtest.pytest_plugin.session
import equivtest.verdicts.claims  # noqa: F401
from equivtest.base.files import write_whole
from equivtest.errors import Misuse
from equivtest.report.folder import ReportFolder
from tests.engine.fake_suite import log_of, make_suite, plugin_args, run_suite

ARGS = ("--report=out", "--world-sizes=3", "--known-failures=none")
REPLAY = "failures/a-equals_unsharded-value-0123abcd.json"
LIMIT_S = 60.0  # for a run to come up on a loaded machine


@pytest.fixture
def out(pytester: pytest.Pytester) -> Path:
    """A folder with the report of a green run, a replay file, and the user's own files."""
    make_suite(pytester, "a")
    assert run_suite(pytester, *ARGS).ret == 0
    folder = pytester.path / "out"
    assert environment_of(folder)["complete"]
    (folder / "failures").mkdir()
    for name in (REPLAY, "failures/mine.json", "notes.txt"):
        (folder / name).write_text("{}")
    (pytester.path / "log").unlink()
    return folder


def environment_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "environment.json").read_text())
    return found


def first_words(folder: Path) -> list[str]:
    """Returns the first line of the page and of the summary."""
    page = (folder / "report.html").read_text().partition("</h1>")[2].partition("</p>")[0]
    return [page.rpartition(">")[2], (folder / "summary.txt").read_text().splitlines()[0]]


@contextmanager
def hanging(pytester: pytest.Pytester, workers: int) -> Iterator[subprocess.Popen[str]]:
    """A run whose first search hangs, leader of its session as in a shell."""
    make_suite(pytester, "a_hangs")
    command = [sys.executable, "-m", "pytest", *plugin_args(), f"-n{workers}", "-p", "no:cacheprovider", *ARGS]
    with subprocess.Popen(
        command, cwd=pytester.path, start_new_session=True, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:  # fmt: skip
        try:
            until_s = time.monotonic() + LIMIT_S
            while "hanging" not in log_of(pytester):
                assert time.monotonic() < until_s and process.poll() is None
                time.sleep(0.02)
            yield process
        finally:
            process.kill()


def test_run_removes_only_the_report_files_of_an_earlier_run(pytester: pytest.Pytester, out: Path) -> None:
    run_suite(pytester, *ARGS, "--junitxml=mine.xml")

    assert not (out / REPLAY).exists() and not (out / "junit.xml").exists()
    assert (out / "failures" / "mine.json").exists() and (out / "notes.txt").exists()


def test_report_folder_of_a_green_run_has_no_failures_folder(pytester: pytest.Pytester, out: Path) -> None:
    (out / "failures" / "mine.json").unlink()

    run_suite(pytester, *ARGS)

    assert environment_of(out)["complete"] and not (out / "failures").exists()


@pytest.mark.parametrize("args", [["--collect-only"], ["--fixtures"], ["--help"], ["--backend=nope"]])
def test_session_without_a_run_does_not_change_the_folder(
    pytester: pytest.Pytester, out: Path, args: list[str]
) -> None:
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}

    run_suite(pytester, *ARGS, *args)

    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(("number", "word", "workers"), [(signal.SIGINT, "Ctrl-C", 1), (signal.SIGTERM, "SIGTERM", 0)])
def test_report_of_an_interrupted_run_begins_with_the_interruption(
    pytester: pytest.Pytester, out: Path, number: signal.Signals, word: str, workers: int
) -> None:
    with hanging(pytester, workers) as process:
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        process.communicate(timeout=LIMIT_S)

    told = f"This run did not end (interrupted by {word}): "
    assert all(words.startswith(told) for words in first_words(out))
    assert not environment_of(out)["complete"] and environment_of(out)["state"] == f"interrupted by {word}"
    assert (out / "verdicts.jsonl").read_text() == "" and not (out / REPLAY).exists()


def test_report_of_a_run_interrupted_before_collection_begins_with_the_interruption(
    pytester: pytest.Pytester, out: Path
) -> None:
    """pytest does not end such a session as it ends others."""
    conftest = pytester.path / "conftest.py"
    conftest.write_text(conftest.read_text() + "\n\ndef pytest_sessionstart():\n    raise KeyboardInterrupt\n")

    run_suite(pytester, *ARGS, subprocess=True)

    told = "This run did not end (interrupted before anything was collected): nothing was judged."
    assert first_words(out) == [told, told]


def test_report_of_a_broken_set_up_begins_with_the_reason(pytester: pytest.Pytester, out: Path) -> None:
    make_suite(pytester, "b_broken")

    run_suite(pytester, *ARGS)

    told = "This run did not end (equivtest: BrokenSetup: no rank started): "
    assert all(words.startswith(told) for words in first_words(out)) and not environment_of(out)["complete"]


def test_report_of_a_run_that_stops_at_its_first_failure_is_marked_incomplete(
    pytester: pytest.Pytester, out: Path
) -> None:
    make_suite(pytester, "a_wrong", "b")

    run_suite(pytester, *ARGS, "-x", "-n1", "--maxschedchunk=1")

    assert not environment_of(out)["complete"]
    assert all(words.startswith("This run did not end (stopping after 1 failures): ") for words in first_words(out))


def test_report_of_a_run_without_a_property_is_marked_incomplete(pytester: pytest.Pytester, out: Path) -> None:
    pytester.makepyfile(test_fake="def test_it(): pass")

    run_suite(pytester, *ARGS)

    assert not environment_of(out)["complete"] and first_words(out) == ["This run judged nothing."] * 2


def test_report_folder_refuses_a_second_run_until_the_first_is_killed(pytester: pytest.Pytester, out: Path) -> None:
    """Until the next run the report says when the killed one began."""
    with hanging(pytester, 0) as process:
        begun = environment_of(out)
        result = run_suite(pytester, *ARGS)
        process.kill()
        process.communicate(timeout=LIMIT_S)

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    told = f"(process {process.pid}, started {begun['started']}): wait for its end, or name another folder"
    result.stderr.fnmatch_lines([f"ERROR: equivtest: --report: another run writes to {out} {told}"])
    found = environment_of(out)
    told = f"This run began at {found['started']} in process {process.pid} and has not ended; "
    assert found == begun and all(words.startswith(told) for words in first_words(out))
    assert (found["complete"], found["state"], found["process"]) == (False, "begun", process.pid)
    assert not any((out / name).exists() for name in ("verdicts.jsonl", "cells.csv", "junit.xml", REPLAY))

    make_suite(pytester, "a")
    assert run_suite(pytester, *ARGS).ret == 0 and environment_of(out)["complete"]


def test_report_folder_can_be_used_again_after_its_run(tmp_path: Path) -> None:
    folder = ReportFolder(tmp_path)
    with pytest.raises(Misuse, match=rf"another run writes to {tmp_path}: wait for its end"):
        ReportFolder(tmp_path)
    folder.leave()
    folder.leave()

    ReportFolder(tmp_path).leave()


def test_failed_write_keeps_the_previous_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "file", b"earlier")
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(Path, "replace", lambda *names: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(OSError, match="no"):
        write_whole(tmp_path / "file", b"later")

    assert (tmp_path / "file").read_bytes() == b"earlier"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_file_that_was_left_half_written_is_removed(tmp_path: Path) -> None:
    for name in (".equivtest-17.part", "failures/.equivtest-17.part", ".equivtest-mine.part"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    folder = ReportFolder(tmp_path)
    folder.clear()
    folder.leave()

    assert [path.name for path in tmp_path.iterdir()] == [".equivtest-mine.part"]
