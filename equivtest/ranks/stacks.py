"""Reads the stacks and the output of ranks that are silent or have ended, to show them in messages."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from equivtest.base import limits
from equivtest.ranks.failure import clip

_STEP_S = 0.01
_OUTER_FRAMES = re.compile(r"(ranks/rank\.py\", line \d+ in work\n).*", re.DOTALL)
_SETTLED_S = 0.05  # a stack that has not grown for so long is complete


def output_file(scratch: Path, rank: int) -> Path:
    return scratch / f"output-{rank}"


def stacks_file(scratch: Path, rank: int) -> Path:
    return scratch / f"stacks-{rank}"


def take_stacks(ranks: Mapping[int, tuple[int, Path]]) -> dict[int, str]:
    """Makes running ranks write their Python stacks, waits at most STACKS_S, and returns the stacks by rank."""
    stopped = {rank for rank, (pid, _) in ranks.items() if _is_stopped(pid)}
    files = {rank: file for rank, (_, file) in ranks.items() if rank not in stopped}
    sizes = {rank: _size(file) for rank, file in files.items()}
    for rank in files:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(ranks[rank][0], signal.SIGUSR1)
    _wait_until_settled(files, sizes)
    stacks = {rank: _read(files[rank], sizes[rank]) for rank in files}
    return stacks | dict.fromkeys(stopped, "no stacks: the process is stopped (SIGSTOP)")


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def _wait_until_settled(files: Mapping[int, Path], sizes: Mapping[int, int]) -> None:
    deadline_s = time.monotonic() + limits.STACKS_S
    last, last_change_s = dict(sizes), time.monotonic()
    while (now_s := time.monotonic()) < deadline_s:
        current = {rank: _size(file) for rank, file in files.items()}
        if current != last:
            last, last_change_s = current, now_s
        if all(current[rank] > sizes[rank] for rank in files) and now_s - last_change_s > _SETTLED_S:
            return
        time.sleep(_STEP_S)


def _read(file: Path, start: int) -> str:
    try:
        text = file.read_bytes()[start:].decode(errors="backslashreplace")
    except FileNotFoundError:
        text = ""
    return clip(tidy(text)) or "no stacks: the process did not react to SIGUSR1"


def tidy(stacks: str) -> str:
    """Returns faulthandler's stacks without the harness's guard thread and without the frames outside the subject."""
    threads = [thread for thread in stacks.split("\n\n") if "in _watch\n" not in thread]
    threads = [thread for thread in threads if not thread.startswith("Extension modules:")]
    return "\n\n".join(_OUTER_FRAMES.sub(r"\1", thread) for thread in threads).strip()


def read_tail(file: Path) -> str:
    """Returns the end of a file, with at most limits.OUTPUT_CHARS characters. If the file is missing, returns ''."""
    try:
        with file.open("rb") as opened:
            opened.seek(max(_size(file) - limits.OUTPUT_CHARS, 0))
            return opened.read(limits.OUTPUT_CHARS).decode(errors="backslashreplace")
    except FileNotFoundError:
        return ""


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0
