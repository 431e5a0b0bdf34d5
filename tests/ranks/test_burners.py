"""Burners keep cores busy, and never outlive the run that they are for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.ranks.burners import burning
from tests.ranks.leftovers import marked_run, wait_until_nothing

ROOT = Path(__file__).parents[2]


def test_burner_processes_end_with_their_with_block() -> None:
    with burning(2) as burners:
        assert len(burners) == 2 and all(psutil.pid_exists(pid) for pid in burners)
    assert not any(psutil.pid_exists(pid) for pid in burners)


def test_burner_processes_use_processor_time() -> None:
    with burning(1) as [burner]:
        process = psutil.Process(burner)
        while process.cpu_times().user < 0.2:
            assert process.is_running()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_burner_processes_end_with_their_run(tmp_path: Path, how: signal.Signals) -> None:
    run = marked_run(tmp_path)
    code = (
        "import signal, time\nfrom tests.ranks.burners import burning\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "with burning(2):\n    print(flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, **run.environment, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None and process.stdout.readline() == b"\n"
            while len(run.processes()) < 3:  # a process that was just forked is not marked yet
                assert process.poll() is None
            process.send_signal(how)
        except BaseException:
            process.kill()
            raise
    assert wait_until_nothing(run.left, 30)[1] == []
