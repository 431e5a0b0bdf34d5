"""The plugin: items, claims as tests, options, known failures, exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import hypothesis  # noqa: F401  (what runs in this process import is dropped behind each, and torch dies of it)
import pytest
from _pytest.junitxml import LogXML

import equivtest.pytest_plugin.collection
import equivtest.pytest_plugin.session
import equivtest.verdicts.claims  # noqa: F401
from equivtest import plugin
from equivtest.pytest_plugin import suite
from equivtest.pytest_plugin.claim_reports import report_claim
from equivtest.pytest_plugin.pytest_run import worker_args
from equivtest.pytest_plugin.settings import Settings
from equivtest.report.files import write_report
from equivtest.report.log import read_run
from equivtest.report.tally import ClaimResult
from equivtest.search import known
from tests.commands import Command
from tests.engine.fake_suite import PROPERTIES, log_of, make_suite, plugin_args, run_suite

W3 = ("--world-sizes", "3")
UNKNOWN = "--known-failures=none"  # for a separate process, in which the shipped ones would import torch


def test_run_without_properties_prints_no_line_about_claims(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(): pass")

    result = run_suite(pytester)

    assert result.ret == 0
    assert "equivtest" not in re.sub("plugins: .*|rootdir: .*", "", result.stdout.str())


def test_run_without_properties_imports_no_torch(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import sys\ndef test_it(): assert 'torch' not in sys.modules")

    assert run_suite(pytester, subprocess=True).ret == 0


def test_property_runs_under_pytest_without_equivtests_command_line_options(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a")
    conftest = pytester.path / "conftest.py"
    conftest.write_text(conftest.read_text().replace("from equivtest.options import pytest_addoption", ""))

    result = run_suite(pytester, "-v")

    result.stdout.fnmatch_lines(["test_fake.py::a::equals_unsharded PASSED*"])


def test_pytest_items_are_named_by_property_world_size_and_index(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a")

    result = run_suite(pytester, "--collect-only", "-q", "--profile=conformance", *W3)

    result.stdout.fnmatch_lines(["test_fake.py::a[[]w3-0]"])


def test_failure_shrinks_to_the_world_sizes_of_the_run(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a")

    run_suite(pytester, "--world-sizes", "2,3")

    assert [line for line in log_of(pytester) if "shrinks" in line] == ["shrinks to (2, 3)"] * 2


def test_searches_run_after_other_tests_in_order_of_world_size(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a", "b")
    pytester.makepyfile(test_later="def test_it(): pass")

    result = run_suite(pytester, "--collect-only", "-q", "--world-sizes", "2,1")

    names = [line.split("::")[1] for line in result.outlines if "::" in line]
    assert names == ["test_it", "a[w1-0]", "b[w1-0]", "a[w2-0]", "b[w2-0]"]


def test_option_k_selects_searches(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a")

    run_suite(pytester, "-k", "w2")

    assert [line for line in log_of(pytester) if "search" in line] == ["search a w2 gate"]


def test_every_claim_is_a_separate_test(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a")

    result = run_suite(pytester, "-v", *W3)

    result.stdout.fnmatch_lines(
        ["test_fake.py::a::equals_unsharded PASSED*", "test_fake.py::a::agrees_on_all_ranks PASSED*"]
    )


@pytest.mark.parametrize("workers", ["0", "2"])
def test_claims_and_the_report_are_alike_with_and_without_xdist(pytester: pytest.Pytester, workers: str) -> None:
    """The report can also be rebuilt from its log."""
    make_suite(pytester, "a", "b_wrong")

    result = run_suite(pytester, UNKNOWN, "--report=out", "-n", workers)

    # 8 searches and 4 claims; one search and its claim fail
    result.assert_outcomes(passed=10, failed=2)
    out = pytester.path / "out"
    written = {path.name: path.read_text() for path in out.iterdir() if path.suffix in (".csv", ".jsonl", ".txt")}
    run = read_run(out)
    write_report(out, run.environment, run.results)
    assert {name: (out / name).read_text() for name in written} == written


def test_failing_search_names_the_claim_whose_item_shows_the_message(
    pytester: pytest.Pytester,
) -> None:
    make_suite(pytester, "a_wrong")

    result = run_suite(pytester, "-v")

    assert result.ret == 1
    result.stdout.fnmatch_lines(["*::a_wrong::equals_unsharded FAILED*", "*::a_wrong::agrees_on_all_ranks PASSED*"])
    result.stdout.fnmatch_lines(["*a_wrong[[]w3-0]*", "equals_unsharded: value", "*a_wrong: equals_unsharded*"])
    result.stdout.fnmatch_lines(["ValueMismatch: a_wrong: output differs from *", "  where *rank 2 of 3"])


def test_claims_of_a_property_without_a_case_are_skipped(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a_silent")

    result = run_suite(pytester, "-rs")

    result.assert_outcomes(skipped=6)
    result.stdout.fnmatch_lines(["SKIPPED * not run: no case was judged"])


def test_claims_of_a_property_that_did_not_finish_are_reported_as_open(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a_crashes")

    result = run_suite(pytester, "-rs")

    result.assert_outcomes(passed=3, failed=1, skipped=2)
    result.stdout.fnmatch_lines(["SKIPPED * not finished: 3 of 4 searches ended"])


def test_claims_of_a_property_that_never_began_are_reported_as_open(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a_wrong", "b")

    result = run_suite(pytester, "-x", "-v", "-n1", "--maxschedchunk=1", UNKNOWN, *W3)

    result.stdout.fnmatch_lines(["test_fake.py::b::equals_unsharded SKIPPED*"])


def test_run_without_a_conclusive_verdict_does_not_pass(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a_inconclusive")

    result = run_suite(pytester)

    assert result.ret == 2
    result.stdout.fnmatch_lines(["equivtest: no verdict of this run is conclusive: nothing is proven"])


def test_run_fails_and_lists_first_that_a_collective_is_unsupported(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a_not_supported", "b")

    result = run_suite(pytester, "--dtypes=float16,float32")

    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "*= equivtest =*",
            "equivtest: not supported: * verdicts, because the backend lacks float16 all_reduce, float32 "
            "all_reduce, so this run does not pass. Use --dtypes to leave a dtype out, or --allow-unsupported "
            "float16:all_reduce,float32:all_reduce to allow *",
        ],
        consecutive=True,
    )


@pytest.mark.parametrize("profile", ["gate", "conformance"])
@pytest.mark.parametrize(
    ("allowed", "code"), [("all", 0), ("float16,float32:all_reduce", 0), ("float16", 1), ("float32:broadcast", 1)]
)
def test_run_with_a_refused_collective_passes_only_if_an_option_allows_it(
    pytester: pytest.Pytester, profile: str, allowed: str, code: int
) -> None:
    make_suite(pytester, "a_not_supported", "b")

    args = (f"--profile={profile}", "--dtypes=float16,float32", f"--allow-unsupported={allowed}")

    assert run_suite(pytester, *args).ret == code


def test_run_in_which_every_collective_was_refused_ends_with_exit_code_2(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a_not_supported")

    result = run_suite(pytester, "--allow-unsupported=all")

    assert result.ret == 2
    result.stdout.fnmatch_lines(["equivtest: no verdict of this run is conclusive: nothing is proven"])


@pytest.mark.parametrize(("subjects", "code"), [(("a_leftout", "b"), 0), (("a_leftout",), 2)])
def test_property_is_left_out_if_it_can_judge_no_dtype_of_the_run(
    pytester: pytest.Pytester, subjects: tuple[str, ...], code: int
) -> None:
    make_suite(pytester, *subjects)

    result = run_suite(pytester, "--dtypes=bfloat16")

    assert result.ret == code
    result.stdout.fnmatch_lines(["dtypes  a_leftout: left out bfloat16: no case can be judged there"])
    if code:
        result.stdout.fnmatch_lines(
            ["equivtest: nothing was judged: nothing is proven; a_leftout: no case can be judged in bfloat16"]
        )


def test_run_does_not_pass_if_all_properties_require_a_missing_package(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a")
    pytester.makepyfile(
        test_fake=PROPERTIES.replace("cases=None", "cases=None, requires='no_such_package'") + "a = make('a')"
    )
    alone = run_suite(pytester)
    pytester.makepyfile(test_other="def test_it(): pass")

    assert alone.ret == 2 and run_suite(pytester).ret == 0
    alone.stdout.fnmatch_lines(["equivtest: nothing was judged: nothing is proven; no_such_package is not installed*"])


@pytest.mark.parametrize(
    ("options", "code"),
    [(("--profile=gate",), 0), (("--profile=conformance",), 0), (("--profile=soak", "--max-time=1"), 2)],
)
def test_incomplete_property_is_left_out_of_a_soak_unless_an_option_names_it(
    pytester: pytest.Pytester, options: tuple[str, ...], code: int
) -> None:
    make_suite(pytester, "a")
    pytester.makepyfile(
        test_fake=PROPERTIES.replace("cases=None", "cases=None, incomplete='some fail'") + "a = make('a')"
    )
    left = run_suite(pytester, *options)
    named = run_suite(pytester, *options, "--subjects=a")

    assert (left.ret, named.ret) == (code, 0)
    assert ("a is left out: some fail; --subjects a runs it" in left.stdout.str()) == bool(code)


@pytest.mark.parametrize(("world_sizes", "judged"), [("1,2,3", "(1, 2)"), ("3", "")])
def test_property_is_left_out_of_worlds_that_its_subject_does_not_support(
    pytester: pytest.Pytester, world_sizes: str, judged: str
) -> None:
    make_suite(pytester, "a")
    pytester.makepyfile(test_fake=PROPERTIES.replace("cases=None", "cases=None, world_sizes=(1, 2)") + "a = make('a')")

    result = run_suite(pytester, f"--world-sizes={world_sizes}")

    searches = [line for line in log_of(pytester) if line.startswith(("search", "shrinks"))]
    assert result.ret == (0 if judged else 2) and "a runs only on 1, 2 ranks, so not on 3" in result.stdout.str()
    assert searches == ["search a w1 gate", "shrinks to (1, 2)", "search a w2 gate", "shrinks to (1, 2)"] * bool(judged)


def test_report_lists_properties_that_are_left_out_as_incomplete(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a", "b")
    incomplete = PROPERTIES.replace("cases=None", "cases=None, incomplete='some fail' if subject == 'a' else ''")
    pytester.makepyfile(test_fake=incomplete + "a = make('a')\nb = make('b')")

    result = run_suite(pytester, "--profile=soak", "--max-time=1", "--report=out")

    line = "left    a is left out: some fail; --subjects a runs it"
    assert line in result.outlines and line in (pytester.path / "out" / "summary.txt").read_text().splitlines()


def test_claim_with_only_known_failures_is_xfailed(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a_known", "b")

    result = run_suite(pytester, *W3)

    result.assert_outcomes(passed=3, skipped=1, xfailed=2)


def test_junit_xml_has_one_testcase_per_claim(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a_wrong")

    run_suite(pytester, "--junitxml=j.xml")

    cases = ElementTree.parse(pytester.path / "j.xml").iter("testcase")
    claims = [(case.get("name"), len(case)) for case in cases if case.get("classname") == "test_fake.a_wrong"]
    assert claims == [("equals_unsharded", 1), ("agrees_on_all_ranks", 0)]


def test_junit_xml_has_a_property_element_for_failures_of_torch(tmp_path: Path) -> None:
    log = LogXML(str(tmp_path / "j.xml"), None)
    hook = SimpleNamespace(pytest_runtest_logreport=log.pytest_runtest_logreport)
    session: Any = SimpleNamespace(testscollected=0, config=SimpleNamespace(hook=hook))
    log.pytest_sessionstart()
    report_claim(session, "test_a.py", "a", ClaimResult("equals_unsharded", "passed", torchs="one line"))
    log.pytest_sessionfinish()

    found = ElementTree.parse(tmp_path / "j.xml").iter("property")
    assert [(each.get("name"), each.get("value")) for each in found] == [("torch", "one line")]


def test_junit_xml_names_file_and_line_of_the_property(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a_wrong")
    source = (pytester.path / "test_fake.py").read_text().splitlines()

    run_suite(pytester, "--junitxml=j.xml", "-o", "junit_family=xunit1")

    cases = list(ElementTree.parse(pytester.path / "j.xml").iter("testcase"))
    places = {(case.get("file"), source[int(case.get("line", "0"))].partition(" =")[0]) for case in cases}
    assert places == {("test_fake.py", "a_wrong")}


def test_mistake_in_a_test_file_is_reported_in_one_line_with_file_and_line(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_mine="import equivtest as eq\n\ntest_block = eq.program(lambda: None, lambda: None, inputs=[(1, 3)])\n"
    )

    result = run_suite(pytester)

    said = "test_mine.py:3: Misuse: build is a lambda, which has no name to send to the ranks: write `def build(...)`*"
    result.stdout.fnmatch_lines([said])
    assert "Traceback" not in result.stdout.str() and "name_of" not in result.stdout.str()
    assert result.ret == 2


@pytest.mark.parametrize("workers", ["0", "1"])
def test_pytest_session_ends_if_the_setup_of_ranks_is_broken(pytester: pytest.Pytester, workers: str) -> None:
    make_suite(pytester, "a_broken")

    result = run_suite(pytester, UNKNOWN, "-n", workers)

    assert result.ret == 2
    assert result.stdout.str().count("BrokenSetup: no rank started") == 1
    assert "Traceback" not in result.stdout.str() + result.stderr.str()


@pytest.mark.parametrize(("other", "code", "workers"), [("b", 2, "0"), ("b_wrong", 1, "0"), ("b_wrong", 1, "1")])
def test_misuse_in_one_property_fails_only_the_items_of_the_property(
    pytester: pytest.Pytester, other: str, code: int, workers: str
) -> None:
    make_suite(pytester, "a_misused", other)

    result = run_suite(pytester, UNKNOWN, "-n", workers)

    assert result.ret == code
    assert result.outlines.count("Misuse: the subject answers an unknown name") == 1
    assert f"search {other} w3 gate" in log_of(pytester)
    assert "Traceback" not in result.stdout.str() + result.stderr.str()


@pytest.mark.parametrize("workers", ["0", "1"])
def test_run_reports_a_failure_that_was_found_before_a_misuse(pytester: pytest.Pytester, workers: str) -> None:
    make_suite(pytester, "a_wrong_and_misused")

    result = run_suite(pytester, UNKNOWN, "-n", workers)

    assert result.ret == 1
    result.stdout.fnmatch_lines_random([
        "Misuse: the subject answers an unknown name",
        "ValueMismatch: a_wrong_and_misused: output differs from the oracle",
    ])  # fmt: skip
    assert "not finished: 3 of 4 searches ended" in result.stdout.str()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--profile=fast"], "--profile: unknown profile 'fast'; use one of smoke, gate, soak, conformance, audit"),
        (["--world-sizes=2,0"], "--world-sizes: a world size must be in 1..64, got '0'"),
        (["--world-sizes=65"], "--world-sizes: a world size must be in 1..64, got '65'"),
        (["--world-sizes=two"], "--world-sizes: a world size must be in 1..64, got 'two'"),
        (["--dtypes=int8"], "--dtypes: unknown dtype 'int8'; *"),
        (["--dtypes=float32,,float64"], "--dtypes: expected values separated by commas, *"),
        (["--subjects=b"], "--subjects: no property judges 'b'; use one of a"),
        (["--subjects=a=b"], "--subjects: expected NAME or NAME=package.module:function, got 'a=b'"),
        (["--known-failures=no.toml"], "--known-failures: no such file: no.toml *"),
        (["--known-failures=conftest.py"], "known failures: cannot read *"),
        (["--max-time=5"], "--max-time needs --profile soak, got --profile *"),
        (["--profile=soak", "--budget=9"], "--budget needs --profile smoke, gate or conformance, *"),
        (["--budget=no"], "--budget: expected seconds greater than 0, got 'no'"),
        (["--profile=soak", "--max-time=-1"], "--max-time: expected seconds greater than 0, got '-1'"),
        (["--report=conftest.py"], "--report: cannot write to *"),
        (["--start=thread"], "--start: unknown start 'thread'; use one of auto, forkserver, spawn"),
        (["--backend=nope"], "torch has no backend 'nope' here"),
    ],
)
def test_invalid_option_is_reported_in_one_line_before_anything_runs(
    pytester: pytest.Pytester, args: list[str], message: str
) -> None:
    make_suite(pytester, "a")

    result = run_suite(pytester, *args)

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: equivtest: {message}"])
    assert log_of(pytester) == []


def test_unknown_subject_under_xdist_ends_the_session(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a")

    result = run_suite(pytester, "--subjects=b", "-n1", UNKNOWN)

    assert result.ret == 2
    result.stdout.fnmatch_lines(["*equivtest: Misuse: --subjects: no property judges 'b'; use one of a*"])


def test_subjects_option_selects_properties(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a", "b")

    run_suite(pytester, "--subjects=b", *W3)

    assert [line for line in log_of(pytester) if "search" in line] == ["search b w3 gate"]


def test_subjects_option_replaces_the_subject_of_a_property(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a")

    result = run_suite(pytester, "--subjects=a=os.path:join", "-v", *W3)

    assert "search os.path:join w3 gate" in log_of(pytester)
    result.stdout.fnmatch_lines(["test_fake.py::a::equals_unsharded PASSED*"])


@pytest.mark.parametrize("profile", ["smoke", "gate"])
def test_summary_calls_the_run_a_first_look_only_in_profile_smoke(pytester: pytest.Pytester, profile: str) -> None:
    make_suite(pytester, "a")
    result = run_suite(pytester, f"--profile={profile}", "--report=out")
    told = [line for line in result.outlines if line.startswith("smoke is a first look")]
    written = (pytester.path / "out" / "summary.txt").read_text().splitlines()

    assert len(told) == (profile == "smoke") and (written[-1:] == told) == (profile == "smoke")


def test_plugin_that_defines_the_options_may_be_loaded_twice(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a")

    assert run_suite(pytester, "-p", "equivtest.options", "--profile=smoke").ret == 0


def test_header_names_backend_device_and_profile(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a")

    result = run_suite(pytester, "--known-failures=none", *W3)

    result.stdout.fnmatch_lines(
        [
            "equivtest *: torch 2*, backend gloo on *: none",
            "equivtest profile gate: fixed seeds; *s 3; *",
        ]
    )


def test_header_of_a_run_says_how_long_the_shipped_properties_take(command: Command, tmp_path: Path) -> None:
    args = ("run", "-n0", "--audit=off", "-k", "refuses and w1", "--profile=gate")

    shipped = command(tmp_path, *args, "--subjects=zero3_fetch_all_reduce")

    pytest.LineMatcher(shipped.stdout.splitlines()).fnmatch_lines([
        "equivtest profile gate: *",
        "equivtest duration: about 15 minutes for all shipped properties on two quiet cores, as measured; * cores here",
    ])  # fmt: skip


def test_header_of_a_run_of_user_properties_has_no_duration(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a")

    assert "equivtest duration" not in run_suite(pytester, "--known-failures=none", *W3).stdout.str()


def test_report_and_terminal_say_how_ranks_were_started_and_why(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a")

    result = run_suite(pytester, "--report=out", *W3)

    why = "spawn (a fork runs no backward: threads)"
    assert json.loads((pytester.path / "out" / "environment.json").read_text())["start"] == why
    result.stdout.fnmatch_lines([f"start   {why}"])


def test_start_option_sets_the_start_method_that_the_header_names(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a")

    result = run_suite(pytester, "--report=out", "--start=forkserver", *W3)

    assert json.loads((pytester.path / "out" / "environment.json").read_text())["start"] == "forkserver"
    result.stdout.fnmatch_lines(["equivtest *: torch 2*, backend gloo on cpu, start forkserver, *: shipped"])
    assert "start   " not in result.stdout.str()


def test_conformance_run_fails_if_a_required_cell_has_no_case(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a_even")

    result = run_suite(pytester, "--profile=conformance", "--world-sizes=1,2", "--dtypes=float32")

    assert result.ret == 1
    result.stdout.fnmatch_lines(
        ["*these required cells have no conclusive verdict:", "  world size 2, float32, uneven shards: no case"]
    )


def test_conformance_run_passes_if_every_required_cell_has_a_conclusion(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a")

    result = run_suite(pytester, "--profile=conformance", "-v")

    assert result.ret == 0
    result.stdout.fnmatch_lines(["test_fake.py::a::coverage PASSED*"])


def test_soak_run_repeats_with_fresh_seeds_until_its_time_is_over(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a_slow")

    result = run_suite(pytester, "--profile=soak", "--max-time=0.4", "--world-sizes=2,3")

    seeds = [line.split()[-1] for line in log_of(pytester) if "w3" in line]
    seed = re.search("fresh seed (\\w+), 0 s", result.stdout.str())
    assert seed is not None
    assert len(seeds) > 1
    assert seeds == [f"{seed[1]}-{count}" for count in range(len(seeds))]


def test_items_that_would_begin_after_the_end_of_the_budget_are_left_out(pytester: pytest.Pytester) -> None:
    """Audits and known failures come behind the searches."""
    make_suite(pytester, "a_slow")

    result = run_suite(pytester, "--audit=on", "--budget=0.001", "-rs")

    result.stdout.fnmatch_lines(
        ["the budget left out * searches, which had not begun", "*left out: the budget is over*"]
    )


def test_all_workers_of_a_soak_run_use_one_seed(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a_slow", "b_slow")

    run_suite(pytester, "--profile=soak", "--max-time=0.1", "-n2", UNKNOWN)

    assert len({line.split()[-1].partition("-")[0] for line in log_of(pytester) if "search" in line}) == 1


def test_report_folder_contains_every_documented_file(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a_wrong")

    run_suite(pytester, "--report=out")

    found = {path.name for path in (pytester.path / "out").iterdir()}
    assert found == {
        "audit.csv", "cells.csv", "verdicts.jsonl", "junit.xml", "summary.txt", "report.html", "environment.json",
        "run.jsonl.gz", "failures",
    }  # fmt: skip


def test_junitxml_option_of_the_user_is_respected(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a")

    run_suite(pytester, "--report=out", "--junitxml=mine.xml", *W3)

    assert (pytester.path / "mine.xml").exists()
    assert not (pytester.path / "out" / "junit.xml").exists()


def test_unwritable_report_is_refused_before_anything_runs(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a")
    (pytester.path / "out" / "summary.txt").mkdir(parents=True)

    result = run_suite(pytester, "--report=out", *W3)

    assert result.ret == pytest.ExitCode.USAGE_ERROR and log_of(pytester) == []
    result.stderr.fnmatch_lines(["ERROR: equivtest: --report: cannot replace *summary.txt: Is a directory; remove it"])


def test_run_whose_report_cannot_be_written_at_the_end_does_not_pass(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a")
    pytester.makepyfile(
        test_disk="""
        from pathlib import Path

        def test_it():
            Path("out/summary.txt").unlink()
            Path("out/summary.txt").mkdir()
        """
    )

    result = run_suite(pytester, "--report=out", *W3)

    assert result.ret == 2
    result.stdout.fnmatch_lines(["equivtest: cannot write *summary.txt: Is a directory"])


def test_pytest_session_opens_and_closes_one_pool(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a", "b")

    run_suite(pytester)

    assert [line for line in log_of(pytester) if "pool o" in line or "pool c" in line] == ["pool opened", "pool closed"]


def test_each_test_file_gets_new_ranks(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a")
    (pytester.path / "test_other.py").write_text((pytester.path / "test_fake.py").read_text())

    run_suite(pytester, *W3)

    served = [line for line in log_of(pytester) if "serves" in line]
    assert list(dict.fromkeys(served)) == ["pool serves test_fake.py", "pool serves test_other.py"]


def test_sigterm_closes_the_pool(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a_hangs")
    command = [sys.executable, "-m", "pytest", *plugin_args(), "-n0", UNKNOWN, *W3]
    process = subprocess.Popen(command, cwd=pytester.path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _wait_for("hanging", pytester)

    process.send_signal(signal.SIGTERM)

    assert process.wait(timeout=20) == pytest.ExitCode.INTERRUPTED
    assert "pool closed" in log_of(pytester)


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_killed_controller_ends_its_workers_although_nohup_started_it(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a_hangs")
    command = ["nohup", sys.executable, "-m", "pytest", *plugin_args(), "-n1", UNKNOWN, *W3]
    process = subprocess.Popen(command, cwd=pytester.path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _wait_for("hanging", pytester)
    workers = _children(process.pid)

    process.kill()
    process.wait(timeout=20)

    until_s = time.monotonic() + 2
    while any(_is_alive(pid) for pid in workers) and time.monotonic() < until_s:
        time.sleep(0.02)
    assert workers
    assert not any(_is_alive(pid) for pid in workers)


def test_ranks_fixture_runs_a_case(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a")
    pytester.makepyfile(
        test_mine="""
        from types import SimpleNamespace

        def test_mine(ranks):
            assert ranks.run("mine:linear", SimpleNamespace(refusal="")) == ["reply"]
            assert ranks.run("mine:linear", SimpleNamespace(refusal=""), limit_s=3.0) == ["reply within 3.0 s"]
        """
    )

    run_suite(pytester, "test_mine.py").assert_outcomes(passed=1)


KNOWN = """
[[known_failure]]
subject = "a"
claim = "equals_unsharded"
kind = "layout"
where = []
case = "LinearCase(world_size=3, style='rowwise', {fields})"
reason = "torch does it so"
"""


@pytest.mark.parametrize(
    ("fields", "world_size", "outcomes", "line"),
    [
        ("bias=False", 3, {"xfailed": 1}, "XFAIL known_failures::a::1 - torch does it so"),
        ("bias=True", 3, {"failed": 1}, "no longer fails: remove the entry known_failures::a::1, or make it stricter"),
        ("bias=True, in_features=2", 3, {"skipped": 1}, "SKIPPED*no conclusive verdict: inconclusive"),
        ("bias=False", 2, {"skipped": 1}, "SKIPPED*is outside --world-sizes or --dtypes"),
    ],
    ids=["still fails", "no longer fails", "inconclusive", "not run"],
)
def test_item_of_a_known_failure_runs_its_recorded_case(
    pytester: pytest.Pytester, fields: str, world_size: int, outcomes: dict[str, int], line: str
) -> None:
    make_suite(pytester, "a")
    (pytester.path / "known.toml").write_text(KNOWN.format(fields=fields))

    result = run_suite(pytester, "--known-failures=known.toml", "-rxs", f"--world-sizes={world_size}")

    assert result.ret == (1 if "failed" in outcomes else 0)
    result.assert_outcomes(passed=3, **outcomes)
    result.stdout.fnmatch_lines([line])


def test_known_failure_is_reported_without_a_traceback(pytester: pytest.Pytester) -> None:
    """pytest takes longer for it than the ranks take for the case."""
    make_suite(pytester, "a")
    (pytester.path / "known.toml").write_text(KNOWN.format(fields="bias=False"))

    result = run_suite(pytester, "--known-failures=known.toml", "-rx", "--xfail-tb", *W3)

    result.stdout.fnmatch_lines(["torch does it so", "*1 xfailed*"])
    result.stdout.no_fnmatch_line("*items.py*")


def test_known_failure_of_another_kind_fails_unless_a_second_list_has_this_kind(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vendor says in a list of his own how torch's mistake shows on his device."""
    make_suite(pytester, "a")
    entry = KNOWN.format(fields="bias=False")
    (pytester.path / "shipped.toml").write_text(entry.replace('kind = "layout"', 'kind = "value"'))
    (pytester.path / "own.toml").write_text(entry)
    monkeypatch.setattr(known, "SHIPPED", pytester.path / "shipped.toml")
    monkeypatch.setattr(suite, "properties_dir", lambda: pytester.path)

    own = "--known-failures=shipped,own.toml"
    alone, beside = (run_suite(pytester, "--device=cuda", "-rx", *lists, *W3) for lists in ((), (own,)))

    alone.assert_outcomes(passed=3, failed=1)
    alone.stdout.fnmatch_lines(
        ["fails with 'layout', not with 'value': *add an entry for this failure to a list of your own*"]
    )
    beside.assert_outcomes(passed=3, xfailed=2)


