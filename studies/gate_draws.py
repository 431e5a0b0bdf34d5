"""Draws the cases of the gate in several ways, which must all give the same hash: `python -m studies.gate_draws`.

The hash is of the list of (subject, case, seeds).  The ways: alone, with every property loaded, among modules full of
constants, from a wheel, and as judged by a run of the gate with -n 0, 1 and 2.  With --drawn such a run only draws and
does not judge, in a tenth of the time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from equivtest.pytest_plugin.suite import properties_dir, shipped
from studies.json_lines import lines_of

ROOT = Path(__file__).parents[1]
NUM_WORKERS = (0, 1, 2)
LARGE = [10**6 + 7919 * number for number in range(500)]
MADE_UP = {
    "made_up_integers": f"SIZES = {[*range(100, 500)]}\nLARGE = {LARGE}\n",
    "made_up_floats": f"RATES = {[number + 0.37 for number in range(900)]}\n",
    "made_up_names": f"NAMES = {[f'shard({number})' for number in range(450)]}\n"
    f"KEYS = {[f'k{number}'.encode() for number in range(450)]}\n",
}
"""Name -> text of a user's module, with as many constants as Hypothesis takes from one module."""

DRAW = """
import importlib, importlib.util, json, sys
from pathlib import Path
from equivtest.base import limits
from equivtest.cases.case import to_data
from equivtest.cases.picks import builder_of
from equivtest.search.chunks import chunk_cases, chunk_of
from equivtest.base.profiles import PROFILES, plan
from equivtest.property import Property, resolved
from equivtest.ranks.pool import Pool
from equivtest.pytest_plugin.suite import properties_dir
options = json.loads(sys.argv[1])
for name in options["imports"]:
    importlib.import_module(name)
for path in sorted(Path(options["folder"] or properties_dir()).glob(options["files"])):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for prop in vars(module).values():
        if isinstance(prop, Property) and not prop.absent and prop.subject in (options["subjects"] or [prop.subject]):
            has_tables = builder_of(prop.cases) is not None
            for part in plan(PROFILES["gate"], limits.WORLD_SIZES, prop.weight, has_tables=has_tables):
                chunk = chunk_of(part, limits.DTYPES)
                if prop.resolve is not None:
                    with Pool() as pool:
                        prop = resolved(prop, pool, chunk.space)
                for case in chunk_cases(prop, chunk):
                    print(json.dumps([prop.subject, to_data(case), [seed for _, seed in case.values]]))
"""
"""A program that draws the gate's cases with the equivtest of its own process, and prints a line for each."""


def lines_of_draws(
    cwd: Path,
    *,
    files: str = "test_*.py",
    folder: str = "",
    subjects: Sequence[str] = (),
    imports: Sequence[str] = (),
    python: str = sys.executable,
    path: Iterable[Path] = (ROOT,),
    hash_seed: int = 0,
) -> list[str]:
    """Draws the gate's cases in a new process.  Returns its lines, sorted.

    Args:
        files: Pattern of the property files that the process loads.
        folder: Folder of these files, or '' for the shipped files.
        imports: Modules that the process imports first.
    """
    options = json.dumps({"files": files, "folder": folder, "subjects": list(subjects), "imports": list(imports)})
    environment = environment_of(path) | {"PYTHONHASHSEED": str(hash_seed)}
    command = [python, "-c", DRAW, options]
    done = subprocess.run(command, cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, check=True)
    return sorted(set(done.stdout.splitlines()))


def lines_of_run(
    folder: Path, workers: int, suite: Path, *args: str, subjects: Sequence[str] = (), is_judged: bool = True
) -> list[str]:
    """Runs a folder of properties with xdist workers.  Returns the cases that it judged or drew, sorted."""
    report = folder / "report"
    command = [sys.executable, "-m", "equivtest.cli", "run"]
    if not is_judged:
        command = [sys.executable, "-m", "pytest", "-p", "equivtest.options", "-p", "studies.drawn_only"]
        command += [
            f"-c{ROOT / 'equivtest' / 'pytest_plugin' / 'suite.ini'}",
            f"--rootdir={suite.parent}",
            "--import-mode=importlib",
        ]
        command += ["--known-failures=none"]
    command += [str(suite), "--audit=off", f"--report={report}", "-n", str(workers), *args]
    command += [f"--subjects={','.join(subjects)}"] * bool(subjects)
    subprocess.run(command, cwd=folder, env=environment_of((ROOT, folder)), stdout=sys.stderr, check=False)
    records = lines_of(report / "verdicts.jsonl")
    return sorted({line_of(record) for record in records})


