"""README.md and docs/: every Python file is run, every command is read, every output is a real one.

A block of Python begins with the path of its file; all of them are written into one folder, and the commands run there.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import runpy
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import equivtest
from equivtest.cli import app
from tests.commands import Command, as_in
from tests.documents import Outcome, fenced, file_name
from tests.programs.planted import FAULT

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
FIRST_PROGRAM, DATA_PARALLEL = DOCS / "tutorial/first-program.md", DOCS / "how-to/data-parallel.md"
SUBJECT, TRAINING = DOCS / "how-to/subject.md", DOCS / "how-to/training.md"
CAPTURE, PROGRAMS, BACKEND = DOCS / "how-to/capture.md", DOCS / "how-to/programs.md", DOCS / "how-to/backend.md"
FIRST_BACKEND = DOCS / "tutorial/first-backend-run.md"
DOCUMENTS = (README, *sorted(DOCS.rglob("*.md")))
LINKED = (*DOCUMENTS, *(ROOT / name for name in ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")))
OTHER_COMMANDS = (
    "pip install equivtest",
    "python check_block.py",
    "pytest -n auto -p equivtest.options",
    "torchrun --nproc-per-node",
)

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
"""Fetches that each lack one of the four things in docs/how-to/subject.md, in the order of its table."""


def shown(path: Path, beginning: str, part: str = "") -> str:
    """The one block of output that begins so, and has `part` in it."""
    (block,) = (block for block in fenced(path, "text") if block.startswith(beginning) and part in block)
    return block


def python_files() -> Iterator[tuple[str, str]]:
    for path in DOCUMENTS:
        for block in fenced(path, "python"):
            yield file_name(block), block


def commands() -> Iterator[str]:
    """Yields every command in a document: in its own block, indented or within a line."""
    for path in DOCUMENTS:
        text = path.read_text("utf-8")
        for block in fenced(path, "sh"):
            yield from block.splitlines()
        yield from re.findall(r"^ {4}((?:equivtest|make) .*)$", text, flags=re.M)
        yield from re.findall(r"`((?:equivtest|make) [^`\n ]+ [^`\n]+)`", text)


def quoted_case(path: Path, beginning: str) -> str:
    """The case within the quotes of the command that begins so."""
    (command,) = (line for block in fenced(path, "sh") for line in block.splitlines() if line.startswith(beginning))
    return shlex.split(command, comments=True)[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the documents have a reader write."""
    folder = tmp_path_factory.mktemp("reader")
    for name, text in (*python_files(), ("mypackage/wrong.py", WRONG)):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    return folder


CHEAP = ("-n0", "--known-failures=none", "--audit=off")
"""Options that make `equivtest run` one process, without the known failures, which other tests run."""
SMOKE = ("--profile=smoke", "--dtypes=float32")
LIKE = ("--like", "zero3_fetch_all_reduce")


def in_process(folder: Path, command: Command, *args: str) -> Outcome:
    """A command in `folder`, in this process."""
    ended = command(folder, *args)
    return Outcome(ended.code, ended.stdout + ended.stderr)


def test_readme_begins_with_make_gate_and_make_test() -> None:
    first = README.read_text("utf-8").splitlines()[:10]

    assert [line.split()[:2] for line in first if line.startswith("    ")] == [["make", "gate"], ["make", "test"]]


@pytest.mark.parametrize(("path", "most"), [(README, 600), (ROOT / "ARCHITECTURE.md", 1500)])
def test_readme_and_architecture_have_at_most_the_allowed_number_of_words(path: Path, most: int) -> None:
    assert len(path.read_text("utf-8").split()) <= most


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_code_block_names_its_language(path: Path) -> None:
    fences = re.findall(r"^```(.*)$", path.read_text("utf-8"), flags=re.M)

    assert set(fences[::2]) <= {"python", "sh", "text", "{toctree}", "{eval-rst}"} and not any(fences[1::2])


def test_every_python_block_has_a_different_file_name() -> None:
    names = [name for name, _ in python_files()]

    assert len(names) == len(set(names)) and all(re.fullmatch(r"(mypackage/)?\w+\.py", name) for name in names)


