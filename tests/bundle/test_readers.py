"""Readers of other people's files read a mutated file, name its problems, or refuse it by one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from equivtest.ranks.hosts.run_hub import RunHub
from studies import readers
from studies.readers import RIGHT, Reader, attack, readers_of, readers_of_runs, sample_known, sample_replay
from tests.bundle.made import Payload, packed

NUMBERS = {"replay file": 300, "known failures": 40, "manifest": 200, "bundle": 100, "bundle with right checksums": 30}


@pytest.mark.parametrize("name", NUMBERS)
def test_reader_of_a_bundle_refuses_mutated_files_without_a_crash(
    honest: Payload, bundle: Path, tmp_path: Path, name: str
) -> None:
    found = readers_of(packed(bundle, honest).read_bytes(), honest, sample_replay(), sample_known())

    wrong = [outcome for outcome in attack(found[name], tmp_path, NUMBERS[name], name) if outcome[1] not in RIGHT]

    assert wrong == []


OF_RUNS = {"run log": 100, "shards": 100, "captured folder": 200, "hub's port": 100}


@pytest.fixture(scope="module")
def of_runs() -> Iterator[dict[str, Reader]]:
    with RunHub(("127.0.0.1", 0), b"a secret that no mutated message has") as hub:
        yield readers_of_runs(hub)
        assert not any("has ended" in event for event in hub.events())


@pytest.mark.ranks
@pytest.mark.parametrize("name", OF_RUNS)
def test_reader_of_a_run_refuses_mutated_files_without_a_crash(
    of_runs: dict[str, Reader], tmp_path: Path, name: str
) -> None:
    wrong = [outcome for outcome in attack(of_runs[name], tmp_path, OF_RUNS[name], name) if outcome[1] not in RIGHT]

    assert wrong == []


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["run log", "shards", "captured folder"])
def test_reader_of_a_run_accepts_the_sample_before_mutation(
    of_runs: dict[str, Reader], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Or each refusal would be one of the sample."""
    monkeypatch.setattr(readers, "mutated", lambda data, chance: data)

    assert list(attack(of_runs[name], tmp_path, 3, name)) == [(0, "read"), (1, "read"), (2, "read")]
