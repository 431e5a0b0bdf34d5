"""Programs of ranks on other hosts, which run while a trouble befalls them."""

from __future__ import annotations

import time

import torch
from torch import distributed as dist

from equivtest.ranks.backend import Backend
from equivtest.ranks.reply import Answer
from equivtest.tensors import Placed
from tests.programs.tiny import PlainCase, meet, replicated

BUSY_S = 0.5


def visit(subject: str, case: PlainCase, backend: Backend) -> tuple[Answer, ...]:
    """Goes from collective to collective for BUSY_S, then counts the ranks."""
    until_s = time.monotonic() + BUSY_S
    done = torch.zeros(1)
    while not done.item():
        done.fill_(time.monotonic() > until_s)
        dist.all_reduce(done)
    count = meet()
    return (Answer({"output": Placed(count, replicated(), tuple(count.shape))}),)
