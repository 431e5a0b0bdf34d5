"""Training that calls the module within DistributedDataParallel, so that no gradient is reduced.

https://github.com/OpenTSLM/OpenTSLM/issues/49
`test_wrong` prints: ValueMismatch: module: grad.2.weight differs from the oracle
"""

from functools import partial

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from equivtest import program


class Trained(nn.Module):
    def __init__(self, model, calls_inner):
        super().__init__()
        self.model, self.calls_inner = model, calls_inner

    def forward(self, x):
        return self.model.module(x) if self.calls_inner else self.model(x)


def build():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def replicated(module, mesh, calls_inner):
    return Trained(DistributedDataParallel(module, process_group=mesh.get_group()), calls_inner)


test_right = program(build, partial(replicated, calls_inner=False), inputs=[(2, 3), (3, 3)])
test_wrong = program(build, partial(replicated, calls_inner=True), inputs=[(2, 3), (3, 3)])
