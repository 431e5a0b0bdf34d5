"""A metric for each kind of row: a rank reduces only the metrics of its own rows, so ranks add up different ones.

https://github.com/Lightning-AI/pytorch-lightning/issues/21409
`test_wrong` prints: ValueMismatch: module: output.metrics differs from the oracle
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from equivtest import Training, ids, program, real


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x, kind):
        square = self.layer(x).square().sum(-1)
        sums = [torch.where(kind == each, square, 0).sum() for each in (0, 1)]
        return {"loss": square.mean(), "metrics": torch.stack(sums)}


def replicated(module, mesh):
    return DistributedDataParallel(module, process_group=mesh.get_group())


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.25)


def step(module, mesh, micro_batches, optimizer, own_only):
    (batch,), group = micro_batches, mesh.get_group()
    rows = torch.tensor(float(len(batch["x"])))
    dist.all_reduce(rows, group=group)
    optimizer.zero_grad()
    outputs = module(**batch)
    loss = outputs["loss"] * len(batch["x"]) / rows
    (loss * mesh.size()).backward()
    optimizer.step()
    dist.all_reduce(loss := loss.detach(), group=group)
    metrics = outputs["metrics"].detach()
    for kind in (0, 1):
        if not own_only or (batch["kind"] == kind).any():
            dist.all_reduce(metrics[kind], group=group)
    return {"loss": loss, "metrics": metrics}


INPUTS = {"x": real(("batch", 3)), "kind": ids(2, ("batch",))}
ON = {"inputs": INPUTS, "sizes": {"batch": (2, 3)}}
test_right = program(Net, replicated, **ON, training=Training(optimizer=sgd, step=partial(step, own_only=False)))
test_wrong = program(Net, replicated, **ON, training=Training(optimizer=sgd, step=partial(step, own_only=True)))
