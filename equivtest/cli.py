"""Defines the `equivtest` command: a thin layer over pytest and over the modules that replay, judge and report.

Exit codes: 0 every claim holds, 1 a claim fails, 2 misuse, a set-up that does not work, or nothing concluded.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from equivtest.base import limits
from equivtest.base.hash_seed import fix_hash_seed
from equivtest.base.profiles import AUDIT_PROFILE
from equivtest.errors import EquivtestError, Misuse, shorten, shorten_values
from equivtest.pytest_plugin.options import HELP
from equivtest.pytest_plugin.pytest_run import run_properties

if TYPE_CHECKING:
    from equivtest.bundle import manifest

app = typer.Typer(
    help="Checks that a parallel torch computation is the same as the unsharded one; shrinks what is not.",
    add_completion=False,
    no_args_is_help=False,
    pretty_exceptions_enable=False,
)
PATHS = typer.Argument(help="Test files or folders with properties of your own.", show_default=False)
BACKEND = typer.Option(help=HELP["backend"])
DEVICE = typer.Option(help=HELP["device"])
IMPORT = typer.Option("--import", metavar="MODULE", help=HELP["import"])
START = typer.Option(help=HELP["start"])
ARITHMETIC = typer.Option(metavar="NAME", help=HELP["arithmetic"])
LISTEN = typer.Option(metavar="[HOST]:PORT", help=HELP["listen"])
WORLD_SIZES = typer.Option(help=HELP["world-sizes"])
DTYPES = typer.Option(help=HELP["dtypes"])
SUBJECTS = typer.Option(help=HELP["subjects"])
KNOWN_FAILURES = typer.Option(metavar="FILES", help=HELP["known-failures"])
REPORT = typer.Option(metavar="DIR", help=HELP["report"])
RESUME = typer.Option(metavar="DIR", help=HELP["resume"])
WORKERS = typer.Option(
    "-n",
    metavar="WORKERS",
    help="Number of xdist workers (default: at most one per property of yours); 0 uses this process alone.",
)
INTERRUPTED = 130
"""Exit code that typer returns after Ctrl-C within a command (0.16 and later)."""


def begin() -> None:
    """Runs the command with a fixed hash seed, for `python -m equivtest.cli` and scripts of earlier releases."""
    fix_hash_seed()
    main()


def main() -> None:
    sys.path.append(os.getcwd())  # the user's modules; installed modules come first
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
    except EquivtestError as error:
        code = _complain(str(error))
    except KeyboardInterrupt:
        code = _complain("interrupted")
    except Exception as error:  # typer's own usage errors; they are no public class in every release
        if not hasattr(error, "format_message"):
            raise
        code = _complain(f"{error.format_message().rstrip('.')}; see equivtest --help")
    sys.exit(code or 0)


def _complain(message: str) -> int:
    line = "".join(each if each.isprintable() else repr(each)[1:-1] for each in " ".join(message.split()))
    typer.echo(f"equivtest: {shorten_values(line)}", err=True)
    return 2


def _print_version(wanted: bool) -> None:  # noqa: FBT001  (typer calls it)
    if wanted:
        from equivtest.pytest_plugin.suite import version_of

        typer.echo(f"equivtest {version_of('equivtest')} (torch {version_of('torch')})")
        raise typer.Exit


@app.callback()
def _root(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Exit codes: 0 every claim holds, 1 a claim fails, 2 misuse, a broken set-up, or nothing concluded."""


