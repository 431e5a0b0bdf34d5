"""Context parallelism that divides the video only: the audio attends to each rank's own part of the video.

https://github.com/huggingface/diffusers/issues/14316
`test_wrong` prints: ValueMismatch: module: output.1 differs from the oracle
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from equivtest import World, program, real


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


class Streams(nn.Module):
    def __init__(self):
        super().__init__()
        self.video, self.audio, self.mesh, self.gathers = nn.Linear(2, 4), nn.Linear(2, 4), None, False

    def forward(self, video, audio):
        audio = self.audio(audio.detach())
        if self.mesh is None:
            keys = video = self.video(video.detach())
        else:
            part = self.video(own(video.detach(), self.mesh))
            video = Gather.apply(part, self.mesh)
            keys = video if self.gathers else part
        return video, scaled_dot_product_attention(audio, keys, keys)


def context_parallel(module, mesh, gathers):
    module.mesh, module.gathers = mesh, gathers
    for parameter in module.video.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: dist.all_reduce(each.grad, group=mesh.get_group()))
    return module


INPUTS = {"video": real(("batch", 4, 2)), "audio": real(("batch", 3, 2))}
ON = {"inputs": INPUTS, "sizes": {"batch": (1, 2)}, "batch": "whole", "world": World(world_sizes=(1, 2, 4))}
test_right = program(Streams, partial(context_parallel, gathers=True), **ON)
test_wrong = program(Streams, partial(context_parallel, gathers=False), **ON)
