"""A machine that stands still is distinguished from a slow harness."""

from __future__ import annotations

import os
import signal
import time

import psutil

from studies.standstill import LEAST_S, Standstills, watching
from tests.ranks.burners import burning

STOPPED_S = 4 * LEAST_S


def _stand_still(pids: list[int]) -> tuple[float, float]:
    """Stops the watchers for a while, as a machine does that stands still; when that began and ended."""
    begun_s = time.monotonic()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    return begun_s, time.monotonic()


def test_standstill_of_all_cores_is_counted_once_and_only_while_it_lasts() -> None:
    with watching() as standstills:
        begun_s, ended_s = _stand_still(standstills.pids)
        assert STOPPED_S - LEAST_S < standstills.seconds(begun_s - 1, ended_s + 1) < ended_s - begun_s + LEAST_S
        assert standstills.seconds(begun_s, begun_s + STOPPED_S / 2) <= STOPPED_S / 2
        assert standstills.seconds(begun_s - 9, begun_s - 8) == 0


def test_standstill_of_a_single_core_is_counted() -> None:
    with watching() as standstills:
        begun_s, ended_s = _stand_still(standstills.pids[:1])
        assert standstills.seconds(begun_s, ended_s) > STOPPED_S - LEAST_S


def test_busy_processes_are_not_counted_as_a_standstill() -> None:
    """Or a harness that keeps the cores busy would excuse itself; the machine may really stand still in some try."""
    with burning(2 * (os.cpu_count() or 1)), watching() as standstills:
        assert any(_is_quiet(standstills) for _ in range(5))


def _is_quiet(standstills: Standstills) -> bool:
    begun_s = time.monotonic()
    time.sleep(2.0)
    return standstills.seconds(begun_s, time.monotonic()) == 0


def test_processes_that_watch_for_standstills_end_with_their_with_block() -> None:
    with watching() as standstills:
        assert standstills.pids and all(map(psutil.pid_exists, standstills.pids))
    assert not any(map(psutil.pid_exists, standstills.pids))
