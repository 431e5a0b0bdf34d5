"""A row-parallel layer summed by a functional collective: its backward sums again since torch 2.13, and lacked before.

https://github.com/pytorch/pytorch/issues/152127
`test_wrong` prints: ValueMismatch: module: grad.linear.weight differs from the oracle
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce

from equivtest import World, program


class Sum(torch.autograd.Function):
    """Sums over the ranks; the gradient is the same on every rank."""

    @staticmethod
    def forward(ctx, x, group):
        dist.all_reduce(x := x.clone(), group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Row(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.mesh, self.functional = nn.Linear(4, 2, bias=False), None, False

    def forward(self, x):
        x = x.detach()
        if self.mesh is None:
            return self.linear(x)
        part = self.linear(x.chunk(self.mesh.size(), -1)[self.mesh.get_local_rank()])
        group = self.mesh.get_group()
        return all_reduce(part, "sum", group) if self.functional else Sum.apply(part, group)


def row_parallel(module, mesh, functional):
    module.mesh, module.functional = mesh, functional
    weight = module.linear.weight.detach().chunk(mesh.size(), 1)[mesh.get_local_rank()]
    module.linear.weight = nn.Parameter(weight.clone())
    return module


ON = {"inputs": [(1, 4), (2, 4)], "batch": "whole", "world": World(world_sizes=(1, 2, 4))}
test_right = program(Row, partial(row_parallel, functional=False), **ON)
test_wrong = program(Row, partial(row_parallel, functional=True), **ON)
