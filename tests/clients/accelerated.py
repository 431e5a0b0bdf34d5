"""Models that accelerate prepares, in the process group of the world.

Source: accelerate 1.15.0, accelerator.py, prepare_model, and state.py, whose objects share one state in a process.
"""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.distributed.device_mesh import DeviceMesh


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))


def _fresh() -> Accelerator:
    """An accelerator that takes over nothing from those before it."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    return Accelerator(cpu=True)


def replicated(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Wraps in DistributedDataParallel, as accelerate prepares a model by default."""
    model: nn.Module = _fresh().prepare_model(module)
    return model
