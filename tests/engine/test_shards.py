"""`--shard` and `equivtest merge`: all shards together are one run."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import hypothesis  # noqa: F401  (what runs in this process import is dropped behind each, and torch dies of it)
import pytest
from msgspec import structs

import equivtest.pytest_plugin.collection
import equivtest.pytest_plugin.session
import equivtest.verdicts.claims  # noqa: F401
from equivtest.errors import Misuse
from equivtest.pytest_plugin.costs import SECONDS
from equivtest.pytest_plugin.settings import parse
from equivtest.pytest_plugin.shards import divide
from equivtest.pytest_plugin.suite import shipped
from equivtest.report.compare import compare
from equivtest.report.handover import Failure
from equivtest.report.log import LOG, read_run
from equivtest.report.merge import merge
from tests.engine.fake_suite import make_suite, run_suite
from tests.engine.test_cli import call
from tests.runs import record, searched, write_run

NAMES = ("a", "b", "a_wrong", "a_open")
COMMAND = ("equivtest", "merge")
FAILURE = Failure(
    subject="scale", claim="equals_unsharded", kind="value", message="again: first/f.json", replay="first/f.json",
    case="ScaleCase()",
)  # fmt: skip


def shards(folder: Path, **changes: Any) -> list[Path]:
    """Writes two shards, the first with a failure; `changes` are of the second one's environment."""
    first = searched(record(0, "value"), name="scale", failures=(FAILURE,))
    paths = [
        write_run(folder / "first", first, shard="1/2", failed=1),
        write_run(folder / "second", searched(record(0)), **{"shard": "2/2"} | changes),
    ]
    (paths[0] / "failures").mkdir()
    (paths[0] / "failures/f.json").write_text("{}")
    return paths


def run_shards(pytester: pytest.Pytester) -> list[Path]:
    """Runs the suite in two shards, the second one on xdist workers, and returns their reports."""
    make_suite(pytester, *NAMES)
    run_suite(pytester, "--shard=1/2", "--report=shard1")
    run_suite(pytester, "--shard=2/2", "--report=shard2", "-n2")
    return [pytester.path / "shard1", pytester.path / "shard2"]


def outcomes_of(path: Path) -> dict[tuple[str | None, str | None], list[str]]:
    """Returns the outcome of each test in a JUnit file."""
    cases = ElementTree.parse(path / "junit.xml").getroot().iter("testcase")
    return {(case.get("classname"), case.get("name")): [each.tag for each in case] for case in cases}


@pytest.mark.parametrize("num_shards", [1, 2, 4, 6])
def test_shards_of_a_run_contain_each_property_once_and_take_about_equal_time(num_shards: int) -> None:
    parts = divide([f"test.py::{name}" for name in SECONDS], num_shards)
    loads = [sum(SECONDS[name.removeprefix("test.py::")] for name in part) for part in parts]

    assert sorted(name for part in parts for name in part) == sorted(f"test.py::{name}" for name in SECONDS)
    assert max(loads) <= 1.1 * sum(loads) / num_shards or max(loads) == max(SECONDS.values())


def test_only_shipped_properties_have_measured_durations() -> None:
    assert SECONDS.keys() <= shipped().keys()


def test_more_shards_than_properties_raise_misuse() -> None:
    with pytest.raises(Misuse, match="--shard: 3 shards of 2 properties leave one empty: use 2 at most"):
        divide(["a", "b"], 3)


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "1/2/3", "a/b", "-1/2", "1/99999"])
def test_shard_option_that_is_no_valid_fraction_raises_misuse(text: str) -> None:
    with pytest.raises(Misuse, match=r"--shard: expected I/N with I from 1 to N, such as 2/4, got "):
        parse({"shard": text})


def test_shard_option_with_profile_soak_raises_misuse() -> None:
    with pytest.raises(Misuse, match="--shard cannot be used with --profile soak"):
        parse({"shard": "1/2", "profile": "soak"})


def test_merged_shards_give_the_results_of_an_undivided_run(pytester: pytest.Pytester) -> None:
    reports = run_shards(pytester)
    result = run_suite(pytester, "--report=whole")
    whole, merged = pytester.path / "whole", pytester.path / "merged"

    code, _ = merge(reports, merged, COMMAND)

    assert code == result.ret == 1
    assert not compare(read_run(whole), read_run(merged)).changes
    assert outcomes_of(merged) == outcomes_of(whole)
    for name in ("verdicts.jsonl", "cells.csv", "audit.csv"):
        assert len((merged / name).read_text().splitlines()) == len((whole / name).read_text().splitlines())


