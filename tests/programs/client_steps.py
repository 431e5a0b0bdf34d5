"""Steps, adapters and optimizers of other people's libraries, each wrong in one way: `studies.client_searches`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from tests.clients.torch_modules import lora_layers_sharded
from tests.clients.trained import IGNORED, MAX_NORM, Tensors


def reduced_twice_step(model: nn.Module, mesh: DeviceMesh, micro_batches: Any, optimizer: Any) -> Tensors:
    """What is accumulated so far is reduced after each micro-batch, so that the first's share is reduced again."""
    own = torch.stack([(each["labels"] != IGNORED).sum() for each in micro_batches]).sum()
    distributed.all_reduce(own, group=mesh.get_group())
    optimizer.zero_grad()
    losses = []
    for each in micro_batches:
        losses.append(model(**each, num_items_in_batch=own)["loss"])
        losses[-1].backward()
        for parameter in model.parameters():
            distributed.all_reduce(parameter.grad, group=mesh.get_group())
    loss = torch.stack(losses).sum().detach()
    distributed.all_reduce(loss, group=mesh.get_group())
    norm = clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    return {"loss": loss, "total_norm": norm}


def thawed(model: Any, mesh: DeviceMesh) -> nn.Module:
    """peft's adapters under FSDP2, which holds one frozen projection as one that is trained."""
    parallel = lora_layers_sharded(model, mesh)
    parallel.get_submodule("base_model.model.model.layers.1.self_attn.q_proj.base_layer").requires_grad_()
    return parallel


class Normed(torch.optim.Optimizer):
    """Steps of one length, whatever the gradient's: LARS without its trust ratio."""

    def __init__(self, parameters: Any, norm: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.25})
        self.norm = norm

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                parameter.sub_(gradient / self.norm(gradient) * group["lr"])


def normed(module: nn.Module) -> torch.optim.Optimizer:
    """The right one."""
    return Normed(module.parameters(), lambda gradient: (gradient * gradient).sum().sqrt())


def _norm_of_shard(gradient: torch.Tensor) -> torch.Tensor:
    own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return (own * own).sum().sqrt()


def normed_by_shard(module: nn.Module) -> torch.optim.Optimizer:
    """Each rank divides by the norm of its own shard."""
    return Normed(module.parameters(), _norm_of_shard)
