"""Forks that run a backward, hang or die."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from equivtest.base import limits
from equivtest.ranks import forks


def test_fork_that_runs_a_backward_is_accepted() -> None:
    assert forks.why_forks_fail("cpu") == ""


@pytest.mark.parametrize(
    ("instead", "told"),
    [
        (lambda _: time.sleep(60), "it had no end within 0.2 s; "),
        (lambda _: os.kill(os.getpid(), signal.SIGKILL), "it was killed by SIGKILL; "),
        (lambda _: os._exit(3), "it exited with code 3; "),
    ],
    ids=["hangs", "killed", "exits"],
)
def test_error_for_a_fork_that_sends_no_reply_says_how_it_ended(
    instead: Callable[[str], None], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "_run_backward", instead)
    monkeypatch.setattr(limits, "FORK_S", 0.2)

    assert forks.why_forks_fail("cpu").startswith(told)