def test_names_that_documents_import_are_in_the_api_reference() -> None:
    api = (DOCS / "reference/api.md").read_text("utf-8")
    public = set(re.findall(r"^\.\. auto\w+:: ([\w.]+)$", api, flags=re.M))
    imports = [
        f"{module}.{name.strip()}"
        for _, text in python_files()
        for module, names in re.findall(r"^from (equivtest[.\w]*) import (.*)$", text, flags=re.M)
        for name in names.split(",")
    ]

    names = {name.replace("equivtest.module.", "equivtest.") for name in imports}
    assert imports and names <= public
    assert {f"equivtest.{name}" for name in equivtest.__all__ if name != "__version__"} <= public


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    listed = set()
    for page in DOCUMENTS:
        for tree in re.findall(r"^```{toctree}\n(.*?)^```$", page.read_text("utf-8"), flags=re.M | re.S):
            listed |= {
                (page.parent / f"{line}.md").resolve() for line in tree.splitlines() if line[:1] not in ("", ":")
            }

    assert {*DOCUMENTS, *LINKED} - listed == {DOCS / "index.md"}


def test_every_parameter_of_the_api_is_described() -> None:
    settings = runpy.run_path(str(DOCS / "conf.py"))
    names = re.findall(r"^\.\. auto(?:function|class):: (.*)$", (DOCS / "reference/api.md").read_text(), flags=re.M)

    assert {name: settings["undocumented_parameters"](pkgutil.resolve_name(name)) for name in names} == {
        name: [] for name in names
    }


def test_page_of_concepts_names_a_module_that_defines_the_classes_of_each_concept() -> None:
    text = (DOCS / "explanation/concepts.md").read_text("utf-8")
    rows = re.findall(r"^\| (?!concept)([^|]+) \| [^|]+ \| (`[^|]+`) \|$", text, flags=re.M)

    assert len(rows) > 80
    for concept, modules in rows:
        sources = [(ROOT / "equivtest" / name).read_text("utf-8") for name in re.findall(r"`([^`]+)`", modules)]
        for name in re.findall(r"`(\w+)`", concept):
            assert any(f"class {name}" in source for source in sources), concept


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_every_documented_command_can_be_parsed(command: str) -> None:
    program, *args = shlex.split(command, comments=True)
    if program == "equivtest":
        subcommands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
        subcommands[args[0]].make_context(args[0], args[1:])
    elif program == "make":
        assert re.search(rf"^{args[0]}:", (ROOT / "Makefile").read_text("utf-8"), flags=re.M)
    else:
        assert command.startswith(OTHER_COMMANDS)


