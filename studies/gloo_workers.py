"""Runs functional all_gathers in a gloo group of one rank: `python -m studies.gloo_workers SECONDS WORKERS`.

With two workers, torch's own number, the process should die within seconds (torch 2.13.0; finding 39).  With one
worker, as ranks have, the study prints how many collectives the process survived.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

from equivtest.ranks.gloo import use_few_workers

IN_FLIGHT = 32
PER_LOOK = 50  # rounds between two looks at the clock


def main(seconds: float, workers: int) -> None:
    """Runs collectives for this long, or until the process dies."""
    torch.set_num_threads(1)
    if workers == 1:
        use_few_workers()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group, given, outs = dist.group.WORLD, torch.ones(1), [torch.empty(1) for _ in range(IN_FLIGHT)]
    assert group is not None
    until_s, number = time.monotonic() + seconds, 0
    while time.monotonic() < until_s:
        for _ in range(PER_LOOK):
            works = [group.allgather_into_tensor_coalesced([out], [given]) for out in outs]
            for work in works:
                work.wait()
        number += PER_LOOK * IN_FLIGHT
    sys.stdout.write(f"{workers} workers survived {number} collectives\n")


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
