"""Readers of other people's files read a mutated file, name its problems, or refuse it by one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from studies.readers import RIGHT, attack, readers_of, sample_known, sample_replay
from tests.bundle.made import Payload, packed

NUMBERS = {"replay file": 300, "known failures": 40, "manifest": 200, "bundle": 100, "bundle with right checksums": 30}


@pytest.mark.parametrize("name", NUMBERS)
def test_reader_survives_mutated_files(honest: Payload, bundle: Path, tmp_path: Path, name: str) -> None:
    readers = readers_of(packed(bundle, honest).read_bytes(), honest, sample_replay(), sample_known())

    wrong = [outcome for outcome in attack(readers[name], tmp_path, NUMBERS[name], name) if outcome[1] not in RIGHT]

    assert wrong == []
