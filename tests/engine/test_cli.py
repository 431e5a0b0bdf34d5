"""The command: exit codes, one-line complaints, nothing left in the caller's folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import hypothesis  # noqa: F401  (what runs in this process import is dropped behind each, and torch dies of it)
import pytest

import equivtest.programs.run.module
import equivtest.verdicts.claims  # noqa: F401
from equivtest import cli
from equivtest.cases.case import to_data
from equivtest.errors import BrokenSetup
from equivtest.families.linear.case import LinearCase
from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.programs.case import ModuleCase
from equivtest.pytest_plugin import suite
from equivtest.ranks.backend import Backend
from equivtest.verdicts.verdict import Judgement, Mismatch, Verdict
from tests.commands import Command
from tests.engine.fake_suite import log_of, make_suite
from tests.programs.planted import FAULT
from tests.replies import LINEAR

ROWWISE = LinearCase(world_size=1, style="rowwise", in_features=4, out_features=3)
PADDING = "tests.defects.zero3_fetch.partitions:overlapping_padding"
Streams = pytest.CaptureFixture[str]


def call(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    """The exit code of `equivtest ARGS`, run in this process."""
    monkeypatch.setattr(sys, "argv", ["equivtest", *args])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def written_failure(path: Path, **changes: object) -> Path:
    """A replay file of a case that holds, changed."""
    data = {
        "schema": 1,
        "subject": "rowwise_linear",
        "claim": "equals_unsharded",
        "kind": "value",
        "case": to_data(LinearCase(style="rowwise", world_size=1)),
        "backend": {"name": "gloo", "device": "cpu", "imports": []},
        "message": "",
        "versions": {},
    }
    path.write_text(json.dumps(data | changes))
    return path


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["fly"], "No such command 'fly'"),
        (["run", "--fast"], "No such option"),
        (["run", "--profile=fast"], "--profile: unknown profile 'fast'"),
        (["run", "--world-sizes=0"], "--world-sizes: a world size must be in 1..64"),
        (["run", "--subjects=absent"], "--subjects: no property judges 'absent'"),
        (["run", "--subjects=rowwise_liner"], "did you mean 'rowwise_linear'?"),
        (["run", "--backend=nope"], "'nope'"),
        (["run", "--device=nope"], "'nope'"),
        (["run", "--start=thread"], "--start: unknown start 'thread'; use one of auto, forkserver, spawn"),
        (
            ["check", "rowwise_linear", "LinearCase()", "--limit-s=900"],
            "--limit-s must be seconds, above 0 and",
        ),
        (["check", "rowwise_linear", "LinearCase()", "--start=thread"], "must be one of auto, forkserver, spawn, got"),
        (["run", "--import=no_such_module"], "'no_such_module'"),
        (["run", "--subjects=rowwise_linear=no_such:f"], "--subjects: 'no_such:f' cannot be imported: No module named"),
        (
            ["run", "--subjects=rowwise_linear=json:no"],
            "--subjects: 'json:no' cannot be imported: module 'json' has no",
        ),
        (["run", "--subjects=rowwise_linear=math:pi"], "--subjects: 'math:pi' is not a function: 3.14"),
        (["check", "zero3_fetch_all_gathr", "FetchCase(world_size=1)"], "did you mean 'zero3_fetch_all_gather'?"),
        (["run", "-k", "this and"], "-k: pytest cannot read 'this and'"),
        (["check", "rowwise_linear", "FetchCase(world_size=1)"], "the subject takes a LinearCase, got a FetchCase"),
        (["check", "rowwise_linear", "FetchCase(world_size=2"], "'(' was never closed); paste the text behind"),
        ([], "Missing command; see equivtest --help"),
        (["run", "-n", "many"], "-n: expected a number or auto, got 'many'"),
        (["fingerprint", "--listen=here"], "--listen: expected HOST:PORT, got 'here'"),
        (["run", "no/such/folder"], "no such file or folder: no/such/folder"),
        (["replay"], "Missing argument"),
        (["replay", "no.json"], "no.json cannot be read"),
    ],
)
def test_misuse_prints_one_line_and_exits_with_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: Streams, tmp_path: Path, args: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)

    code = call(monkeypatch, *args)

    stdout, stderr = capsys.readouterr()
    assert (code, stdout, stderr.count("\n")) == (2, "", 1)
    assert stderr.startswith("equivtest: ")
    assert message in stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 99}, "schema 99"),
        ({"case": {"schema": 1, "type": "NoCase", "fields": {}}}, "unknown case class 'NoCase'"),
        ({"case": 3}, "a written case needs"),
        ({"backend": "gloo"}, "backend is broken"),
        ({"claim": "is_fine"}, "unknown claim 'is_fine'"),
    ],
)
def test_replay_command_exits_with_2_for_a_broken_replay_file(
    monkeypatch: pytest.MonkeyPatch, capsys: Streams, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    code = call(monkeypatch, "replay", str(written_failure(tmp_path / "f.json", **changes)))

    assert code == 2
    assert message in capsys.readouterr().err


def test_ctrl_c_during_a_command_prints_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Streams) -> None:
    """Which typer makes an exit code of, or passes on."""

    def interrupt(**options: object) -> int:
        raise KeyboardInterrupt

    for app in (lambda **options: 130, interrupt):
        monkeypatch.setattr("equivtest.cli.app", app)

        assert (call(monkeypatch), capsys.readouterr().err) == (2, "equivtest: interrupted\n")


def test_version_option_prints_the_version_of_torch(monkeypatch: pytest.MonkeyPatch, capsys: Streams) -> None:
    code = call(monkeypatch, "--version")

    assert code == 0
    assert capsys.readouterr().out.endswith(f"(torch {suite.version_of('torch')})\n")


def test_version_of_a_missing_package_is_printed_as_unknown() -> None:
    assert suite.version_of("no-such-distribution") == "unknown"


def test_list_command_prints_every_property(monkeypatch: pytest.MonkeyPatch, capsys: Streams) -> None:
    call(monkeypatch, "list")

    out = capsys.readouterr().out
    assert all(f"\n{name}\n" in f"\n{out}" for name in suite.load_properties(suite.properties_dir()))


@pytest.mark.parametrize(("subject", "expected"), [("a", 0), ("a_wrong", 1), ("a_broken", 2), ("a_not_supported", 1)])
def test_exit_code_of_a_run_depends_on_the_worst_verdict(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, subject: str, expected: int
) -> None:
    make_suite(pytester, subject)

    assert call(monkeypatch, "run", "-n0", "--audit=off", "--profile=smoke", str(pytester.path)) == expected


def test_run_command_exits_with_2_if_no_property_is_selected(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, capsys: Streams
) -> None:
    (pytester.path / "empty").mkdir()

    assert call(monkeypatch, "run", "-n0", "empty") == 2
    assert "equivtest: nothing was selected: no property lies under these paths" in capsys.readouterr().err


def test_pytest_configuration_of_the_caller_is_ignored(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_suite(pytester, "a")
    pytester.makeini("[pytest]\naddopts = --no-such-option\npython_files = nothing.py")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--no-such-option")

    assert call(monkeypatch, "run", "-n0", "--audit=off", "--world-sizes=3", str(pytester.path)) == 0
    assert "search a w3 gate" in log_of(pytester)


def test_run_command_applies_its_options_to_the_run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    make_suite(pytester, "a", "b")

    call(
        monkeypatch, "run", "-n0", "-x", "-v", "-k", "w2", "--subjects=b=json:loads", "--report=out", str(pytester.path)
    )

    assert [line for line in log_of(pytester) if "search" in line] == ["search json:loads w2 gate"]
    assert (pytester.path / "out" / "junit.xml").exists()


def test_run_command_passes_pytest_options_to_pytest(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make_suite(pytester, "a_wrong", "b_wrong")
    common = ("run", "-n0", "--audit=off", "--world-sizes=3", str(pytester.path))

    call(monkeypatch, *common, "--co", "-q")
    assert "search" not in "".join(log_of(pytester))

    call(monkeypatch, *common, "--maxfail", "1", "--durations", "0", "-q")
    assert [line for line in log_of(pytester) if "search" in line] == ["search a_wrong w3 gate"]
    assert "slowest durations" in capfd.readouterr().out


@pytest.mark.ranks
def test_shipped_properties_run_from_an_empty_folder_and_leave_it_empty(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "equivtest.cli", "run", "--profile=smoke", "--world-sizes=2", "--dtypes=float32",
               "--subjects=zero3_fetch_all_gather", "--known-failures=none", "-n0"]  # fmt: skip
    env_path = str(Path(cli.__file__).parents[1])

    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120, env=environment(env_path)
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ranks
def test_replay_command_exits_with_0_if_the_claim_holds(command: Command, tmp_path: Path) -> None:
    ended = command(tmp_path, "replay", str(written_failure(tmp_path / "f.json")))

    assert (ended.code, ended.stderr) == (0, "")
    assert "rowwise_linear: equals_unsharded holds in LinearCase(" in ended.stdout


@pytest.mark.ranks
def test_all_processes_iterate_a_set_alike_if_no_hash_seed_is_set(tmp_path: Path) -> None:
    """There is one chance in 10! that the reference and the ranks draw one order."""
    here = "tests.programs.parts:"
    case = ModuleCase(
        build=f"{here}over_a_set", parallelize=f"{here}inner_divided", world_size=2, x_shape=(2, 4),
        values=(("real", 0),), by_parts=True,
    )  # fmt: skip
    names = environment(str(Path(cli.__file__).parents[1]))
    names.pop("PYTHONHASHSEED", None)

    done = subprocess.run(
        [sys.executable, "-m", "equivtest.cli", "check", "module", repr(case)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=names,
    )

    assert done.returncode == 0, done.stdout + done.stderr


def test_start_method_that_ranks_cannot_use_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: Streams
) -> None:
    """A server that refuses it is in tests/ranks/test_pool.py."""

    def refuse(backend: Backend, _: str) -> NoReturn:
        raise BrokenSetup(f"a fork of {backend.imports} runs no backward:\n{backend.start}")

    monkeypatch.setattr("equivtest.ranks.hosts.run_hub.pool_on_hosts", refuse)
    code = call(monkeypatch, "check", "rowwise_linear", repr(ROWWISE), "--start=forkserver", "--import=json")

    told = "equivtest: a fork of ('json',) runs no backward: forkserver\n"
    assert (code, *capsys.readouterr()) == (2, "", told)


@pytest.mark.parametrize(
    ("kinds", "code", "told"),
    [
        (("holds", "inconclusive"), 0, ["mine: equals_unsharded hold in ", "repeats_itself inconclusive on some"]),
        (("value", "inconclusive"), 1, ["ValueMismatch: mine: "]),
        (("value", "holds"), 1, ["ValueMismatch: mine: "]),
        (("value", "replica"), 1, ["ValueMismatch: mine: ", "ReplicaMismatch: mine: "]),
    ],
)
def test_check_command_prints_the_verdict_of_each_claim(
    kinds: tuple[str, str], code: int, told: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Streams
) -> None:
    names = ("equals_unsharded", "repeats_itself")
    verdicts = [
        Verdict(claim=claim, subject="mine", case=LINEAR, judgement=Judgement(kind))
        for kind, claim in zip(kinds, names, strict=True)
    ]
    monkeypatch.setattr("equivtest.verdicts.judging.judge", lambda *args, **fields: verdicts)
    monkeypatch.setattr("equivtest.diagnose.blame.with_fault", lambda verdict, *args: verdict)

    assert cli.check("mine", repr(LINEAR)) == code
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("mine", "Value", "Replica"))]
    assert len(lines) == len(told) and all(words in line for words, line in zip(told, lines, strict=True))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("subject", "fault", "line"),
    [
        (PADDING, "", "equals_unsharded fails on gloo and the CPU too (value)"),
        ("zero3_fetch_all_gather", "swapped_gather", ""),
    ],
)
def test_check_on_another_backend_says_whether_gloo_fails_too(
    subject: str, fault: str, line: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAULT, fault)
    case = FetchCase(world_size=2, parameters=((1,), (1,)), requires_grad=(True, False), collective="all_gather")
    backend = ["--backend=planted", "--import=tests.programs.planted", "--like=zero3_fetch_all_gather"]

    ended = command(tmp_path, "check", subject, repr(case), *backend)

    assert ended.code == 1 and "ValueMismatch" in ended.stdout
    told = [each for each in ended.stdout.splitlines() if "gloo and the CPU" in each]
    assert told[:1] == [f"{subject}: {line}"] * bool(line)


@pytest.mark.parametrize(
    ("on_gloo", "lines"),
    [(("value", "value"), ["mine: equals_unsharded fails on gloo and the CPU too (value)"]), (("value", "holds"), [])],
)
def test_claim_counts_as_failing_on_gloo_only_if_every_draw_fails_there(
    on_gloo: tuple[str, str], lines: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Streams
) -> None:
    def verdicts(kinds: Sequence[str]) -> list[Verdict]:
        wrong = (Mismatch("output", 0, "1", "2", (0,), error=1.0),)
        return [
            Verdict(claim="equals_unsharded", subject="mine", case=LINEAR, draw=draw, judgement=Judgement(kind, wrong))
            for draw, kind in enumerate(kinds)
        ]

    monkeypatch.setattr("equivtest.verdicts.judging.judge", lambda *args, **fields: verdicts(("value", "value")))
    monkeypatch.setattr("equivtest.search.differential.judge", lambda *args, **fields: verdicts(on_gloo))
    monkeypatch.setattr("equivtest.diagnose.blame.with_fault", lambda verdict, *args: verdict)
    monkeypatch.setattr("equivtest.ranks.backend.Backend.is_gloo_on_cpu", False)

    assert cli.check("mine", repr(LINEAR)) == 1
    assert [line for line in capsys.readouterr().out.splitlines() if "gloo" in line] == lines


def environment(path: str) -> dict[str, str]:
    """This process's environment, with the checkout on the path."""
    return os.environ | {"PYTHONPATH": path}
