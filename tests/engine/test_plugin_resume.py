"""Runs that were killed and go on."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import hypothesis  # noqa: F401  (what runs in this process import is dropped behind each, and torch dies of it)
import pytest

import equivtest.pytest_plugin.collection
import equivtest.pytest_plugin.session
import equivtest.verdicts.claims  # noqa: F401
from equivtest.report.log import LOG, read_run
from tests.engine.fake_suite import log_of, make_suite, plugin_args, run_suite

UNKNOWN = "--known-failures=none"
SIZES = "--world-sizes=1,2"


def make_killed_run(pytester: pytest.Pytester) -> None:
    """Kills a run whose first search has ended, while the second one runs."""
    make_suite(pytester, "a", "b_hangs")
    command = [sys.executable, "-m", "pytest", *plugin_args(), "-p", "no:cacheprovider", "--import-mode=importlib"]
    options = ["-n0", "--audit=off", UNKNOWN, SIZES, "--report=out"]
    process = subprocess.Popen([*command, *options], cwd=pytester.path, stdout=subprocess.DEVNULL)
    until_s = time.monotonic() + 60
    while "hanging" not in log_of(pytester):
        assert time.monotonic() < until_s
        time.sleep(0.02)
    process.kill()
    process.wait()
    (pytester.path / "go").touch()
    (pytester.path / "log").unlink()


def searches(pytester: pytest.Pytester) -> list[str]:
    return sorted(line for line in log_of(pytester) if line.startswith("search"))


def written(folder: Path) -> dict[str, object]:
    """Returns the parts of a report that do not depend on the time."""
    names = sorted(case.get("name", "") for case in ElementTree.parse(folder / "junit.xml").iter("testcase"))
    return {"junit": names} | {name: (folder / name).read_text() for name in ("verdicts.jsonl", "cells.csv")}


@pytest.mark.parametrize("workers", ["0", "1"])
def test_resumed_run_writes_the_report_of_an_uninterrupted_run(pytester: pytest.Pytester, workers: str) -> None:
    make_killed_run(pytester)

    result = run_suite(pytester, UNKNOWN, SIZES, "--resume=out", "-n", workers)
    resumed = searches(pytester)
    run_suite(pytester, UNKNOWN, SIZES, "--report=whole")

    assert result.ret == 0
    assert resumed == ["search a w2 gate", "search b_hangs w1 gate", "search b_hangs w2 gate"]
    assert written(pytester.path / "out") == written(pytester.path / "whole")


def test_search_with_a_truncated_log_line_runs_again(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a")
    run_suite(pytester, SIZES, "--report=out")
    log = pytester.path / "out" / LOG
    log.write_bytes(log.read_bytes()[: log.stat().st_size // 2])
    (pytester.path / "log").unlink()

    result = run_suite(pytester, SIZES, "--resume=out")

    assert result.ret == 0 and "search a w2 gate" in searches(pytester)


def test_failure_of_an_interrupted_run_is_judged_again(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a_wrong")
    run_suite(pytester, "--world-sizes=2,3", "--report=out")
    (pytester.path / "log").unlink()

    result = run_suite(pytester, "--world-sizes=2,3", "--resume=out")

    assert result.ret == 1 and searches(pytester) == ["search a_wrong w3 gate"]


@pytest.mark.parametrize(
    ("options", "change", "line"),
    [
        (["--dtypes=float32"], "", "was judged with dtypes *, but this run has *float32*: run without --resume"),
        (["--shard=1/2"], "", "was judged with shard nothing, but this run has 1/2: run without --resume"),
        ([], "# changed", "was judged before *test_fake.py changed: run without --resume"),
        (
            ["--budget=3"],
            "",
            "--resume needs --profile smoke, gate or conformance without --budget, got --profile gate with --budget",
        ),
        (["--resume=no"], "", "no has no log: name a folder that equivtest run --report has written, *"),
    ],
    ids=["settings", "shard", "code", "budget", "no report"],
)
def test_resume_of_another_run_is_refused_in_one_line(
    pytester: pytest.Pytester, options: list[str], change: str, line: str
) -> None:
    make_suite(pytester, "a")
    run_suite(pytester, SIZES, "--report=out")
    with (pytester.path / "test_fake.py").open("a") as file:
        file.write(change)

    result = run_suite(pytester, SIZES, "--resume=out", *options)

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: equivtest: *{line}"])


def test_resume_is_refused_if_a_file_changed_during_the_interrupted_run(pytester: pytest.Pytester) -> None:
    """Its later searches were judged by what was imported before."""
    make_suite(pytester, "a_edits", "b")
    run_suite(pytester, SIZES, "--report=out")

    result = run_suite(pytester, SIZES, "--resume=out")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: equivtest: *was judged before *test_fake.py changed: run without --resume"])


def test_resume_is_refused_if_a_file_that_only_ranks_import_changed(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(pytester.path)
    make_suite(pytester, "a")
    with (pytester.path / "test_fake.py").open("a") as file:
        file.write("\nb = make('lib_of_mine:linear')\n")
    library = pytester.makepyfile(lib_of_mine="# first")
    run_suite(pytester, SIZES, "--report=out")
    library.write_text("# second")

    result = run_suite(pytester, SIZES, "--resume=out")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: equivtest: *was judged before *lib_of_mine.py changed: run without --resume"])


def test_resume_is_refused_if_a_file_imported_within_a_function_changed(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a_imports")
    helper = pytester.makepyfile(helper="# first")
    run_suite(pytester, SIZES, "--report=out")
    helper.write_text("# second")

    result = run_suite(pytester, SIZES, "--resume=out")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: equivtest: *was judged before *helper.py changed: run without --resume"])


def test_resume_with_another_python_path_is_refused(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    make_suite(pytester, "a")
    run_suite(pytester, SIZES, "--report=out")
    monkeypatch.setenv("PYTHONPATH", "other")

    result = run_suite(pytester, SIZES, "--resume=out")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: equivtest: *was judged with python_path *, but this run has other: *"])


def test_resume_from_a_copy_of_the_tests_in_another_folder_is_refused(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a")
    run_suite(pytester, SIZES, "--report=out")
    other = pytester.mkdir("other")
    for name in ("conftest.py", "test_fake.py"):
        shutil.copy(pytester.path / name, other)

    result = run_suite(pytester, SIZES, "--resume=out", f"--rootdir={other}", str(other))

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: equivtest: *was judged with rootdir *"])


def test_resume_after_an_edited_list_of_known_failures_is_refused(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a")
    known = pytester.path / "mine.toml"
    known.write_text("# first")
    run_suite(pytester, SIZES, "--report=out", "--known-failures=mine.toml")
    known.write_text("# second")

    result = run_suite(pytester, SIZES, "--resume=out", "--known-failures=mine.toml")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: equivtest: *was judged with own_lists {'mine.toml': *}, but this run has *"])


def test_resumed_run_also_runs_searches_that_the_interrupted_run_had_deselected(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a_wrong")
    run_suite(pytester, "--world-sizes=2,3", "--report=out", "-k", "w2")

    result = run_suite(pytester, "--world-sizes=2,3", "--resume=out", "-v")

    result.stdout.fnmatch_lines(["*::a_wrong::equals_unsharded FAILED*"])
    (tally,) = read_run(pytester.path / "out").results.ordered()
    assert {label.partition("-")[0] for label in tally.listed.planned} == {"w2", "w3"}
