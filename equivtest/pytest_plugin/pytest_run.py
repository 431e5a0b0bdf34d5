"""Runs pytest once over properties, for the commands `equivtest run` and `equivtest audit`."""

from __future__ import annotations

import ast
import os
import re
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from equivtest.base import limits
from equivtest.errors import Misuse, shorten

MAKERS = ("program", "module_property", "Property")
"""Names of the functions that make a property.  They count the properties in a file without running it."""
CACHE = Path(".equivtest") / "cache"
"""Folder in which pytest notes which tests in your files failed, for --lf and --ff."""
SUITE_INI = Path(__file__).with_name("suite.ini")


def run_properties(raw: dict[str, Any], paths: list[Path], workers: str, keyword: str | None, flags: list[str]) -> int:
    """Checks every option, so that a mistake gives one line, and then runs pytest over properties.

    Returns 0 if every claim holds, 1 if a claim fails, and otherwise 2.

    Args:
        raw: Options of the run by name. An absent option is None.
        workers: Number of pytest-xdist processes, or "auto".
        keyword: Value of pytest's option -k.
        flags: Further arguments of pytest.

    Raises:
        Misuse: an option has an invalid value, or nothing is selected.
    """
    if workers not in ("auto", "logical") and not re.fullmatch(r"\d{1,3}", workers):
        raise Misuse(f"-n: expected a number or auto, got {workers!r}: the most is {limits.MAX_WORKERS}")
    if keyword:
        _check_keyword(keyword)
    if raw.get("bundle") and (paths or keyword):
        raise Misuse("--bundle judges the properties that come with equivtest: leave out PATHS and -k, use --subjects")
    for path in paths:
        if not os.path.exists(path):  # Path.exists raises if the path is too long
            raise Misuse(f"no such file or folder: {shorten(str(path))}")
    if not paths and {"--lf", "--ff"}.intersection(flags):
        raise Misuse(
            "--lf and --ff need the paths of your own test files: failures of the shipped properties are not remembered"
        )
    args = _pytest_args(raw, _check(raw, paths), worker_args(workers, paths))
    args += ["-o", f"cache_dir={CACHE.absolute()}"] if paths else ["-p", "no:cacheprovider"]
    return _run_pytest(args + flags + (["-k", keyword] if keyword else []))


def _check_keyword(keyword: str) -> None:
    """Raises Misuse if pytest cannot parse the expression of -k, at which each xdist worker would crash."""
    from _pytest.mark.expression import Expression

    try:
        Expression.compile(keyword)
    except Exception as error:  # its class is another one in each release
        raise Misuse(f"-k: pytest cannot read {keyword!r}: {error}; combine parts of names by and, or, not") from error


def _check(raw: dict[str, Any], paths: list[Path]) -> list[Path]:
    from equivtest.pytest_plugin import settings, suite

    chosen = settings.parse(raw)
    settings.check(chosen)
    if paths:
        return [path.resolve() for path in paths]
    folder = suite.properties_dir()
    if chosen.subjects:
        settings.check_subjects(chosen, [(name, prop.subject) for name, prop in suite.shipped().items()])
    return [folder]


def worker_args(wanted: str, paths: list[Path]) -> list[str]:
    """Returns the arguments that tell pytest how many xdist workers to use.

    By default your own files get at most one worker per property, because a worker takes seconds to start and the ranks
    of one search fill several cores.
    """
    number = _num_properties(paths) if wanted == "auto" else 0
    return ["-n0"] if number == 1 else [f"-n{wanted}", *([f"--maxprocesses={number}"] if number else [])]


def _num_properties(paths: list[Path]) -> int:
    """Counts the properties that the text of test files assigns at the top level, or 0 if that is unknown."""
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("test_*.py"))]
    return sum(_is_property(statement) for file in files for statement in _parsed(file).body)


def _parsed(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):  # pytest reports it
        return ast.Module([], [])


def _is_property(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or not isinstance(statement.value, ast.Call):
        return False
    return ast.unparse(statement.value.func).rpartition(".")[2] in MAKERS


def _pytest_args(raw: dict[str, Any], paths: list[Path], workers: list[str]) -> list[str]:
    """Returns the arguments with which pytest runs.  They make pytest ignore all settings of the caller's folder."""
    root = paths[0] if paths[0].is_dir() else paths[0].parent
    args = [f"-c{SUITE_INI}", f"--rootdir={root.parent}", f"--confcutdir={root}", "--import-mode=importlib"]
    args += ["-p", "equivtest.options", "-p", "equivtest.pytest_plugin.early"]
    args += ["-p", "equivtest.pytest_plugin.progress", "-o", "console_output_style=classic"]
    args += ["--assert=plain", *workers, "-rfEX"]
    if not _has_entry_point():
        args += ["-p", "equivtest.plugin"]
    for name, value in raw.items():
        values = value if isinstance(value, list) else [value] if value is not None else []
        args += [f"--{name.replace('_', '-')}={text}" for text in values]
    return args + [str(path) for path in paths]


def _has_entry_point() -> bool:
    return any(point.value == "equivtest.plugin" for point in metadata.entry_points(group="pytest11"))


def _run_pytest(args: list[str]) -> int:
    """Runs pytest and returns the exit code of equivtest.  Afterwards restores the caller's environment."""
    import pytest

    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="equivtest-") as scratch:
        os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", scratch)  # not the caller's folder
        for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
            os.environ.pop(name, None)  # these belong to the caller's own tests
        try:
            code = int(pytest.main(args))
        finally:
            os.environ.clear()
            os.environ.update(before)
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        raise Misuse("nothing was selected: no property lies under these paths, or -k leaves none; see equivtest list")
    return code if code in (0, 1) else 2
