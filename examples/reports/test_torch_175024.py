"""A batch norm under DistributedDataParallel, called twice: rank 0 sends its statistics to all before each call.

https://github.com/pytorch/pytorch/issues/175024
`test_wrong` prints: ValueMismatch: module: buffer.inner.1.running_mean differs from the oracle
"""

from functools import partial

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from equivtest import program, real


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    def forward(self, real, fake):
        return self.inner(real), self.inner(fake)


def replicated(module, mesh, broadcasts):
    module.inner = DistributedDataParallel(module.inner, process_group=mesh.get_group(), broadcast_buffers=broadcasts)
    return module


INPUTS = {"real": real(("batch", 3)), "fake": real(("batch", 3))}
ON = {"inputs": INPUTS, "sizes": {"batch": (4, 6)}, "batch": "mean of parts"}
test_right = program(Twice, partial(replicated, broadcasts=False), **ON)
test_wrong = program(Twice, partial(replicated, broadcasts=True), **ON)
