"""The language models of transformers, each of a tiny random configuration, under transformers' own plans.

`tests.clients.language_models:llama` builds the model of transformers' model type 'llama'; so does every other type.

Source: transformers 5.23.0, distributed/tensor_parallel.py and distributed/mixin.py, maybe_distribute_model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from tests.clients.sizes import OF_TYPE, TINY


def __getattr__(name: str) -> Callable[[], nn.Module]:
    """The function that builds the model of a type."""
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda: build(name)


def build(model_type: str, **fields: Any) -> nn.Module:
    """Builds a model with a head for the next token and random parameters, in training mode without dropout."""
    own = {**OF_TYPE.get(model_type, {}), **fields}
    known = set(dir(AutoConfig.for_model(model_type)))
    tiny = {name: value for name, value in TINY.items() if name in known}
    config = AutoConfig.for_model(model_type, **{**tiny, **own})
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model.train()


def tensor_parallel(model: Any, mesh: DeviceMesh) -> nn.Module:
    """transformers' plan of the model type; what is tied is tied again, as from_pretrained does after the plan."""
    parallel = divided(model, mesh, model._expand_parallel_plan(dict(model.tp_plan)))
    parallel.tie_weights()
    return parallel


def packed_experts(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Uses the same plan, but divides merged weights of experts like their parts (finding 115)."""
    plan = model._expand_parallel_plan(dict(model.tp_plan))
    merged = {name: "packed_colwise" for name in plan if name.endswith("experts.gate_up_proj")}
    return divided(model, mesh, plan | merged)


def divided(model: Any, mesh: DeviceMesh, plan: Mapping[str, str]) -> Any:
    """Divides the model by a plan for submodules and parameters, each named once: without the tied ones."""
    own = {name for name, _ in (*model.named_modules(), *model.named_parameters())}
    return apply_tensor_parallelism(model, mesh, {name: style for name, style in plan.items() if name in own})


def layers_sharded(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Shards with FSDP2, each layer separately and the rest at the root."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
