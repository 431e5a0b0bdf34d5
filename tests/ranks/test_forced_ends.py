"""A run that is ended by force leaves nothing.  Every way to end it: `python -m studies.forced_ends`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from tests.ranks.end_cells import BUSY, SHORTAGES, SIGNALS, WORKERS, Cell, cells, end_run, problems_of_next_run
from tests.ranks.leftovers import MARKER, SHARED_MEMORY, Marked, marked_run

FEW = [
    Cell("pytest", "SIGINT", "hangs_in_python"),
    Cell("controller", "SIGKILL", "hangs_in_collective"),
    Cell("everything", "disk full", ""),
]


@pytest.mark.ranks
def test_killed_run_leaves_no_process_and_no_file_and_the_next_run_passes(tmp_path: Path) -> None:
    """One next run shows it for all of them, since they ran in one folder."""
    problems = {str(cell): end_run(cell, tmp_path).problems for cell in FEW}

    assert problems == {str(cell): () for cell in FEW}
    assert problems_of_next_run(tmp_path) == []


def test_table_of_forced_ends_has_every_way_to_end_a_run() -> None:
    assert len(set(cells())) == len(BUSY) * (len(WORKERS) * len(SIGNALS) + 1) + len(SHORTAGES) * (1 + len(BUSY))


@pytest.fixture
def run(tmp_path: Path) -> Marked:
    return marked_run(tmp_path)


@pytest.fixture
def planted(run: Marked) -> Iterator[subprocess.Popen[str]]:
    """A process of the run's grandchild kind: of another session, its parent gone from sight."""
    command = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
    environment = {**os.environ, **run.environment}
    with subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        yield process
        process.kill()


def test_left_over_process_is_reported_until_it_ends(run: Marked, planted: subprocess.Popen[str]) -> None:
    assert [f"process {planted.pid} of session {planted.pid}" in line for line in run.left()] == [True]
    assert run.left_of({planted.pid}) == run.left()

    planted.kill()
    planted.wait()

    assert run.left() == [] == run.left_of({planted.pid})


def test_process_of_another_run_is_not_reported(run: Marked, tmp_path: Path) -> None:
    stranger = marked_run(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, MARKER: stranger.token}
    ) as process:
        assert run.left() == []
        process.kill()


def test_left_over_file_is_reported(run: Marked) -> None:
    path = run.temporary / "forgotten"
    path.touch()

    assert run.left() == [str(path)]


def test_left_over_shared_memory_is_reported(run: Marked) -> None:
    memory = SharedMemory(create=True, size=1)
    name = str(SHARED_MEMORY / memory.name)
    try:
        assert name in run.left()
    finally:
        memory.close()
        memory.unlink()
    assert name not in run.left()


def test_left_over_scratch_directory_is_found_by_the_id_of_its_process(
    run: Marked, planted: subprocess.Popen[str]
) -> None:
    run.processes()
    with (
        tempfile.TemporaryDirectory(prefix=f"equivtest-{planted.pid}-", dir=SHARED_MEMORY) as mine,
        tempfile.TemporaryDirectory(prefix=f"equivtest-{os.getpid()}-", dir=SHARED_MEMORY) as strange,
    ):
        planted.kill()
        planted.wait()
        assert mine in run.left() and mine in run.left_of({planted.pid}) and strange not in run.left()
