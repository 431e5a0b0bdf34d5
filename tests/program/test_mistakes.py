"""Messages on a newcomer's mistakes: what happened, where, and the way out, in at most five lines."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from equivtest.errors import Misuse
from equivtest.programs import checking
from equivtest.programs.case import ModuleCase
from equivtest.programs.property import _on_silence
from equivtest.programs.reference import _built
from equivtest.ranks.failure import describe_exception
from equivtest.ranks.pool import Pool
from equivtest.ranks.reply import Reply
from equivtest.verdicts.claims import equals_unsharded
from equivtest.verdicts.compare import compare
from equivtest.verdicts.message import describe_failure, write_brief_message, write_message
from equivtest.verdicts.verdict import Verdict
from studies.mistakes import MISTAKES, Mistake, problem_of
from tests.programs import mistakes

CASE = ModuleCase(
    world_size=2, build="tests.programs.mistakes:Heads", parallelize="tests.programs.mistakes:as_it_is", x_shape=(2, 6)
)


def raised(name: str) -> tuple[str, str, str]:
    """Returns what a rank would tell of the function."""
    try:
        getattr(mistakes, name)()
    except Exception as error:
        return describe_exception(error)
    raise AssertionError(f"{name} did not raise")


def reply_of(name: str, rank: int = 0) -> Reply:
    error_type, text, detail = raised(name)
    return Reply(rank=rank, outcome="raised", error_type=error_type, error_text=text, detail=detail)


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("without_package", "install that package in this environment, or leave the import out"),
        ("without_device", "take mesh.device_type in place of a fixed device; build leaves the module on the CPU"),
        ("without_reason", "fix that; build runs in one process, without ranks"),
        ("without_configuration", "fix that; build runs in one process, without ranks"),
    ],
)
def test_exception_in_build_is_reported_with_its_line_and_a_remedy(name: str, way_out: str) -> None:
    with pytest.raises(Misuse) as caught:
        _built(f"tests.programs.mistakes:{name}")

    place, message = rf"{Path(mistakes.__file__)}:", str(caught.value)
    assert place in message and message.endswith(f": {way_out}") and "\n" not in message


def test_sys_exit_in_the_unsharded_forward_raises_misuse() -> None:
    program = "tests.programs.mistakes:"

    with pytest.raises(Misuse, match=r"the unsharded module does not take an x of shape .* in float32: SystemExit: 3"):
        ModuleCase(world_size=2, build=program + "Exiting", parallelize=program + "rowwise", x_shape=(2, 3))


def test_training_a_module_that_gets_no_gradient_raises_misuse() -> None:
    with pytest.raises(Misuse, match=r"so the optimizer updates nothing: leave out detach\(\)"):
        ModuleCase(
            world_size=2,
            build="tests.programs.mistakes:Detached",
            parallelize="tests.programs.mistakes:rowwise",
            x_shape=(2, 3),
            optimizer="tests.programs.mistakes:sgd",
            values=(("real", 0),),
        )


@pytest.mark.ranks
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_message_of_each_common_mistake_is_short_and_says_what_to_do(
    mistake: Mistake, tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(checking._pools, pool.backend, pool)

    assert problem_of(mistake, mistake.message()) == ""


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("", "not found"),
        ("\n".join("abcdef"), "6 lines"),
        ('  File "a.py", line 3', "a traceback"),
        ("wrong", "no way out: inputs="),
    ],
)
def test_style_check_of_messages_finds_a_message_that_breaks_a_rule(message: str, problem: str) -> None:
    assert problem_of(MISTAKES[0], message) == problem


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("without_package", "leave the import out. "),
        ("without_device", "take mesh.device_type "),
        ("with_broken_json", ": fix that"),
    ],
)
def test_exception_in_parallelize_is_reported_with_its_line_and_a_remedy(name: str, way_out: str) -> None:
    lines = _on_silence(CASE, reply_of(name)).splitlines()

    assert way_out in lines[0] and str(Path(mistakes.__file__)) in lines[1] and len(lines) == 3


def raised_on_both(name: str = "with_odd_heads") -> Verdict:
    """Returns the verdict on a program that raises on both ranks, as the function does."""
    replies = [reply_of(name, rank) for rank in range(2)]
    (verdict,) = compare("module", CASE, 0, [], replies, [equals_unsharded])
    return verdict


def test_error_that_all_ranks_raise_is_shown_once_with_its_user_code() -> None:
    lines = describe_failure(raised_on_both())[2:]

    files = [line for line in lines if line.startswith("    File ")]
    assert len(files) == 3 and "in forward" in files[-1]  # the others are this test's
    assert len(lines) == 1 + 2 * len(files) + 1
    assert lines[0].startswith("  every rank raised RuntimeError: ") and "raise equivtest.NotSupported" in lines[-1]


@pytest.mark.parametrize("fault", ["", "parallelization: every call is right"])
def test_brief_message_of_an_error_that_all_ranks_raise_has_five_lines(fault: str) -> None:
    headline, error, way_out, case, again = write_brief_message(
        replace(raised_on_both(), fault=fault), "a/b.json"
    ).splitlines()

    assert headline == "RankRaised: module: a rank raised (claim equals_unsharded)"
    assert re.fullmatch(rf"  every rank raised RuntimeError: .*, at {mistakes.__file__}:\d+ in forward", error)
    assert "raise equivtest.NotSupported" in way_out and case == f"  case      {CASE!r}"
    assert again == "  again     equivtest replay a/b.json"


def test_brief_message_of_an_error_in_the_standard_library_has_the_user_line() -> None:
    _, error, *_ = write_brief_message(raised_on_both("with_broken_json"), "a/b.json").splitlines()

    assert re.fullmatch(rf"  every rank raised JSONDecodeError: .*, at {mistakes.__file__}:\d+ in .*", error)


@pytest.mark.parametrize("change", [{"fault": "collective: all_reduce"}, {"history": "holds alone in new ranks"}])
def test_brief_message_of_an_error_that_all_ranks_raise_keeps_fault_and_history(change: dict[str, str]) -> None:
    (text,) = change.values()

    assert text in write_brief_message(replace(raised_on_both(), **change), "a/b.json")  # type: ignore[arg-type]


def test_error_of_one_rank_keeps_its_traceback() -> None:
    replies = [reply_of("with_odd_heads"), replace(reply_of("with_odd_heads", 1), error_text="another")]
    (verdict,) = compare("module", CASE, 0, [], replies, [equals_unsharded])

    assert write_brief_message(verdict, "a/b.json") == write_message(verdict, replay="a/b.json")
