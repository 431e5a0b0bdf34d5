"""Merges the reports of the shards of a run into one report on the whole run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from equivtest.base.files import write_whole
from equivtest.base.profiles import PROFILES
from equivtest.errors import BrokenSetup, Misuse, reason_of, shorten
from equivtest.report.compare import OF_ONE_RUN
from equivtest.report.files import write_report
from equivtest.report.folder import FAILURES, ReportFolder
from equivtest.report.handover import Failure, Handover
from equivtest.report.junit import merge_junit
from equivtest.report.log import LOG, Entry, Run, open_log, read_run, results_of
from equivtest.report.results import FAILED_EXIT, Results

VARYING = OF_ONE_RUN | {"shard", "left_out", "platform", "cpu", "cores", "accelerators"}
JUNIT = "junit.xml"


def merge(paths: Sequence[Path], report: Path, command: Sequence[str]) -> tuple[int, list[str]]:
    """Writes the merged report.  Returns the exit code of the whole run, and the reasons why it is no success.

    Raises:
        Misuse: the paths are not exactly the shards of one run, or the report's folder is one of the paths.
        BrokenSetup: the report cannot be written.
    """
    folders = [path.parent if path.name == LOG else path for path in paths]
    if report.resolve() in {folder.resolve() for folder in folders}:
        raise Misuse(f"--report: {shorten(str(report))} is one of the shards: name another folder")
    runs = [_with_replays(read_run(path), folder, report) for path, folder in zip(paths, folders, strict=True)]
    runs = _in_order(runs)
    results = results_of(runs)
    environment = _environment(runs, results, command)
    code, reasons = results.conclude(
        FAILED_EXIT if environment["failed"] or any(tally.has_failed for tally in results.ordered()) else 0,
        environment["failed"],
        environment["concluded"],
        environment["excused"],
        audits_alone=PROFILES[environment["profile"]].audits_alone,
    )
    folder = ReportFolder(report)
    try:
        folder.clear()
        _write_log(report, environment, runs)
        _write_junit(report, folders)
        _copy_replays(report, folders)
        write_report(report, environment, results, reasons)
    except OSError as error:
        raise BrokenSetup(f"--report: cannot write to {shorten(str(report))}: {reason_of(error)}") from error
    finally:
        folder.leave()
    return code, reasons


def _in_order(runs: Sequence[Run]) -> list[Run]:
    by_number: dict[int, Run] = {}
    first = runs[0]
    for run in runs:
        if "shard" not in run.environment:
            raise Misuse(f"{_name(run)} is the report of a whole run: name only reports of equivtest run --shard")
        _require_alike(first, run)
        number = int(str(run.environment["shard"]).partition("/")[0])
        if number in by_number:
            raise Misuse(
                f"{_name(by_number[number])} and {_name(run)} are both shard {run.environment['shard']}: "
                "name each shard once"
            )
        by_number[number] = run
    num_shards = _num_shards(first)
    if missing := [f"{number}/{num_shards}" for number in range(1, num_shards + 1) if number not in by_number]:
        raise Misuse(
            f"the report of shard {', '.join(missing)} is missing: name the reports of all {num_shards} shards"
        )
    _require_same_code(runs)
    return [by_number[number] for number in sorted(by_number)]


def _require_alike(first: Run, other: Run) -> None:
    if _num_shards(first) != _num_shards(other):
        shards = f"{first.environment['shard']} and {other.environment['shard']}"
        raise Misuse(f"{_name(first)} and {_name(other)} are the shards {shards}: merge shards of one run")
    for name in dict.fromkeys([*first.environment, *other.environment]):
        values = first.environment.get(name), other.environment.get(name)
        if name not in VARYING and values[0] != values[1]:
            old, new = (shorten(str(value), 80) for value in values)
            raise Misuse(
                f"{_name(first)} and {_name(other)} differ in {name}: {old} and {new}: "
                "merge shards of one commit, run with the same settings"
            )


def _require_same_code(runs: Sequence[Run]) -> None:
    """Raises Misuse if the shards ran different versions of a user's file, which is possible within one commit."""
    seen: dict[str, tuple[str, Run]] = {}
    for run in runs:
        for file, digest in (item for handover in run.handovers for item in handover.code.items()):
            first, other = seen.setdefault(file, (digest, run))
            if first != digest:
                raise Misuse(f"{file} changed between {_name(other)} and {_name(run)}: run the shards again")


def _num_shards(run: Run) -> int:
    return int(str(run.environment["shard"]).partition("/")[2])


def _name(run: Run) -> str:
    return shorten(str(run.path))


def _environment(runs: Sequence[Run], results: Results, command: Sequence[str]) -> dict[str, Any]:
    environments = [run.environment for run in runs]
    changed = {
        "left_out": sorted(results.left_out),
        "start": "; ".join(sorted(results.starts)),
        "started": min(each["started"] for each in environments),
        "seconds": round(sum(each["seconds"] for each in environments), 1),
        "failed": sum(each["failed"] for each in environments),
        "concluded": sum(each["concluded"] for each in environments),
        "complete": results.are_complete,
        "command": list(command),
    }
    own = {"shard", "selection"}
    return {name: value for name, value in environments[0].items() if name not in own} | changed


def _write_log(report: Path, environment: Mapping[str, Any], runs: Iterable[Run]) -> None:
    log = open_log(report)
    log.add(Entry(environment=dict(environment)))
    for run in runs:
        log.add(Entry(properties=run.properties))
        for handover in run.handovers:
            log.add(Entry(handover=handover))
    log.add(Entry(environment=dict(environment)))
    log.close()


def _write_junit(report: Path, folders: Sequence[Path]) -> None:
    files = [folder / JUNIT for folder in folders]
    if all(file.is_file() for file in files):
        write_whole(report / JUNIT, merge_junit(files))


def _with_replays(run: Run, folder: Path, report: Path) -> Run:
    """Returns the run with the paths of its replay files changed to their places in the merged report."""
    failures = [each for handover in run.handovers if handover.searched for each in handover.searched.failures]
    for name in (Path(failure.replay).name for failure in failures):
        if not (folder / FAILURES / name).is_file():
            raise Misuse(
                f"{_name(run)} names the replay file {shorten(name)}, which is not in "
                f"{shorten(str(folder / FAILURES))}: name the folder that equivtest run --report has written"
            )
    return Run(run.path, run.environment, run.properties, tuple(_moved(each, report) for each in run.handovers))


def _moved(handover: Handover, report: Path) -> Handover:
    found = handover.searched
    if found is None or not found.failures:
        return handover
    failures = tuple(_failure(each, str(report / FAILURES / Path(each.replay).name)) for each in found.failures)
    return replace(handover, searched=replace(found, failures=failures))


def _failure(failure: Failure, path: str) -> Failure:
    return replace(failure, replay=path, message=failure.message.replace(failure.replay, path))


def _copy_replays(report: Path, folders: Iterable[Path]) -> None:
    for folder in folders:
        for file in sorted((folder / FAILURES).glob("*.json")):
            (report / FAILURES).mkdir(exist_ok=True)
            write_whole(report / FAILURES / file.name, file.read_bytes())