def line_of(record: Mapping[str, object]) -> str:
    case = record["case"]
    assert isinstance(case, dict)
    return json.dumps([record["subject"], case, [seed for _, seed in case["fields"]["values"]]])


def environment_of(path: Iterable[Path]) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}


def make_up_modules(folder: Path) -> list[str]:
    for name, text in MADE_UP.items():
        (folder / f"{name}.py").write_text(text)
    return list(MADE_UP)


def mixed_suite(folder: Path, files: str = "test_*.py") -> Path:
    mixed = folder / "mixed"
    mixed.mkdir()
    for path in properties_dir().glob(files):
        shutil.copy(path, mixed)
    imports = f"import {', '.join(MADE_UP)}\n"
    (mixed / "conftest.py").write_text(f"from equivtest.options import pytest_addoption\n{imports}")
    return mixed


def wheel_python(folder: Path) -> str:
    """Installs a wheel of this checkout in a new environment, and returns the path of that environment's Python.

    The new environment also sees this environment's packages.
    """
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", f"--outdir={folder / 'dist'}", str(ROOT)]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    python = str(folder / "venv" / "bin" / "python")
    [wheel] = (folder / "dist").glob("*.whl")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], check=True)
    [site] = (folder / "venv").glob("lib/python*/site-packages")
    (site / "packages_of_main_environment.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return python


def ways(folder: Path, subjects: Sequence[str], *, is_judged: bool) -> Iterator[tuple[str, list[str]]]:
    empty = folder / "empty"
    empty.mkdir()
    made_up = make_up_modules(folder)
    files = sorted(path.name for path in properties_dir().glob("test_*.py"))
    alone = [lines_of_draws(empty, files=name, subjects=subjects) for name in files]
    yield "each file of properties in its own process", sorted({line for lines in alone for line in lines})
    yield "all properties in one process", lines_of_draws(empty, subjects=subjects, hash_seed=7)
    yield "beside three modules full of constants", lines_of_draws(folder, subjects=subjects, imports=made_up)
    yield "from a wheel", lines_of_draws(empty, subjects=subjects, python=wheel_python(folder), path=())
    word = "judged" if is_judged else "drawn"
    for workers in NUM_WORKERS:
        lines = lines_of_run(folder, workers, properties_dir(), subjects=subjects, is_judged=is_judged)
        yield f"{word} by a run with -n {workers}", lines
    lines = lines_of_run(folder, 2, mixed_suite(folder), subjects=subjects, is_judged=is_judged)
    yield f"{word} by a run beside the three modules", lines


def hash_of(lines: Iterable[str]) -> str:
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()[:16]


def main() -> None:
    """Prints the hash for each way of drawing.  Returns 1 if two hashes differ."""
    parser = argparse.ArgumentParser(prog="python -m studies.gate_draws")
    parser.add_argument("--subjects", default="", help="These alone, by comma; all take about a gate for each run.")
    parser.add_argument("--drawn", action="store_true", help="Have the runs draw and judge nothing.")
    options = parser.parse_args()
    text = options.subjects
    known = {prop.subject for prop in shipped().values()}
    subjects = [name for name in text.split(",") if name]
    if unknown := set(subjects) - known:
        parser.error(f"no property judges {', '.join(sorted(unknown))}")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name, lines in ways(Path(folder), subjects, is_judged=not options.drawn):
            found.append(hash_of(lines))
            print(f"{found[-1]}  {len(lines):5} cases  {name}", flush=True)
    print("one hash" if len(set(found)) == 1 else f"{len(set(found))} hashes")
    sys.exit(len(set(found)) > 1)


if __name__ == "__main__":
    main()
