"""Trains one step and captures it, in a job that was started without a harness.

torchrun --nproc-per-node 8 -m studies.captured_job FOLDER OPTIONS

`equivtest.capture` encloses the forward and the backward.  The job uses nothing else of equivtest.
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import equivtest
from studies import captured_model

SEQ = 12


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--style", choices=("tensor_parallel", "fsdp2"), default="tensor_parallel")
    parser.add_argument("--build", default="decoder")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--defect", default="")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--boundaries", default="*")
    parser.add_argument("--alone", default="", help="parts captured by themselves")
    parser.add_argument("--limit-bytes", type=int, default=2**30)
    parser.add_argument("--time", type=int, default=0, help="times that many steps with and without capturing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    run(given)
    distributed.destroy_process_group()


def run(given: argparse.Namespace) -> None:
    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    mesh = init_device_mesh("cpu", (num_ranks,))
    torch.manual_seed(given.seed)
    model = getattr(captured_model, given.build)().to(getattr(torch, given.dtype))
    tokens = torch.randint(0, captured_model.VOCAB, (given.rows, SEQ + 1))
    if given.style == "fsdp2":
        tokens = tokens.chunk(num_ranks)[rank]
    model = getattr(captured_model, given.style)(model, mesh)
    if given.defect:
        captured_model.spoiled(model, mesh, given.defect)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(given.time or 1):
        for is_captured in (False, True) if given.time else (True,):
            folder = given.folder / str(step) if given.time else given.folder
            begun_s = time.perf_counter()
            around = equivtest.capture(
                model,
                folder,
                boundaries=given.boundaries.split(","),
                alone=given.alone.split(",") if given.alone else (),
                limit_bytes=given.limit_bytes,
            )
            with around if is_captured else nullcontext():
                logits = model(tokens[:, :-1])
                loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0 and given.time:
                print(f"{'captured' if is_captured else 'alone'} {time.perf_counter() - begun_s:.4f}", flush=True)


if __name__ == "__main__":
    main()
