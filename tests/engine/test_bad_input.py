"""Bad input to each argument and option of each command ends with one short line and exit code 2, not a traceback."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import hypothesis  # noqa: F401  (see test_cli.py)
import pytest
import typer

import equivtest.programs.run.module
import equivtest.verdicts.claims  # noqa: F401
from equivtest import cli, errors, templates
from equivtest.cases.case import to_data
from equivtest.errors import Misuse
from equivtest.families.linear.case import LinearCase
from equivtest.fingerprint import measuring
from equivtest.pytest_plugin import pytest_run
from equivtest.ranks.hosts.run_hub import RunHub
from equivtest.ranks.hosts.secret import VARIABLE
from equivtest.ranks.pool import Pool

CASE = LinearCase(world_size=1, style="rowwise")
GOOD: dict[str, list[str]] = {
    "init": ["written", "--kind=backend", "--backend=gloo"],
    "run": [],
    "audit": [],
    "replay": ["good.json"],
    "check": ["rowwise_linear", repr(CASE)],
    "judge": ["run", "--reference=json:loads"],
    "fingerprint": [],
    "coverage": [],
    "list": [],
    "compare": ["old", "new"],
    "export": ["github", "report"],
    "merge": ["shards"],
    "verify": ["bundle", "--rerun=1"],
}
"""Arguments of each command that it accepts; a new command needs an entry."""

BAD = (
    "\0:80",
    "\udcff:a",
    "x" * 5_000,
    "x y " * 1_500,
    "localhost:" + "9" * 5_000,
    "9" * 5_000,
    "(" * 5_000,
    "folder",
    "binary",
)
"""Texts that an option may be given; some options accept some of them."""

CODES = (
    f"LinearCase(world_size=0x{'f' * 5_000})",
    f"LinearCase(world_size={'9' * 5_000})",
    f"LinearCase(world_size={'9' * 4_000})",
    f"LinearCase(world_size={'(' * 3_000}{')' * 3_000})",
    f"LinearCase(world_size={'-' * 5_000}1)",
    f"LinearCase({'x' * 5_000}=1)",
    f"{'x' * 5_000}(world_size=1)",
    f"LinearCase(world_size=1, style='{'x y ' * 2_000}')",
    f"LinearCase(world_size=1, members=({'1, ' * 2_000}))",
    f"FetchCase(world_size=1, parameters=({'(-1,), ' * 2_000}), requires_grad=())",
    "LinearCase(world_size=1, dtype='\udcff')",
    r"ModuleCase(world_size=1, build='\udcff:x', parallelize='json:loads', x_shape=(1, 1))",
    "LinearCase(**{'world_size': 1})",
    "LinearCase(world_size={[]: 1})",
    "LinearCase(world_size=1e999)",
)
"""Texts in the place of a case's code."""

FILES: dict[str, Any] = {
    "claim": ["x"],
    "subject": ["x"],
    "schema": "x" * 5_000,
    "limit_s": "x" * 5_000,
    "backend": {"name": "x y " * 2_000},
    "case": {"schema": 1, "type": ["x"], "fields": {}},
}
"""Values of one field of a replay file."""


COMMANDS = typer.main.get_command(cli.app)
"""Made once: making it from the functions takes longer than most commands take to refuse their text."""


class Accepted(BaseException):
    """Raised in the place of a start of ranks or of pytest."""


def parameters() -> Iterator[Any]:
    """Yields (command, option, or the place of an argument) of everything that a command takes a text for."""
    for name, command in COMMANDS.commands.items():  # type: ignore[attr-defined]
        for place, each in enumerate(each for each in command.params if each.param_type_name == "argument"):
            yield pytest.param(name, place, id=f"{name}-{each.name}")
        for each in command.params:
            if each.param_type_name == "option" and not each.is_flag:
                yield pytest.param(name, each.opts[0], id=f"{name}{each.opts[0]}")


