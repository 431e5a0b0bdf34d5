"""Sequence parallelism of an adapter: the gradient of its replicated factor is of each rank's own positions only.

https://github.com/modelscope/mcore-bridge/issues/173
`test_wrong` prints: ValueMismatch: module: grad.up.weight differs from the oracle
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from equivtest import World, program


def own(x, mesh, dim=0):
    return x.chunk(mesh.size(), dim)[mesh.get_local_rank()]


def gather(x, mesh):
    parts = [torch.empty_like(x) for _ in range(mesh.size())]
    dist.all_gather(parts, x.contiguous(), group=mesh.get_group())
    return torch.cat(parts)


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mesh):
        ctx.mesh = mesh
        return gather(x, mesh)

    @staticmethod
    def backward(ctx, grad):
        return own(grad, ctx.mesh), None


class ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mesh):
        ctx.mesh = mesh
        dist.all_reduce(x := x.clone(), group=mesh.get_group())
        return own(x, mesh)

    @staticmethod
    def backward(ctx, grad):
        return gather(grad, ctx.mesh), None


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = (nn.Linear(*size, bias=False) for size in ((4, 2), (4, 1), (1, 2)))
        self.mesh = None

    def forward(self, x):  # (sequence, 4)
        x = x.detach()
        if self.mesh is None:
            return self.base(x) + self.up(self.down(x))
        x = own(x, self.mesh, 1)
        base, low = (ReduceScatter.apply(each(x), self.mesh) for each in (self.base, self.down))
        return Gather.apply(base + self.up(low), self.mesh)


def sequence_parallel(module, mesh, sums):
    module.mesh = mesh
    for layer in (module.base, module.down):
        layer.weight = nn.Parameter(layer.weight.detach().chunk(mesh.size(), 1)[mesh.get_local_rank()].clone())
    if sums:
        module.up.weight.register_post_accumulate_grad_hook(
            lambda each: dist.all_reduce(each.grad, group=mesh.get_group())
        )
    return module


ON = {"inputs": [(4, 4), (8, 4)], "batch": "whole", "world": World(world_sizes=(1, 2, 4))}
test_right = program(Layer, partial(sequence_parallel, sums=True), **ON)
test_wrong = program(Layer, partial(sequence_parallel, sums=False), **ON)