@app.command()
def run(
    *,
    paths: Annotated[list[Path] | None, PATHS] = None,
    profile: Annotated[str | None, typer.Option(help=HELP["profile"])] = None,
    backend: Annotated[str | None, BACKEND] = None,
    device: Annotated[str | None, DEVICE] = None,
    imports: Annotated[list[str] | None, IMPORT] = None,
    start: Annotated[str | None, START] = None,
    arithmetic: Annotated[str | None, ARITHMETIC] = None,
    listen: Annotated[str | None, LISTEN] = None,
    world_sizes: Annotated[str | None, WORLD_SIZES] = None,
    dtypes: Annotated[str | None, DTYPES] = None,
    subjects: Annotated[str | None, SUBJECTS] = None,
    known_failures: Annotated[str | None, KNOWN_FAILURES] = None,
    allow_unsupported: Annotated[str | None, typer.Option(metavar="NAMES", help=HELP["allow-unsupported"])] = None,
    report: Annotated[str | None, REPORT] = None,
    resume: Annotated[str | None, RESUME] = None,
    bundle: Annotated[str | None, typer.Option(metavar="FILE", help=HELP["bundle"])] = None,
    manifest: Annotated[str | None, typer.Option(metavar="FILE", help=HELP["manifest"])] = None,
    audit: Annotated[str | None, typer.Option(metavar="on|off", help=HELP["audit"])] = None,
    budget: Annotated[str | None, typer.Option(metavar="SECONDS", help=HELP["budget"])] = None,
    shard: Annotated[str | None, typer.Option(metavar="I/N", help=HELP["shard"])] = None,
    max_time: Annotated[str | None, typer.Option(metavar="SECONDS", help=HELP["max-time"])] = None,
    workers: Annotated[str, WORKERS] = "auto",
    stop_first: Annotated[bool, typer.Option("-x", help="Stop at the first failure.")] = False,
    keyword: Annotated[str | None, typer.Option("-k", metavar="EXPR", help="Run what pytest's -k selects.")] = None,
    verbose: Annotated[bool, typer.Option("-v", help="A line per search and claim, and summary tables.")] = False,
    quiet: Annotated[bool, typer.Option("-q", help="Less output.")] = False,
    collect_only: Annotated[bool, typer.Option("--co", help="List what would run, and run nothing.")] = False,
    max_failures: Annotated[
        int, typer.Option("--maxfail", metavar="NUMBER", min=0, help="Stop after this number of failures; 0: never.")
    ] = 0,
    durations: Annotated[
        int | None, typer.Option(metavar="NUMBER", min=0, help="Print this number of the slowest searches; 0: all.")
    ] = None,
    last_failed: Annotated[bool, typer.Option("--lf", help="Run only what failed in your files last time.")] = False,
    failed_first: Annotated[bool, typer.Option("--ff", help="Run what failed last time first.")] = False,
    junit_xml: Annotated[
        Path | None, typer.Option("--junit-xml", metavar="FILE", help="Write the results as JUnit XML.")
    ] = None,
) -> int:
    """Judge the properties that come with equivtest, or those under PATHS."""
    raw = {
        "profile": profile, "backend": backend, "device": device, "import": imports,
        "start": start, "arithmetic": arithmetic, "listen": listen, "world_sizes": world_sizes,
        "dtypes": dtypes, "subjects": subjects, "known_failures": known_failures,
        "allow_unsupported": allow_unsupported, "report": report, "resume": resume, "bundle": bundle,
        "max_time": max_time, "budget": budget, "audit": audit, "shard": shard, "manifest": manifest,
    }  # fmt: skip
    flags = ["-x"] * stop_first + ["-v"] * verbose + ["-q"] * quiet + ["--co"] * collect_only
    flags += [f"--maxfail={max_failures}"] * bool(max_failures) + [f"--durations={durations}"] * (durations is not None)
    flags += ["--lf"] * last_failed + ["--ff"] * failed_first
    flags += [f"--junit-xml={junit_xml.absolute()}"] if junit_xml else []
    return run_properties(raw, paths or [], workers, keyword, flags)


