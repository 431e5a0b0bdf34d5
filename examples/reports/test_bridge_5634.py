"""A row-parallel layer whose adapter gathers its whole output on every rank, before the ranks add up their outputs.

https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5634
`test_wrong` prints: ValueMismatch: module: output differs from the oracle
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce

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


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = (nn.Linear(*size, bias=False) for size in ((4, 2), (4, 1), (1, 2)))
        self.mesh, self.gathers = None, False

    def forward(self, x):
        x = x.detach()
        if self.mesh is None:
            return self.base(x) + self.up(self.down(x))
        x = x.chunk(self.mesh.size(), -1)[self.mesh.get_local_rank()]
        low, group = self.down(x), self.mesh.get_group()
        if self.gathers:
            low = all_reduce(low, group=group)
        return Sum.apply(self.base(x) + self.up(low), group)


def row_parallel(module, mesh, gathers):
    module.mesh, module.gathers = mesh, gathers
    for layer in (module.base, module.down):
        layer.weight = nn.Parameter(layer.weight.detach().chunk(mesh.size(), 1)[mesh.get_local_rank()].clone())
    if not gathers:
        module.up.weight.register_post_accumulate_grad_hook(
            lambda each: dist.all_reduce(each.grad, group=mesh.get_group())
        )
    return module


ON = {"inputs": [(1, 4), (2, 4)], "batch": "whole", "world": World(world_sizes=(1, 2, 4))}
test_right = program(Layer, partial(row_parallel, gathers=False), **ON)
test_wrong = program(Layer, partial(row_parallel, gathers=True), **ON)