def test_make_test_with_another_python_uses_a_separate_environment() -> None:
    planned = subprocess.run(
        ["make", "--dry-run", "test", "PYTHON=python3.12"], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert ".venv-python3.12/bin/pytest" in planned.stdout


@pytest.mark.parametrize("path", LINKED, ids=lambda path: path.name)
def test_every_link_has_an_existing_target(path: Path) -> None:
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


def test_every_python_file_in_the_documents_can_be_imported(folder: Path) -> None:
    """Leaves out the files of clients, since only `make clients` installs their packages."""
    with as_in(folder):
        for name, text in python_files():
            if re.search(r"^(import|from) transformers\b", text, flags=re.M) or "transformers_llama" in text:
                continue
            module = importlib.import_module(name.removesuffix(".py").replace("/", "."))
            assert module.__file__ == str(folder / name)


@pytest.mark.ranks
def test_documented_cases_print_the_documented_output(folder: Path, command: Command) -> None:
    fetch = quoted_case(SUBJECT, "equivtest check")
    step = quoted_case(TRAINING, "equivtest check")
    checks = [
        (1, shown(FIRST_PROGRAM, "RankRaised"), ["module", quoted_case(FIRST_PROGRAM, "equivtest check")]),
        (1, shown(DATA_PARALLEL, "ValueMismatch"), ["module", quoted_case(DATA_PARALLEL, "equivtest check")]),
        (0, shown(SUBJECT, "mypackage.parallel"), [*LIKE, "mypackage.parallel:my_fetch", fetch]),
        (1, shown(TRAINING, "ValueMismatch"), ["module", step]),
        (0, "", ["module", step.replace("mean_of_means", "token_mean")]),
    ]

    for code, block, args in checks:
        outcome = in_process(folder, command, "check", *args)
        assert outcome.code == code and outcome.shows(block), outcome.text


def test_captured_job_prints_the_documented_verdict(
    folder: Path, command: Command, alone: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = next(each for each in fenced(CAPTURE, "sh")[0].splitlines() if each.startswith("equivtest"))
    for code, block in ((0, shown(CAPTURE, "run: ")), (1, shown(CAPTURE, "ValueMismatch"))):
        with as_in(folder):
            job = importlib.import_module("mypackage.job")
            if code:
                monkeypatch.setattr(job, "tensor_parallel", _with_more(job.tensor_parallel))
            job.train("run")
        outcome = in_process(folder, command, *shlex.split(judge, comments=True)[1:])
        assert outcome.code == code and outcome.shows(block), outcome.text
        shutil.rmtree(folder / "run")


def _with_more(parallelize: Any) -> Any:
    def wrong(module: Any, mesh: Any) -> Any:
        parallel = parallelize(module, mesh)
        parallel.get_submodule("2").register_forward_hook(lambda _, __, given: given * 1.125)
        return parallel

    return wrong


@pytest.mark.ranks
def test_each_wrong_fetch_of_the_documents_prints_the_documented_message(folder: Path, command: Command) -> None:
    messages = re.findall(r"^\| \*\*.* \| `(.*)` \|$", SUBJECT.read_text("utf-8"), flags=re.M)
    fetch = quoted_case(SUBJECT, "equivtest check")
    outcomes = []
    for name, message in zip(re.findall(r"^def (\w+)", WRONG, flags=re.M), messages, strict=True):
        outcomes.append(in_process(folder, command, "check", *LIKE, f"mypackage.wrong:{name}", fetch))
        assert outcomes[-1].code == 1 and outcomes[-1].shows(message), outcomes[-1].text

    assert outcomes[1].shows("  expected  requires_grad True\n  actual    requires_grad False")
    assert outcomes[3].shows("  actual    values have changed")


@pytest.mark.ranks
def test_example_module_of_the_documents_passes(folder: Path, command: Command) -> None:
    outcome = in_process(folder, command, "run", *CHEAP, "test_block.py")

    assert outcome.code == 0 and outcome.shows(shown(FIRST_PROGRAM, "0 failed, 0 known", "of 5 claims")), outcome.text


@pytest.mark.ranks
def test_declined_case_prints_the_documented_line(folder: Path, command: Command) -> None:
    outcome = in_process(folder, command, "run", *CHEAP, *SMOKE, "test_features.py")

    assert outcome.code == 0 and outcome.shows(shown(PROGRAMS, "program block")), outcome.text


@pytest.mark.ranks
def test_documented_fetch_replaces_the_shipped_subject(folder: Path, command: Command) -> None:
    right, wrong = shown(SUBJECT, "0 failed, 0 known", "of 8 claims").splitlines()
    message = shown(README, "ValueMismatch")
    planted = message.split(": ")[1]

    args = ["run", *CHEAP, *SMOKE, "--world-sizes=1,2", "-k", "not refuses", "--subjects"]
    green = in_process(folder, command, *args, "zero3_fetch_all_reduce=mypackage.parallel:my_fetch")
    red = in_process(folder, command, *args, f"zero3_fetch_all_reduce={planted}")

    assert green.code == 0 and green.shows(right), green.text
    assert red.code == 1 and red.shows(message.replace("replay .equivtest", "replay ....equivtest")), red.text
    assert red.shows(wrong), red.text


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "code"), [("mine", 0), ("reversed", 1)])
def test_backend_of_the_tutorial_prints_the_documented_output(
    folder: Path, command: Command, name: str, code: int
) -> None:
    args = ["run", *CHEAP, *SMOKE, "--world-sizes=1,2", "-k", "not refuses", "--subjects=zero3_fetch_all_gather"]
    outcome = in_process(folder, command, *args, f"--backend={name}", "--import=mypackage.backends")
    green, red, lines = fenced(FIRST_BACKEND, "text")

    assert outcome.code == code, outcome.text
    if code:
        assert outcome.shows(red) and all(outcome.shows(line) for line in lines.splitlines()), outcome.text
    else:
        assert outcome.shows(green.replace("9", "8")), outcome.text


@pytest.mark.ranks
def test_run_on_a_wrong_backend_prints_the_documented_line_about_the_backend(
    folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAULT, "swapped_gather")
    backend = ["--backend=planted", "--import=tests.programs.planted"]

    args = ["run", *CHEAP, *SMOKE, "--world-sizes=2", "--subjects=zero3_fetch_all_gather", *backend]
    outcome = in_process(folder, command, *args)

    assert outcome.code == 1 and outcome.shows(shown(BACKEND, "equivtest: the backend")), outcome.text