@app.command("audit")
def audit_(
    *,
    paths: Annotated[list[Path] | None, PATHS] = None,
    backend: Annotated[str | None, BACKEND] = None,
    device: Annotated[str | None, DEVICE] = None,
    imports: Annotated[list[str] | None, IMPORT] = None,
    start: Annotated[str | None, START] = None,
    arithmetic: Annotated[str | None, ARITHMETIC] = None,
    listen: Annotated[str | None, LISTEN] = None,
    world_sizes: Annotated[str | None, WORLD_SIZES] = None,
    dtypes: Annotated[str | None, DTYPES] = None,
    subjects: Annotated[str | None, SUBJECTS] = None,
    known_failures: Annotated[str | None, KNOWN_FAILURES] = None,
    report: Annotated[str | None, REPORT] = None,
    workers: Annotated[str, WORKERS] = "auto",
    keyword: Annotated[str | None, typer.Option("-k", metavar="EXPR", help="Audit what pytest's -k selects.")] = None,
) -> int:
    """Print which claims reject each collective of a property when it is spoiled.

    On a few cases each collective is spoiled in turn.  There are five faults: each rank uses its own operand in place
    of every rank's operand, one rank sends another rank's operand, nothing is sent, the result is NaN, or a sum is
    doubled.  Exit code 2 if no claim of a property rejects the first or second fault in any collective.  Then a green
    run of the property shows nothing, because the claims hold even if ranks ignore each other.
    """
    raw = {
        "profile": AUDIT_PROFILE, "backend": backend, "device": device, "import": imports, "start": start,
        "arithmetic": arithmetic, "listen": listen, "world_sizes": world_sizes, "dtypes": dtypes, "subjects": subjects,
        "known_failures": known_failures, "report": report,
    }  # fmt: skip
    return run_properties(raw, paths or [], workers, keyword, [])


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="A file that a failure's message names.")],
    *,
    listen: Annotated[str, LISTEN] = "",
) -> int:
    """Run one written failure again; exit code 1 if it still fails, 0 if not."""
    from equivtest.cases.case import from_data
    from equivtest.ranks.hosts.run_hub import pool_on_hosts
    from equivtest.search import replay as replays

    data = replays.read_replay(file)
    backend = replays.backend_of(data)
    from_data(data["case"])
    with pool_on_hosts(backend, listen) as pool:
        fails, message = replays.replay(data, pool, path=str(file))
    typer.echo(message)
    return int(fails)


@app.command()
def check(
    subject: Annotated[str, typer.Argument(help="A short name, or package.module:function.")],
    case: Annotated[str, typer.Argument(help="The code of a case, as messages print it.")],
    *,
    backend: Annotated[str, BACKEND] = "gloo",
    device: Annotated[str, DEVICE] = "cpu",
    imports: Annotated[list[str] | None, IMPORT] = None,
    start: Annotated[str, START] = "auto",
    arithmetic: Annotated[str, ARITHMETIC] = "",
    listen: Annotated[str, LISTEN] = "",
    like: Annotated[
        str, typer.Option(metavar="PROPERTY", help="Judge the claims of this property; see equivtest list.")
    ] = "",
    limit_s: Annotated[
        float,
        typer.Option(
            "--limit-s",
            metavar="SECONDS",
            help="Seconds that a run of the case may take (default: limit_s of its property).",
        ),
    ] = limits.CASE_S,
) -> int:
    """Run one case, known failure or not; exit code 1 if a claim fails.

    A case that fails on another backend runs once more on gloo and the CPU. A line names each claim that fails there
    in the same way in every draw. The properties of SUBJECT say which claims are judged. Without --like, a subject of
    your own is judged by the claims that fit any subject: values, gradients, replicas, layouts, inputs, training,
    recorded collectives, refusals.
    """
    from equivtest.cases.case import from_code
    from equivtest.diagnose.blame import with_fault
    from equivtest.oracle.declared import require_declared
    from equivtest.programs.bounds import reason_in
    from equivtest.property import require_limit
    from equivtest.pytest_plugin.suite import claims_of
    from equivtest.ranks.backend import Backend
    from equivtest.ranks.hosts.run_hub import pool_on_hosts
    from equivtest.ranks.pool import Pool
    from equivtest.search.differential import set_torchs_apart
    from equivtest.verdicts.judging import judge, require_conclusion
    from equivtest.verdicts.message import on_factors, write_message

    chosen = Backend(backend, device, tuple(imports or ()), start, arithmetic)
    if not listen:
        chosen.validate()
    require_limit(limit_s, "--limit-s")
    parsed = from_code(case)
    require_declared(arithmetic, parsed.dtypes)
    claims = claims_of(subject, parsed, like)
    with pool_on_hosts(chosen, listen) as pool:
        verdicts = judge(subject, parsed, pool, claims, limit_s=limit_s)
        claimed = dict.fromkeys(verdict.claim for verdict in verdicts if verdict.failed)
        failed = [next(each for each in verdicts if each.failed and each.claim == claim) for claim in claimed]
        for verdict in failed:
            typer.echo(write_message(with_fault(verdict, pool, claims)))
    if failed and not chosen.is_gloo_on_cpu:
        with Pool() as gloo:
            compared = set_torchs_apart(verdicts, claims, gloo)
        for claim in claimed:
            pairs = zip(verdicts, compared, strict=True)
            reasons = [after.known for before, after in pairs if before.failed and before.claim == claim]
            if all(reasons):
                typer.echo(f"{subject}: {claim} {', '.join(dict.fromkeys(reasons))}")
    if not failed and any(verdict.kind == "inconclusive" for verdict in verdicts) and (why := reason_in(parsed)):
        typer.echo(f"{subject}: inconclusive: {why}")
    require_conclusion(subject, parsed, verdicts, pool.faults_of(parsed))
    for kind, words in (("holds", "hold"), ("inconclusive", "inconclusive on some values")):
        names = dict.fromkeys(verdict.claim for verdict in verdicts if verdict.kind == kind)
        if names and not failed:
            typer.echo(f"{subject}: {', '.join(names)} {words} in {parsed!r}")
    for line in dict.fromkeys(line for verdict in verdicts for line in on_factors(verdict.judgement.factors)):
        typer.echo(f"{subject}: factor {line}")
    return int(bool(failed))


