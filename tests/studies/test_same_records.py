"""The command that compares two runs draw by draw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from studies.same_records import main


def report(folder: Path, *draws: dict[str, object]) -> str:
    folder.mkdir()
    (folder / "verdicts.jsonl").write_text("".join(json.dumps(draw) + "\n" for draw in draws))
    return str(folder)


def test_runs_are_the_same_whatever_their_order_and_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right, wrong = {"seed": 0, "verdicts": {"c": "holds"}}, {"seed": 0, "verdicts": {"c": "value"}}
    first = report(tmp_path / "first", right | {"busy_s": 1.0}, wrong | {"busy_s": 2.0})
    second = report(tmp_path / "second", wrong | {"busy_s": 0.5}, right | {"busy_s": 0.1})
    third = report(tmp_path / "third", right | {"busy_s": 1.0}, right | {"busy_s": 2.0})

    assert main([first, second]) == 0
    assert main([first, third]) == 1
    assert f"1 of {third} alone" in capsys.readouterr().out
