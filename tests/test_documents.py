"""What README.md and docs/ show: every Python file is run, every command is read, every output is a real one.

A block of Python begins with the path of its file; all of them are written into one folder, and the commands run there.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

from equivtest.cli import app
from tests.rank_programs_planted import FAULT

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
MODULE, SUBJECT, TRAINING = ROOT / "docs/module.md", ROOT / "docs/subject.md", ROOT / "docs/training.md"
DOCUMENTS = (README, *sorted((ROOT / "docs").glob("*.md")))
LINKED = (*DOCUMENTS, *(ROOT / name for name in ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")))
OTHER_COMMANDS = ("pip install equivtest", "pytest -n auto -p equivtest.options")
LIMIT_S = 300  # a run of a fetch takes ten seconds alone

CHECKS = """
import contextlib, functools, io, json, os, sys
from equivtest.cli import app
from equivtest.ranks import pool

sys.path.append(os.getcwd())
results = []
with pool.Pool() as lender:
    pool.Pool = functools.partial(pool.Pool, beside=lender)
    for args in json.loads(sys.argv[1]):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = app(["check", *args], standalone_mode=False)
        results.append((code, out.getvalue()))
print(json.dumps(results))
"""
"""Several `equivtest check` in one process, with one server of ranks, as torch is imported once in each."""

WRONG = """
import torch
import torch.distributed as dist

from equivtest.tensors import Placed
from mypackage.parallel import my_fetch


def unpadded(case, mesh, given):
    answers = my_fetch(case, mesh, given)
    for index, name in enumerate(case.given_names()):
        part = given[name].detach().flatten().tensor_split(mesh.size())[mesh.get_local_rank()]
        answers[f"partition.{index}"] = Placed(part.clone(), answers[f"partition.{index}"].layout)
    return answers


def without_flags(case, mesh, given):
    answers = my_fetch(case, mesh, given)
    return {name: Placed(answer.local.detach(), answer.layout) for name, answer in answers.items()}


def two_collectives(case, mesh, given):
    dist.all_reduce(torch.zeros(1), group=mesh.get_group())
    return my_fetch(case, mesh, given)


def in_place(case, mesh, given):
    answers = my_fetch(case, mesh, given)
    with torch.no_grad():
        given["param.0"].zero_()
    return answers
"""
"""Fetches that each lack one of the four things in docs/subject.md, in the order of its table."""


@dataclass(frozen=True)
class Outcome:
    """What a command ended with, and what it printed."""

    code: int
    text: str

    def shows(self, block: str) -> bool:
        """Whether the lines of `block` are printed in this order; '...' stands for anything, in a line too."""
        lines = iter(self.text.splitlines())
        return all(any(_fits(shown, line) for line in lines) for shown in block.splitlines() if shown != "...")


def _fits(shown: str, line: str) -> bool:
    return re.fullmatch(re.escape(shown.rstrip()).replace(re.escape("..."), ".*"), line.rstrip()) is not None


def fenced(path: Path, language: str) -> list[str]:
    """The blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text("utf-8"), flags=re.M | re.S)


def shown(path: Path, beginning: str, part: str = "") -> str:
    """The one block of output that begins so, and has `part` in it."""
    (block,) = (block for block in fenced(path, "text") if block.startswith(beginning) and part in block)
    return block


def python_files() -> Iterator[tuple[str, str]]:
    """Path and text of every block of Python."""
    for path in DOCUMENTS:
        for block in fenced(path, "python"):
            yield block.partition("\n")[0].removeprefix("# "), block


def commands() -> Iterator[str]:
    """Every command that some document shows: in a block of its own, indented or within a line."""
    for path in DOCUMENTS:
        text = path.read_text("utf-8")
        for block in fenced(path, "sh"):
            yield from block.splitlines()
        yield from re.findall(r"^ {4}((?:equivtest|make) .*)$", text, flags=re.M)
        yield from re.findall(r"`((?:equivtest|make) [^`\n ]+ [^`\n]+)`", text)


