"""torch's own modules and wrappers, as people use them, and LoRA of peft.

Source: torch 2.13.0; peft 0.21.2, tuners/lora/layer.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

FEATURES = 12


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(FEATURES, 12, 24, dropout=0.0, batch_first=True, norm_first=True)


def feed_forward_divided(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Its attention stays whole on every rank."""
    return parallelize_module(module, mesh, {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()})


class Recurrent(nn.Module):
    """The outputs of nn.LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.lstm(x)[0]
        return output


def recurrent() -> nn.Module:
    return Recurrent()


def images() -> nn.Module:
    """Convolutions, batch norms in evaluation, pools and a head."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4).eval(), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, stride=2, groups=2), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3),
    )  # fmt: skip


def convolutions() -> nn.Module:
    """Which round nothing on integers."""
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(3, 2, 2, stride=2))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))


def replicated(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(module, process_group=mesh.get_group())


def sharded(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """FSDP2."""
    fully_shard(module, mesh=mesh)
    return module


def flat_sharded(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Wraps in FSDP1: one flat parameter, the default."""
    return FullyShardedDataParallel(module, process_group=mesh.get_group(), device_id=torch.device("cpu"))


def flat_sharded_by_name(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """FSDP1 with the names of the parameters."""
    return FullyShardedDataParallel(
        module, process_group=mesh.get_group(), device_id=torch.device("cpu"), use_orig_params=True
    )


def compiled(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Tensor parallel, then torch.compile, which traces forward and backward; kernels are torch's own."""
    plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
    return torch.compile(parallelize_module(module, mesh, plan), backend="aot_eager")  # type: ignore[return-value]


def compiled_and_replicated(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return replicated(torch.compile(module, backend="aot_eager"), mesh)  # type: ignore[arg-type]


def lora() -> nn.Module:
    """A Llama of transformers with adapters beside four of its projections; all else is frozen."""
    from peft import LoraConfig, get_peft_model

    from tests.clients.language_models import build

    names = ["q_proj", "v_proj", "o_proj", "down_proj"]
    model: Any = get_peft_model(build("llama"), LoraConfig(r=4, lora_alpha=8, target_modules=names, lora_dropout=0.0))
    return model


def lora_layers_sharded(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Shards with FSDP2, each layer separately."""
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def lora_divided(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Tensor parallelism of torch: of a projection by columns the second adapter is divided, by rows the first."""
    plan: dict[str, Any] = {}
    for name in ("q_proj", "v_proj"):
        plan |= {f"self_attn.{name}.{part}": ColwiseParallel() for part in ("base_layer", "lora_B.default")}
    plan |= {f"{name}": ColwiseParallel() for name in ("self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj")}
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan |= {f"{name}.{part}": RowwiseParallel() for part in ("base_layer", "lora_A.default")}
    for layer in model.base_model.model.model.layers:
        parallelize_module(layer, mesh, plan)
    return model
