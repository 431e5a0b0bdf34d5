"""Data parallelism: each rank has different rows, and gradients are means.  Replace both functions by yours."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import equivtest as eq


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))


def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(module, process_group=mesh.get_group())


test_data_parallel = eq.program(build, parallelize, inputs=[(4, 3), (5, 3)], batch="mean of parts")
