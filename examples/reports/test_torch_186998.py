"""FSDP2 reduces in bfloat16 instead of float32, if all parameters were frozen in the first forward.

https://github.com/pytorch/pytorch/issues/186998
`test_wrong` prints: RankRaised: module: a rank raised
"""

from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from equivtest import program


def build():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def fully_sharded(module, mesh, frozen):
    fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32))
    module.requires_grad_(not frozen)
    with torch.no_grad():
        module(torch.zeros(1, 3))
    return module.requires_grad_()


test_right = program(build, partial(fully_sharded, frozen=False), inputs=[(2, 3), (3, 3)])
test_wrong = program(build, partial(fully_sharded, frozen=True), inputs=[(2, 3), (3, 3)])
