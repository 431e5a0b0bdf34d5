"""Results of studies: the file that a run leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from studies import write


def test_written_result_begins_with_its_command_and_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "RESULTS", tmp_path)
    monkeypatch.setattr(write, "header", lambda command: f"# `{command}`\n\n")

    assert write.main("plain", "README.md") == 0
    lines = (tmp_path / "plain.md").read_text().splitlines()
    assert lines[0] == "# `python -m studies.plain README.md`" and lines[3].startswith("documents ")


def test_failed_study_leaves_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "RESULTS", tmp_path)
    monkeypatch.setattr(write, "header", str)

    assert write.main("plain", "--no-such-option") == 2
    assert not list(tmp_path.iterdir())