@app.command("judge")
def judge_(
    folder: Annotated[Path, typer.Argument(help="Folder that equivtest.capture wrote, with the files of all ranks.")],
    other: Annotated[Path | None, typer.Argument(help="Another run of the same model.", show_default=False)] = None,
    *,
    reference: Annotated[str, typer.Option(metavar="NAME", help="package.module:function that builds the model.")],
    arithmetic: Annotated[str, ARITHMETIC] = "",
    jobs: Annotated[
        int, typer.Option(min=1, help="Number of processes that judge the parts captured with alone=.")
    ] = 1,
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write an HTML page that shows each part in green, grey or red.", show_default=False
        ),
    ] = None,
) -> int:
    """Judge a run that happened elsewhere, or tell which of two runs is wrong; exit code 1 if one is.

    No rank is started.  The unsharded model runs once, and each of its parts is judged from the inputs that the part
    had on the ranks.  Parts that were captured alone are judged one after the other, or as many at once as --jobs says.
    """
    from equivtest.captured.format.folder import CapturedRun, parts_in
    from equivtest.captured.judge.report import compare_runs, describe
    from equivtest.captured.judge.run import judge_parts, judge_run
    from equivtest.pytest_plugin.settings import check_file
    from equivtest.report.files import write_picture

    if picture is not None:
        check_file(picture, "--picture")
    if parts := parts_in(folder):
        if other is not None:
            raise Misuse(
                f"{folder} has several parts, captured with alone=, but judge compares one part of two runs: name the "
                "folder of one part of each run"
            )
        codes = []
        for code, text in judge_parts(parts, reference, arithmetic, jobs):
            codes.append(code)
            typer.echo(text)
        held, wrong, others = (codes.count(code) for code in (0, 1, 2))
        typer.echo(f"{folder}: {held} of {len(codes)} parts hold, {wrong} are wrong, {others} not judged")
        return 1 if 1 in codes else max(codes)
    judged = [judge_run(CapturedRun(each), reference, arithmetic) for each in (folder, other) if each is not None]
    for each in judged:
        typer.echo(describe(each))
    if picture is not None:
        write_picture(picture, [(describe(each), each.parts()) for each in judged])
    if len(judged) == 2:
        typer.echo(compare_runs(*judged))
    return int(any(each.failed for each in judged))


