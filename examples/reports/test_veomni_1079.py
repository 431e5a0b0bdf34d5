"""FSDP2 over rows on one axis and positions on the other: the gradient is divided by the ranks of both axes.

https://github.com/ByteDance-Seed/VeOmni/issues/1079
`test_wrong` prints: ValueMismatch: module: grad.layer.weight differs from the oracle
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from equivtest import World, program


class Sum(torch.autograd.Function):
    """Sums over the ranks, and multiplies the gradient by a factor."""

    @staticmethod
    def forward(ctx, x, group, factor):
        ctx.factor = factor
        dist.all_reduce(x := x.clone(), group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.mesh, self.factor = nn.Linear(2, 3), None, 1

    def forward(self, x):  # (batch, sequence, 2)
        x, positions = x.detach(), x.shape[0] * x.shape[1]
        if self.mesh is None:
            return {"loss": self.layer(x).square().sum() / positions}
        part = x.tensor_split(self.mesh.size(), 1)[self.mesh.get_local_rank()]
        return {"loss": Sum.apply(self.layer(part).square().sum() / positions, self.mesh.get_group(), self.factor)}


def fully_sharded(module, mesh, makes_up):
    module.mesh, module.factor = mesh["sp"], mesh["sp"].size() if makes_up else 1
    return fully_shard(module, mesh=mesh["dp", "sp"]._flatten("all"))


ON = {"inputs": [(2, 3, 2), (4, 2, 2)], "world": World(axes=("dp", "sp"))}
test_right = program(Net, partial(fully_sharded, makes_up=True), **ON)
test_wrong = program(Net, partial(fully_sharded, makes_up=False), **ON)
