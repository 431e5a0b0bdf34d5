"""Programs of torch alone that show planted defects."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist


def join(rank: int, num_ranks: int, folder: str) -> None:
    """Makes this process a rank of the world, whose ranks find each other in the folder."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