@app.command()
def compare(
    old: Annotated[Path, typer.Argument(help="The baseline: a folder of --report, or its run.jsonl.gz.")],
    new: Annotated[Path, typer.Argument(help="The run to compare with it.")],
    *,
    fail_on: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Kinds of changes that give exit code 1: worse (which includes 'no longer judged'), slower, "
            "different, or never.",
        ),
    ] = "worse",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with every change.")] = False,
) -> int:
    """Compare two runs of any commits, releases of torch or backends; exit code 1 if NEW is worse or judges less."""
    import msgspec

    from equivtest.report.compare import compare, in_words, parse_causes
    from equivtest.report.log import read_run

    causes = parse_causes(fail_on)
    found = compare(read_run(old), read_run(new), causes)
    typer.echo(msgspec.json.encode(found).decode() if as_json else "\n".join(in_words(found)))
    return int(bool(found.failed_on))


@app.command()
def export(
    form: Annotated[str, typer.Argument(metavar="FORM", help="annotations, markdown, ctrf or pytorch.")],
    report: Annotated[Path, typer.Argument(help="A folder of --report, or its run.jsonl.gz.")],
) -> None:
    """Print a report in the form of another tool: for GitHub Actions, as CTRF, or for PyTorch's cross-repository CI."""
    from equivtest.report.formats import export
    from equivtest.report.log import read_run

    typer.echo(export(read_run(report), form), nl=False)


@app.command()
def merge(
    shards: Annotated[list[Path], typer.Argument(help="The folders that equivtest run --shard --report has written.")],
    *,
    report: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the merged report.")],
) -> int:
    """Join the reports of all shards of a run into the report of the whole run; the exit code is the whole run's."""
    from equivtest.report.merge import merge

    code, lines = merge(shards, report, sys.argv)
    for line in lines:
        typer.echo(line)
    return code


@app.command()
def verify(
    file: Annotated[Path, typer.Argument(help="A file that equivtest run --bundle wrote.")],
    *,
    level: Annotated[int, typer.Option(min=0, max=4, help="Fail unless the bundle reaches this level.")] = 0,
    rerun: Annotated[int, typer.Option(metavar="NUMBER", min=0, help="Run this number of its cases again here.")] = 0,
    seed: Annotated[
        str,
        typer.Option(
            metavar="TEXT", help="Seed that an earlier run of verify printed, to choose the same cases again."
        ),
    ] = "",
    backend: Annotated[str, BACKEND] = "gloo",
    device: Annotated[str, DEVICE] = "cpu",
    imports: Annotated[list[str] | None, IMPORT] = None,
    start: Annotated[str, START] = "auto",
    arithmetic: Annotated[str, ARITHMETIC] = "",
    listen: Annotated[str, LISTEN] = "",
) -> int:
    """Check a bundle; exit code 1 if it is altered, incomplete or red.

    Nothing that the bundle names is imported or run.  --rerun runs its cases on the backend that you name here.
    """
    from contextlib import ExitStack
    from functools import cache

    from equivtest.bundle.rerun import rerun_cases
    from equivtest.bundle.verify import in_lines
    from equivtest.bundle.verify import verify as verified
    from equivtest.pytest_plugin.machine import cpu_name
    from equivtest.pytest_plugin.suite import shipped
    from equivtest.ranks.backend import Backend
    from equivtest.ranks.hosts.run_hub import pool_on_hosts
    from equivtest.ranks.pool import Pool
    from equivtest.report.levels import reached

    chosen = Backend(backend, device, tuple(imports or ()), start, arithmetic)
    if rerun and not listen:
        chosen.validate()
    with ExitStack() as pools:
        pool = pools.enter_context(pool_on_hosts(chosen, listen)) if rerun else None
        gloo = None if chosen.is_gloo_on_cpu else cache(lambda: pools.enter_context(Pool()))
        found = verified(file, shipped(), pool)
        for line in in_lines(file, found):
            typer.echo(line)
        if is_below := reached(found.levels) < level:
            typer.echo(f"{file}: incomplete: level {level} is not reached")
        differing = 0
        if pool is not None:
            for line, differs in rerun_cases(found, pool, rerun, cpu_name(), seed, gloo):
                typer.echo(f"{file}: {line}")
                differing += differs
    return int(bool(found.problems or differing or is_below))


