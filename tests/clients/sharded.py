"""Steps of training by accelerate and transformers' Trainer, with parameters that FSDP2 divides.

accelerate divides parameters only if its state names one of a list of accelerators (state.py, AcceleratorState), which
lacks the CPU.  So its state claims GPUs before the first use; nothing else is changed.

Source: accelerate 1.15.0, accelerator.py, _prepare_fsdp2, no_sync and clip_grad_norm_; transformers 5.23.0,
training_args.py, _process_fsdp_args, and trainer.py, _prepare_for_training.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.clients.trained import OneStep, Tensors, accumulated, by_trainer, forget


def call_it_gpus(state: Any) -> None:
    """Makes accelerate treat this process like one with GPUs from now on."""
    state.distributed_type = DistributedType.MULTI_GPU


def prepared(model: nn.Module, optimizer: torch.optim.Optimizer, num_micro_batches: int) -> tuple[Any, Any, Any]:
    """An accelerator, the model divided by it and the optimizer: made once, and kept with the model."""
    if not hasattr(model, "prepared"):
        forget()
        call_it_gpus(PartialState(cpu=True))
        accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=num_micro_batches,
            fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap"),
        )
        assert accelerator.is_fsdp2
        model.prepared = (accelerator, *accelerator.prepare(model, optimizer))  # type: ignore[assignment]
    accelerator, wrapped, wrapped_optimizer = model.prepared  # type: ignore[misc]
    return accelerator, wrapped, wrapped_optimizer


def accelerated_step(model: nn.Module, mesh: DeviceMesh, micro_batches: Any, optimizer: Any) -> Tensors:
    """Accumulates the gradients of a causal language model as in accelerate's guide."""
    return accumulated(*prepared(model, optimizer, len(micro_batches)), mesh, micro_batches)


class OwnOptimizer(OneStep):
    """Makes Trainer create its own optimizer, since it takes none from outside if parameters are divided."""

    def __init__(self, optimizer: torch.optim.Optimizer, args: Any, **arguments: Any) -> None:
        self.own = optimizer
        call_it_gpus(args.distributed_state)
        super().__init__(args=args, **arguments)
        assert self.accelerator.is_fsdp2

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        self.optimizer = self.own
        return self.own


def trainer_step(model: nn.Module, mesh: DeviceMesh, micro_batches: Any, optimizer: Any) -> Tensors:
    return by_trainer(
        model, mesh, micro_batches, optimizer, OwnOptimizer, fsdp=True, fsdp_config={"auto_wrap_policy": "NO_WRAP"}
    )