def arguments(command: str, parameter: int | str, text: str) -> list[str]:
    options = [each for each in GOOD[command] if each.startswith("--")]
    values = [each for each in GOOD[command] if not each.startswith("--")]
    if isinstance(parameter, str):
        options.append(f"{parameter}={text}" if parameter.startswith("--") else f"{parameter}{text}")
    else:
        values[parameter : parameter + 1] = [text]
    return [command, *options, "--", *values]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files of all kinds, in which no command can start a process."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "deep").write_text("[" * 100_000)
    write_replay(tmp_path / "good.json")
    for path in (tmp_path / "run" / "rank-00000.json", tmp_path / "run" / "rank-00000.safetensors"):
        path.mkdir(parents=True)
    accept = Mock(side_effect=Accepted)
    monkeypatch.setattr(pytest_run, "_run_pytest", accept)
    monkeypatch.setattr(Pool, "_start_server", Mock())
    monkeypatch.setattr(Pool, "run", accept)
    monkeypatch.setattr(Pool, "probe", accept)
    monkeypatch.setattr(RunHub, "_execute", accept)
    monkeypatch.setattr(measuring, "measure", accept)
    monkeypatch.setattr(templates, "_write", accept)
    monkeypatch.setattr(typer.main, "get_command", lambda app: COMMANDS)
    monkeypatch.setenv(VARIABLE, "s" * 40)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_replay(path: Path, **changes: Any) -> None:
    data = {
        "schema": 1, "subject": "rowwise_linear", "claim": "equals_unsharded", "kind": "value", "case": to_data(CASE),
        "backend": {"name": "gloo"},
    }  # fmt: skip
    path.write_text(json.dumps(data | changes))


class Command:
    """Runs `equivtest ARGS` in this process, and checks how it ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch = monkeypatch
        self.capsys = capsys

    def accepts(self, *args: str) -> bool:
        """True if the command would start; otherwise its refusal is one line that quotes little of the input."""
        with self.monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["equivtest", *args])
            patch.setattr(sys, "path", list(sys.path))
            try:
                cli.main()
            except Accepted:
                return True
            except SystemExit as end:
                code = end.code
        out, err = self.capsys.readouterr()
        assert (code, out, err.count("\n"), err[:11]) == (2, "", 1, "equivtest: "), err[:1_000]
        assert err[:-1].isprintable() and len(err) <= errors.MISUSE_CHARS + 100
        assert not any(quotes(err, text) for text in args), err
        return False


def quotes(message: str, text: str, num_chars: int = 500) -> bool:
    """True if a message has more than `num_chars` consecutive characters of a text."""
    return any(message[start : start + num_chars + 1] in text for start in range(len(message) - num_chars))


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


@pytest.mark.parametrize("name", [name for name in GOOD if name not in ("list", "coverage")])
def test_each_command_accepts_valid_arguments(name: str, command: Command) -> None:
    if name in ("judge", "compare", "export", "merge", "verify"):
        pytest.skip("takes a captured job, a report or a bundle, which tests of their own make")
    assert command.accepts(name, *GOOD[name])


@pytest.mark.parametrize(("name", "parameter"), list(parameters()))
def test_invalid_option_value_is_refused_in_one_line(name: str, parameter: int | str, command: Command) -> None:
    accepted = [text[:20] for text in BAD if command.accepts(*arguments(name, parameter, text))]

    assert len(accepted) < len(BAD)


@pytest.mark.parametrize("code", CODES, ids=lambda code: code[:40].encode("ascii", "backslashreplace").decode())
def test_invalid_code_of_a_case_is_refused_in_one_line(code: str, command: Command) -> None:
    assert not command.accepts("check", "rowwise_linear", code)


@pytest.mark.parametrize("field", FILES)
def test_invalid_field_of_a_replay_file_is_refused_in_one_line(field: str, folder: Path, command: Command) -> None:
    write_replay(folder / "bad.json", **{field: FILES[field]})

    assert not command.accepts("replay", "bad.json")


def test_deeply_nested_replay_file_is_refused_in_one_line(command: Command) -> None:
    assert not command.accepts("replay", "deep")


@pytest.mark.parametrize("name", ["x" * 5_000, "no" * 3_000 + "\udcff"])
def test_unknown_command_is_refused_in_one_line(name: str, command: Command) -> None:
    assert not command.accepts(name)
    assert not command.accepts("run", f"--{name}")


@pytest.mark.parametrize("option", ["--picture", "--output"])
def test_unwritable_file_is_refused_before_the_work_begins(option: str, folder: Path, command: Command) -> None:
    name = "judge" if option == "--picture" else "fingerprint"

    assert not command.accepts(*arguments(name, option, "no/such/folder/file"))
    assert not command.accepts(*arguments(name, option, "x" * 300))


@pytest.mark.parametrize("value", ["x" * 5_000, "'" + "x y " * 2_000 + "'", f"({'1, ' * 2_000})"])
def test_message_of_misuse_shortens_a_long_value_to_its_beginning_and_end(value: str) -> None:
    message = str(Misuse(f"a size must be at least 1, got {value}: write another"))

    assert message.startswith(f"a size must be at least 1, got {value[:100]}")
    assert message.endswith(f"{value[-100:]}: write another") and "characters left out" in message
    assert len(message) < errors.VALUE_CHARS + 120


def test_message_of_misuse_keeps_short_values() -> None:
    message = f"expected one of {', '.join('name' * 10 for _ in range(10))}, got 'x'"

    assert str(Misuse(message)) == message
