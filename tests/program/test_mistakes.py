"""Messages on a newcomer's mistakes: what happened, where, and the way out, in at most five lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from equivtest.errors import Misuse
from equivtest.programs.case import ModuleCase
from equivtest.programs.property import _on_silence
from equivtest.programs.reference import _built
from equivtest.ranks.failure import describe_exception
from equivtest.ranks.reply import Reply
from equivtest.verdicts.claims import equals_unsharded
from equivtest.verdicts.compare import compare
from equivtest.verdicts.message import describe_failure
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
    ],
)
def test_build_that_raises_names_place_and_way_out(name: str, way_out: str) -> None:
    with pytest.raises(Misuse) as caught:
        _built(f"tests.programs.mistakes:{name}")

    place, message = rf"{Path(mistakes.__file__)}:", str(caught.value)
    assert place in message and message.endswith(f": {way_out}") and "\n" not in message


@pytest.mark.parametrize(
    ("name", "way_out"), [("without_package", "leave the import out. "), ("without_device", "take mesh.device_type ")]
)
def test_parallelize_that_raises_names_place_and_way_out(name: str, way_out: str) -> None:
    lines = _on_silence(CASE, reply_of(name)).splitlines()

    assert way_out in lines[0] and str(Path(mistakes.__file__)) in lines[1] and len(lines) == 3


def test_error_of_every_rank_is_shown_once_with_its_own_lines() -> None:
    replies = [reply_of("with_odd_heads", rank) for rank in range(2)]

    verdicts = compare("module", CASE, 0, [], replies, [equals_unsharded])

    lines = describe_failure(verdicts[0])[2:]

    files = [line for line in lines if line.startswith("    File ")]
    assert len(files) == 3 and "in forward" in files[-1]  # the others are this test's
    assert len(lines) == 1 + 2 * len(files) + 2
    assert lines[-2] == "  every other rank raised the same" and "raise equivtest.NotSupported" in lines[-1]
