"""The peer of a warm world: processes that multiprocessing spawns, and no harness."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from typing import Any

from equivtest.cases.case import Case, from_data, to_data

LIMIT_S = 120.0


def run_cold_world(subject: str, case: Case) -> float:
    """Seconds until a spawned world has imported torch, joined gloo and run `case`; then it is ended."""
    context = multiprocessing.get_context("spawn")
    done = context.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="equivtest-bench-") as directory:
        begun_s = time.monotonic()
        ranks = [
            context.Process(target=_run_rank, args=(rank, f"{directory}/rendezvous", subject, to_data(case), done))
            for rank in range(case.world_size)
        ]
        for process in ranks:
            process.start()
        try:
            return max(_next(done, ranks) for _ in ranks) - begun_s
        finally:
            for process in ranks:
                process.join(LIMIT_S)


def _next(done: Any, ranks: list[Any]) -> float:
    """When the next rank was done, by time.monotonic()."""
    deadline_s = time.monotonic() + LIMIT_S
    while done.empty():
        if time.monotonic() > deadline_s or any(process.exitcode for process in ranks):
            raise RuntimeError("a rank of the cold world failed; its traceback is above")
        time.sleep(0.002)
    return float(done.get())


def _run_rank(rank: int, rendezvous: str, subject: str, data: dict[str, Any], done: Any) -> None:
    import torch
    import torch.distributed as dist

    from equivtest.ranks.backend import Backend
    from equivtest.ranks.visit import visit

    torch.set_num_threads(1)
    case = from_data(data)
    store = dist.FileStore(rendezvous, case.world_size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.world_size)
    visit(subject, case, Backend())
    done.put(time.monotonic())
    dist.destroy_process_group()
