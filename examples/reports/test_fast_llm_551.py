"""Data parallelism by hand: on one rank the second micro-batch's gradients overwrite the first's.

https://github.com/ServiceNow/Fast-LLM/issues/551
`test_wrong` prints: ValueMismatch: module: grad.layers.0.weight differs from the oracle
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from equivtest import Training, program, real


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))

    def forward(self, x, y, rows=None):
        return {"loss": (self.layers(x) - y).square().sum() / (rows or len(x))}


def unchanged(module, mesh):
    return module


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.25)


def step(module, mesh, micro_batches, optimizer, overwrites):
    group, overwrites = mesh.get_group(), overwrites and mesh.size() == 1
    rows = torch.tensor(float(sum(len(each["x"]) for each in micro_batches)))
    dist.all_reduce(rows, group=group)
    losses, parameters = [], list(module.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for each in micro_batches:
        loss = module(**each, rows=rows)["loss"]
        grads = torch.autograd.grad(loss, parameters)
        for parameter, grad in zip(parameters, grads, strict=True):
            dist.all_reduce(grad, group=group)
            parameter.grad = grad if overwrites else parameter.grad + grad
        losses.append(loss.detach())
    dist.all_reduce(total := torch.stack(losses).sum(), group=group)
    optimizer.step()
    return {"loss": total}


INPUTS = {"x": real(("batch", 3)), "y": real(("batch", 2))}
ON = {"inputs": INPUTS, "sizes": {"batch": (4, 5)}, "batch": "parts of the whole"}
test_right = program(
    Net, unchanged, **ON, training=Training(optimizer=sgd, step=partial(step, overwrites=False), micro_batches=2)
)
test_wrong = program(
    Net, unchanged, **ON, training=Training(optimizer=sgd, step=partial(step, overwrites=True), micro_batches=2)
)
