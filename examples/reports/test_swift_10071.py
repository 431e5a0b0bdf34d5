"""Context parallelism that divides positions in order, and joins them as if each rank had one part from either end.

https://github.com/modelscope/ms-swift/issues/10071
`test_wrong` prints: ValueMismatch: module: output differs from the oracle
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from equivtest import World, ids, program


class Gather(torch.autograd.Function):
    """Gathers along dim 1; the gradient, the same on every rank, is divided again."""

    @staticmethod
    def forward(ctx, x, mesh):
        ctx.mesh = mesh
        parts = [torch.empty_like(x) for _ in range(mesh.size())]
        dist.all_gather(parts, x.contiguous(), group=mesh.get_group())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        return own(grad, ctx.mesh), None


def own(x, mesh):
    return x.chunk(mesh.size(), 1)[mesh.get_local_rank()]


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head, self.mesh, self.from_ends = nn.Embedding(5, 4), nn.Linear(4, 5), None, False

    def forward(self, tokens, targets):
        if self.mesh is None:
            return self.scores(tokens, targets)
        scores = Gather.apply(self.scores(own(tokens, self.mesh), own(targets, self.mesh)), self.mesh)
        if self.from_ends and self.mesh.size() > 1:
            parts = scores.chunk(2 * self.mesh.size(), 1)
            scores = torch.cat([*parts[::2], *reversed(parts[1::2])], 1)
        return scores

    def scores(self, tokens, targets):
        return -cross_entropy(self.head(self.embedding(tokens)).transpose(1, 2), targets, reduction="none")


def context_parallel(module, mesh, from_ends):
    module.mesh, module.from_ends = mesh, from_ends
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: dist.all_reduce(each.grad, group=mesh.get_group()))
    return module


INPUTS = {"tokens": ids(5, ("batch", 4)), "targets": ids(5, ("batch", 4))}
ON = {"inputs": INPUTS, "sizes": {"batch": (1, 2)}, "batch": "whole", "world": World(world_sizes=(1, 2))}
test_right = program(Scores, partial(context_parallel, from_ends=False), **ON)
test_wrong = program(Scores, partial(context_parallel, from_ends=True), **ON)