def test_shipped_known_failure_passes_if_its_claim_holds_on_another_backend(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was found with gloo on the CPU; what another backend or device gets right is no news about the entry."""
    make_suite(pytester, "a")
    (pytester.path / "known.toml").write_text(KNOWN.format(fields="bias=True"))
    monkeypatch.setattr(known, "SHIPPED", pytester.path / "known.toml")
    monkeypatch.setattr(suite, "properties_dir", lambda: pytester.path)

    result = run_suite(pytester, "--device=cuda", "-rA", *W3)

    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["PASSED known_failures::a::1"])


@pytest.mark.parametrize(("device", "times"), [("cpu", 0), ("cuda", 1)])
def test_run_on_a_device_limits_the_processes_of_its_cases(device: str, times: int, pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a")

    run_suite(pytester, f"--device={device}", "--known-failures=none", *W3)

    assert log_of(pytester).count("limited processes") == times


@pytest.mark.parametrize(
    ("name", "outcome", "line"),
    [
        ("a", "xfailed", "XFAIL known_failures::a::1*"),
        ("a_elsewhere", "failed", "*fails with 'layout', but in another place than gloo on the CPU: *"),
        (
            "a_unable",
            "failed",
            "*fails with 'layout', and gloo on the CPU cannot run the case to compare (no such operator): *",
        ),
    ],
)
def test_shipped_known_failure_applies_on_another_backend_only_if_gloo_fails_alike(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, name: str, outcome: str, line: str
) -> None:
    make_suite(pytester, name)
    text = KNOWN.format(fields="bias=False").replace('subject = "a"', f'subject = "{name}"')
    (pytester.path / "known.toml").write_text(text)
    monkeypatch.setattr(known, "SHIPPED", pytester.path / "known.toml")
    monkeypatch.setattr(suite, "properties_dir", lambda: pytester.path)

    result = run_suite(pytester, "--device=cuda", "-rx", *W3)

    result.assert_outcomes(passed=3, **{outcome: 1})
    result.stdout.fnmatch_lines([line])


def test_items_of_shipped_known_failures_run_only_with_shipped_properties(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_suite(pytester, "a")
    (pytester.path / "shipped.toml").write_text(KNOWN.format(fields="bias=False"))
    (pytester.path / "own.toml").write_text(KNOWN.format(fields="bias=False"))
    monkeypatch.setattr(known, "SHIPPED", pytester.path / "shipped.toml")

    shipped, own = (run_suite(pytester, f"--known-failures={names}", *W3) for names in ("shipped", "own.toml"))

    shipped.assert_outcomes(passed=3)
    own.assert_outcomes(passed=3, xfailed=1)


EARLY = ("-p", "equivtest.pytest_plugin.early")


@pytest.mark.parametrize(("selected", "logged"), [("a", "pool opened"), ("nothing", "server closed")])
def test_fork_server_starts_before_tests_are_collected(pytester: pytest.Pytester, selected: str, logged: str) -> None:
    make_suite(pytester, "a")
    with (pytester.path / "test_fake.py").open("a") as file:
        file.write("\nwith open('log', 'a') as file:\n    file.write('collected\\n')\n")

    run_suite(pytester, *EARLY, "-k", selected, *W3)

    assert log_of(pytester)[:3] == ["server started", "collected", logged]


def test_fork_server_does_not_start_if_tests_are_only_collected(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a")

    run_suite(pytester, *EARLY, "--collect-only", *W3)

    assert log_of(pytester) == []


def test_run_of_an_xdist_controller_imports_no_torch(pytester: pytest.Pytester) -> None:
    """Its workers would wait for it, and at the end it writes the report."""
    make_suite(pytester, "a")
    with (pytester.path / "conftest.py").open("a") as file:
        file.write("\nimport atexit\natexit.register(lambda: print('torch' in sys.modules, 'in', sys.argv[0]))\n")

    result = run_suite(pytester, "-n1", "--report=out", UNKNOWN, *W3, subprocess=True)

    assert result.ret == 0 and (pytester.path / "out" / "summary.txt").exists()
    assert [line.partition(" in ")[0] for line in result.outlines if "pytest" in line and " in /" in line] == ["False"]


ONE = "import equivtest as eq\ntest_a = eq.program(build, parallelize)\nSIZES = dict(a=1)\n"
TWO = ONE + "test_b: eq.Property = eq.Property(subject='s')\n"


@pytest.mark.parametrize(
    ("text", "wanted", "arguments"),
    [
        (ONE, "auto", ["-n0"]),
        (TWO, "auto", ["-nauto", "--maxprocesses=2"]),
        ("test_a, test_b = made()", "auto", ["-nauto"]),
        ("def of no text", "auto", ["-nauto"]),
        (ONE, "3", ["-n3"]),
    ],
    ids=["one property", "two properties", "unknown number", "invalid Python", "explicit workers"],
)
def test_number_of_workers_is_at_most_the_number_of_properties(
    tmp_path: Path, text: str, wanted: str, arguments: list[str]
) -> None:
    (tmp_path / "test_mine.py").write_text(text)

    assert worker_args(wanted, [tmp_path]) == worker_args(wanted, [tmp_path / "test_mine.py"]) == arguments


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (2, 2), (4, 4), (6, 3), (64, 32)])
def test_number_of_auto_workers_leaves_cores_for_ranks(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, cores: int, workers: int
) -> None:
    config = pytester.parseconfig("-p", "equivtest.options")
    monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)

    assert plugin.pytest_xdist_auto_num_workers(config) == workers


def test_xdist_chooses_the_number_of_workers_if_equivtests_options_are_not_loaded(pytester: pytest.Pytester) -> None:
    assert plugin.pytest_xdist_auto_num_workers(pytester.parseconfig()) is None


def test_settings_without_options_equal_the_defaults() -> None:
    from equivtest.pytest_plugin.settings import parse

    assert parse({}) == Settings()


def _wait_for(line: str, pytester: pytest.Pytester) -> None:
    until_s = time.monotonic() + 30
    while line not in log_of(pytester):
        assert time.monotonic() < until_s, f"{line!r} never came"
        time.sleep(0.02)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