def test_tests_that_are_not_properties_run_in_the_first_shard(pytester: pytest.Pytester) -> None:
    make_suite(pytester, "a", "b")
    pytester.makepyfile(test_other="def test_it(): pass")

    listed = [run_suite(pytester, f"--shard={number}/2", "--co", "-q").stdout.str() for number in (1, 2)]

    assert ["test_other.py::test_it" in text for text in listed] == [True, False]


@pytest.mark.parametrize("options", [(), ("-n1",)])
def test_empty_shard_is_refused_in_one_line(pytester: pytest.Pytester, options: tuple[str, ...]) -> None:
    make_suite(pytester, "a")

    result = run_suite(pytester, "--shard=2/2", *options)

    text = "\n".join(result.outlines + result.errlines)
    assert result.ret != 0 and "--shard: 2 shards of 1 properties leave one empty: use 1 at most" in text


@pytest.mark.parametrize("name", ["", LOG])
def test_merged_report_names_its_own_replay_files(tmp_path: Path, name: str) -> None:
    paths = [path / name for path in shards(tmp_path)]

    merge(paths, tmp_path / "merged", COMMAND)

    replay = tmp_path / "merged/failures/f.json"
    assert replay.exists() and f"again: {replay}" in (tmp_path / "merged/report.html").read_text()


def test_log_without_its_replay_files_raises_misuse(tmp_path: Path) -> None:
    paths = shards(tmp_path)
    (paths[0] / "failures/f.json").unlink()

    with pytest.raises(
        Misuse, match=r"first names the replay file f\.json, which is not in .*failures: name the folder"
    ):
        merge(paths, tmp_path / "merged", COMMAND)


def test_merge_fails_for_a_failing_claim_although_no_test_failed(tmp_path: Path) -> None:
    first = searched(record(0, "value"), name="scale")
    paths = [
        write_run(tmp_path / "first", first, shard="1/2", failed=0),
        write_run(tmp_path / "second", searched(record(0)), shard="2/2"),
    ]

    assert merge(paths, tmp_path / "merged", COMMAND)[0] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"equivtest_commit": "b" * 40},
            rf"differ in equivtest_commit: {'a' * 40} and {'b' * 40}: merge shards of one",
        ),
        ({"profile": "smoke"}, "differ in profile: gate and smoke"),
        ({"selection": "other"}, "differ in selection: None and other"),
        ({"shard": "1/2"}, "first and .*second are both shard 1/2: name each shard once"),
        ({"shard": "2/3"}, "are the shards 1/2 and 2/3: merge shards of one run"),
    ],
)
def test_shards_of_different_runs_raise_misuse(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    with pytest.raises(Misuse, match=message):
        merge(shards(tmp_path, **changes), tmp_path / "merged", COMMAND)
    assert not (tmp_path / "merged").exists()


def test_file_that_changed_between_shards_raises_misuse(tmp_path: Path) -> None:
    paths = [
        write_run(
            tmp_path / number, structs.replace(searched(record(0)), code={"mine.py": digest}), shard=f"{number}/2"
        )
        for number, digest in (("1", "a"), ("2", "b"))
    ]

    with pytest.raises(Misuse, match=r"mine.py changed between .*1 and .*2: run the shards again"):
        merge(paths, tmp_path / "merged", COMMAND)


def test_merging_without_one_of_the_shards_raises_misuse(tmp_path: Path) -> None:
    with pytest.raises(Misuse, match="the report of shard 2/2 is missing: name the reports of all 2 shards"):
        merge(shards(tmp_path)[:1], tmp_path / "merged", COMMAND)


def test_whole_run_among_the_shards_raises_misuse(tmp_path: Path) -> None:
    whole = write_run(tmp_path / "whole", searched(record()))

    with pytest.raises(Misuse, match="whole is the report of a whole run: name only reports of equivtest run --shard"):
        merge([whole], tmp_path / "merged", COMMAND)


def test_merging_into_a_shards_folder_raises_misuse_and_keeps_the_shard(tmp_path: Path) -> None:
    paths = shards(tmp_path)

    for named in (paths, [path / LOG for path in paths]):
        with pytest.raises(Misuse, match="first is one of the shards: name another folder"):
            merge(named, paths[0], COMMAND)
    assert (paths[0] / LOG).exists()


def test_merge_command_exits_with_1_if_a_shard_has_a_failing_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call(monkeypatch, "merge", *map(str, shards(tmp_path)), "--report", str(tmp_path / "merged")) == 1
    assert read_run(tmp_path / "merged").environment["failed"] == 1