def quoted_case(path: Path, beginning: str) -> str:
    """The case within the quotes of the command that begins so."""
    (command,) = (line for block in fenced(path, "sh") for line in block.splitlines() if line.startswith(beginning))
    return shlex.split(command)[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the documents have a reader write."""
    folder = tmp_path_factory.mktemp("reader")
    for name, text in (*python_files(), ("mypackage/wrong.py", WRONG)):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    return folder


def ended(folder: Path, args: list[str], environment: Mapping[str, str] | None = None) -> Outcome:
    """A process of Python in `folder`; this checkout is what it imports."""
    process = subprocess.run(
        [sys.executable, *args],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    return Outcome(process.returncode, process.stdout + process.stderr)


def run(folder: Path, *args: str, environment: Mapping[str, str] | None = None) -> Outcome:
    """`equivtest run` in this process alone, without the known failures, which other tests run."""
    cheap = ["-n0", "--known-failures=none", "--audit=off"]
    return ended(folder, ["-m", "equivtest.cli", "run", *cheap, *args], environment)


def test_the_first_screen_has_both_commands_that_set_everything_up() -> None:
    first = README.read_text("utf-8").splitlines()[:10]

    assert [line.split()[:2] for line in first if line.startswith("    ")] == [["make", "conform"], ["make", "test"]]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_block_says_what_it_is(path: Path) -> None:
    fences = re.findall(r"^```(.*)$", path.read_text("utf-8"), flags=re.M)

    assert set(fences[::2]) <= {"python", "sh", "text"} and not any(fences[1::2])


def test_every_python_block_is_a_file_of_its_own() -> None:
    names = [name for name, _ in python_files()]

    assert len(names) == len(set(names)) and all(re.fullmatch(r"(mypackage/)?\w+\.py", name) for name in names)


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_every_command_is_understood(command: str) -> None:
    program, *args = shlex.split(command, comments=True)
    if program == "equivtest":
        subcommands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
        subcommands[args[0]].make_context(args[0], args[1:])
    elif program == "make":
        assert re.search(rf"^{args[0]}:", (ROOT / "Makefile").read_text("utf-8"), flags=re.M)
    else:
        assert command.startswith(OTHER_COMMANDS)


@pytest.mark.parametrize("path", LINKED, ids=lambda path: path.name)
def test_every_link_leads_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text("utf-8")):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        linked = (path.parent / name).resolve() if name else path
        assert linked.exists(), target
        assert not anchor or anchor in _anchors(linked), target


def _anchors(path: Path) -> set[str]:
    """The headings as GitHub turns them into anchors."""
    headings = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture(scope="module")
def checked(folder: Path) -> list[Outcome]:
    """What `equivtest check` says of the cases that the documents show, then of each fetch of WRONG."""
    like = ["--like", "zero3_fetch_all_reduce"]
    fetch = quoted_case(SUBJECT, "equivtest check")
    step = quoted_case(TRAINING, "equivtest check")
    checks = [
        ["module", shown(README, "RankRaised").rpartition("  case      ")[2].strip()],
        ["module", quoted_case(MODULE, "equivtest check")],
        [*like, "mypackage.parallel:my_fetch", fetch],
        *([*like, f"mypackage.wrong:{name}", fetch] for name in re.findall(r"^def (\w+)", WRONG, flags=re.M)),
        ["module", step],
        ["module", step.replace("mean_of_means", "token_mean")],
    ]
    modules = [name.removesuffix(".py").replace("/", ".") for name, _ in python_files()]
    process = ended(folder, ["-c", f"import {', '.join(modules)}\n{CHECKS}", json.dumps(checks)])
    return [Outcome(code, text) for code, text in json.loads(process.text.splitlines()[-1])]


@pytest.mark.ranks
def test_cases_print_what_the_documents_show(checked: list[Outcome]) -> None:
    blocks = shown(README, "RankRaised"), shown(MODULE, "ValueMismatch"), shown(SUBJECT, "mypackage.parallel")

    assert [outcome.code for outcome in checked[:3]] == [1, 1, 0]
    for outcome, block in zip(checked, blocks, strict=False):
        assert outcome.shows(block), outcome.text


@pytest.mark.ranks
def test_a_mean_of_means_is_red_and_the_mean_over_all_tokens_green(checked: list[Outcome]) -> None:
    assert checked[-2].code == 1 and checked[-2].shows(shown(TRAINING, "ValueMismatch")), checked[-2].text
    assert checked[-1].code == 0, checked[-1].text


@pytest.mark.ranks
def test_a_fetch_that_lacks_something_is_told_so_in_these_words(checked: list[Outcome]) -> None:
    messages = re.findall(r"^\| \*\*.* \| `(.*)` \|$", SUBJECT.read_text("utf-8"), flags=re.M)

    for outcome, message in zip(checked[3:-2], messages, strict=True):
        assert outcome.code == 1 and outcome.shows(message), outcome.text
    assert checked[4].shows("  expected  requires_grad True\n  actual    requires_grad False")
    assert checked[6].shows("  actual    values have changed")


@pytest.mark.ranks
def test_the_readers_module_is_green(folder: Path) -> None:
    outcome = run(folder, "test_models.py")

    assert outcome.code == 0 and outcome.shows(shown(README, "0 failed, 0 known", "of 5 claims")), outcome.text


@pytest.mark.ranks
def test_a_fetch_takes_the_place_of_the_shipped_one(folder: Path) -> None:
    """On fewer ranks and in one dtype, which is cheaper; what is shown is the same."""
    right, wrong = shown(README, "0 failed, 0 known", "of 8 claims").splitlines()
    message = shown(README, "ValueMismatch")
    planted = message.split(": ")[1]

    cheap = ["--profile=smoke", "--world-sizes=1,2", "--dtypes=float32", "-k", "not refuses", "--subjects"]
    green = run(folder, *cheap, "zero3_fetch_all_reduce=mypackage.parallel:my_fetch")
    red = run(folder, *cheap, f"zero3_fetch_all_reduce={planted}")

    assert green.code == 0 and green.shows(right), green.text
    assert red.code == 1 and red.shows(message.replace("replay .equivtest", "replay ....equivtest")), red.text
    assert red.shows(wrong), red.text


@pytest.mark.ranks
def test_a_wrong_backend_is_named_in_the_first_line(folder: Path) -> None:
    smoke = ["--profile=smoke", "--world-sizes=2", "--dtypes=float32", "--subjects=zero3_fetch_all_gather"]
    backend = ["--backend=planted", "--import=tests.rank_programs_planted"]

    outcome = run(folder, *smoke, *backend, environment={FAULT: "swapped_gather", "PYTHONWARNINGS": "ignore"})

    assert outcome.code == 1 and outcome.shows(shown(README, "equivtest: the backend")), outcome.text