@app.command()
def fingerprint(
    *,
    backend: Annotated[str, BACKEND] = "gloo",
    device: Annotated[str, DEVICE] = "cpu",
    imports: Annotated[list[str] | None, IMPORT] = None,
    start: Annotated[str, START] = "auto",
    listen: Annotated[str, LISTEN] = "",
    world_sizes: Annotated[str, WORLD_SIZES] = "2,4",
    dtypes: Annotated[str | None, DTYPES] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the declaration, a Python module.")] = None,
) -> int:
    """Measure how a backend and its device compute, and write what it may declare by --arithmetic, for you to sign.

    Exit code 1 if there is a measurement that no declaration allows.
    """
    from equivtest.fingerprint.measuring import describe, measure, write
    from equivtest.pytest_plugin.settings import check_file, parse
    from equivtest.ranks.backend import Backend
    from equivtest.ranks.hosts.run_hub import pool_on_hosts

    if output is not None:
        check_file(output, "--output")
    settings = parse({"world_sizes": world_sizes, "dtypes": dtypes})
    chosen = Backend(backend, device, tuple(imports or ()), start)
    if not listen:
        chosen.validate()
    with pool_on_hosts(chosen, listen) as pool:
        found = [measure(pool, dtype, settings.world_sizes) for dtype in settings.dtypes]
    for each in found:
        typer.echo(describe(each))
    if output is not None:
        write(found, chosen, settings.world_sizes, output)
        typer.echo(f"{output}: read it and sign, then judge by it: --arithmetic PACKAGE.{output.stem}:MEASURED")
    return int(any(each.problems for each in found))


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Folder for the new files.")] = Path("."),
    *,
    kind: Annotated[
        str, typer.Option(help="Kind of the test file: tensor-parallel, data-parallel, step or backend.")
    ] = "tensor-parallel",
    backend: Annotated[
        str | None, typer.Option(help="With --kind backend: the backend to probe, for its manifest.")
    ] = None,
    device: Annotated[str, DEVICE] = "cpu",
    imports: Annotated[list[str] | None, IMPORT] = None,
    start: Annotated[str, START] = "auto",
) -> int:
    """Write a test file with a program to replace by yours, and jobs for GitHub Actions and GitLab that run it.

    With --kind backend, also write the manifest of the backend, equivtest.toml.
    """
    from equivtest.templates import write_files

    manifests = {}
    if kind == "backend":
        from equivtest.bundle import manifest

        named = manifest.Backend(backend or "gloo", device, tuple(imports or ()), start)
        claims, notes = (
            _probed(named) if backend else (manifest.ALL_CLAIMS, ["nothing was probed: --backend NAME probes"])
        )
        manifests[manifest.NAME] = manifest.write_text(named, claims, notes)
    elif backend:
        raise Misuse(f"--backend needs --kind backend, got --kind {shorten(kind)}")
    for path in write_files(folder, kind, manifests):
        typer.echo(path)
    return 0


def _probed(named: manifest.Backend) -> tuple[manifest.Claims, list[str]]:
    from equivtest.bundle.manifest import measured
    from equivtest.ranks.backend import Backend
    from equivtest.ranks.pool import Pool

    chosen = Backend(named.name, named.device, named.imports, named.start)
    chosen.validate()
    with Pool(chosen) as pool:
        return measured(pool)


@app.command()
def coverage(
    *,
    profile: Annotated[str, typer.Option(help="Profile whose cases are counted: smoke, gate or conformance.")] = "gate",
    subjects: Annotated[str, typer.Option(metavar="NAMES", help="Only these properties, separated by commas.")] = "",
) -> int:
    """Print how many combinations of values the shipped cases cover, and which no case can have; runs nothing."""
    from equivtest.pytest_plugin.suite import coverage_lines

    for line in coverage_lines(profile, [name for name in subjects.split(",") if name]):
        typer.echo(line)
    return 0


@app.command("list")
def list_() -> int:
    """List the properties that come with equivtest."""
    from equivtest.pytest_plugin import suite

    for name, prop in suite.shipped().items():
        typer.echo(name)
        typer.echo(f"  subject    {prop.subject}")
        typer.echo(f"  statement  {prop.statement}")
        typer.echo(f"  claims     {', '.join(claim.name for claim in prop.claims)}")
        typer.echo(f"  source     {prop.source}\n")
    return 0


if __name__ == "__main__":
    begin()
