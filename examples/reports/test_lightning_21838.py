"""A metric's mean over rows: the sum and the count are averaged over the ranks, and the count is a whole number.

https://github.com/Lightning-AI/pytorch-lightning/issues/21838
`test_wrong` prints: ValueMismatch: module: output.loss differs from the oracle
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from equivtest import Training, program, real


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))

    def forward(self, x, y):
        return {"loss": (self.layers(x) - y).square().sum(-1).mean()}


def replicated(module, mesh):
    return DistributedDataParallel(module, process_group=mesh.get_group())


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.25)


def average(tensor, mesh):
    dist.all_reduce(tensor, group=mesh.get_group())
    return tensor.copy_(tensor / mesh.size())


def step(module, mesh, micro_batches, optimizer, count_dtype):
    (batch,) = micro_batches
    rows = len(batch["x"])
    mean_rows = average(torch.tensor(float(rows)), mesh)
    optimizer.zero_grad()
    loss = module(**batch)["loss"]
    (loss * rows / mean_rows).backward()
    optimizer.step()
    count = torch.tensor(rows, dtype=getattr(torch, count_dtype))
    return {"loss": average(loss.detach() * rows, mesh) / average(count, mesh)}


INPUTS = {"x": real(("batch", 3)), "y": real(("batch", 2))}
ON = {"inputs": INPUTS, "sizes": {"batch": (2, 3, 5)}}
test_right = program(Net, replicated, **ON, training=Training(optimizer=sgd, step=partial(step, count_dtype="float64")))
test_wrong = program(Net, replicated, **ON, training=Training(optimizer=sgd, step=partial(step, count_dtype="int64")))
