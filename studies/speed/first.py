"""How long from nothing to the first verdict, beside what cannot be avoided: import torch, start one server?"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

from studies.speed.measure import Spread

_PARTS = {
    "import torch": "import torch; print(time.monotonic() - begun_s)",
    "start of the server, after that": """
import socket
from equivtest.ranks.launch import Server
import torch
begun_s = time.monotonic()
server = Server("forkserver", (), ("equivtest.ranks.visit",), {})
here, there = socket.socketpair()
rank = server.fork(there)
print(time.monotonic() - begun_s)
server.close()
""",
    "first verdict": """
from equivtest.families.linear.case import LinearCase
from equivtest.verdicts.judging import check
from equivtest.ranks.pool import Pool
with Pool() as pool:
    check("colwise_linear", LinearCase(world_size=2, style="colwise", out_features=2), pool)
    print(time.monotonic() - begun_s)
""",
}


@dataclass(frozen=True)
class FirstVerdict:
    """Seconds of each part in a new process, and the first verdict over the sum of the other two."""

    parts_s: dict[str, Spread]
    ratio: Spread


def measure_first(repeats: int) -> FirstVerdict:
    """Each part in a process of its own, in turn."""
    samples: dict[str, list[float]] = {part: [] for part in _PARTS}
    for _ in range(repeats):
        for part, code in _PARTS.items():
            samples[part].append(_seconds(code))
    *needed, total = samples.values()
    ratio = Spread.of(whole / sum(parts) for whole, *parts in zip(total, *needed, strict=True))
    return FirstVerdict({part: Spread.of(found) for part, found in samples.items()}, ratio)


def _seconds(code: str) -> float:
    """What `code` prints, run by a new interpreter; the time before its first line is Python's own."""
    text = f"import time\nbegun_s = time.monotonic()\n{code}"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    return float(done.stdout)
