"""A first program for your backend; `equivtest run` without a file runs all properties that come with equivtest.

equivtest run test_backend.py --manifest equivtest.toml
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import equivtest as eq


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))


def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    fully_shard(module, mesh=mesh)
    return module


test_backend = eq.program(build, parallelize, inputs=[(4, 3), (5, 3)], batch="mean of parts")
