"""Steps of training as accelerate and transformers' Trainer run them over parameters that FSDP2 divides.

accelerate divides parameters where its state names one of a list of accelerators (state.py, AcceleratorState), in which
the CPU is not.  So its state is told that it has GPUs, before it is asked; nothing else is changed.

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
    """What accelerate takes this process for from now on."""
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
    """As accelerate's guide accumulates the gradients of a causal language model."""
    return accumulated(*prepared(model, optimizer, len(micro_batches)), mesh, micro_batches)


class OwnOptimizer(OneStep):
    """Trainer takes no optimizer from outside where parameters are divided: it is to make its own."""

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
