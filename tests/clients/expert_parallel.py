"""The mixtures of experts of transformers under transformers' own expert-parallel plans.

`tests.clients.expert_parallel:mixtral` builds the model of transformers' model type 'mixtral' with as many experts as
1, 2, 3 and 4 ranks divide; so does every other type.

Source: transformers 5.23.0, distributed/mixin.py, maybe_distribute_model, and distributed/expert_parallel.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoConfig
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.distributed.mixin import DistributedMixin
from transformers.distributed.utils import TransformersDeviceMesh

from tests.clients import language_models

NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Under one of these names, or several, a configuration has the number of experts."""


def __getattr__(name: str) -> Callable[[], nn.Module]:
    """The function that builds the model of a type."""
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda: build(name)


def build(model_type: str) -> nn.Module:
    """Builds like `language_models.build`, with twelve experts."""
    config: Any = AutoConfig.for_model(model_type)
    twelve = dict.fromkeys((name for name in NUMBERS_OF_EXPERTS if hasattr(config, name)), 12)
    return language_models.build(model_type, **twelve)


def on_one_batch(model: Any, mesh: DeviceMesh, implementation: str) -> nn.Module:
    """Experts on as many ranks as divide all else by tensor parallelism; each of them has the whole batch."""
    how = DistributedConfig(tp_size=mesh.size(), ep_size=mesh.size(), ep_implementation=implementation)
    tensor_plan, expert_plan, _ = model._resolve_parallel_plans(how) if mesh.size() > 1 else ({}, {}, {})
    parallel = language_models.divided(model, mesh, tensor_plan)
    apply_expert_parallelism(parallel, mesh, mesh, expert_plan, ep_implementation=implementation)
    parallel.tie_weights()
    return parallel


def exchanged(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Tokens go to the ranks of their experts and come back, as by default in training."""
    return on_one_batch(model, mesh, "auto")


def summed(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Each rank's experts on the whole batch, and an all_reduce of what they give."""
    return on_one_batch(model, mesh, "all_reduce")


def batch_divided(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Experts on as many ranks as share the batch, and FSDP2 of all else."""
    size = mesh.size()
    dense = init_device_mesh(mesh.device_type, (1, 1, size, 1), mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"))
    experts = init_device_mesh(mesh.device_type, (1, 1, 1, size), mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep"))
    how = DistributedConfig(fsdp_size=size, ep_size=size)
    parallel: nn.Module = DistributedMixin.maybe_distribute_model(model, how, TransformersDeviceMesh(dense, experts))
    return parallel
