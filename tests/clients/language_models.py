"""The language models of transformers, each of a tiny random configuration, under transformers' own plans.

`tests.clients.language_models:llama` builds the model of transformers' model type 'llama'; so does every other type.

Source: transformers 5.23.0, distributed/tensor_parallel.py and distributed/mixin.py, maybe_distribute_model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

HEADS, FEATURES, VOCABULARY = 12, 48, 24
"""1, 2, 3 and 4 ranks divide each of them."""

TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": FEATURES, "intermediate_size": FEATURES, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": 4, "max_position_embeddings": 32,
    "moe_intermediate_size": 2 * FEATURES, "shared_expert_intermediate_size": FEATURES,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "sliding_window": 4,
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4,
    "attention_dropout": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "hidden_dropout": 0.0,
    "use_cache": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
"""What a configuration has of these is made so small."""

WIDER = (
    "cohere2_moe", "granitemoe", "granitemoeshared", "hunyuan_v1_moe", "minimax", "minimax_m2", "mixtral", "olmoe",
)  # fmt: skip

OF_TYPE: dict[str, dict[str, Any]] = {
    **{key: {"intermediate_size": 2 * FEATURES} for key in WIDER},
    "seed_oss": {"residual_dropout": 0.0},
}
"""What a type needs besides: torch's products by group ask for rows of 16 bytes, of which four ranks have a quarter."""


def __getattr__(name: str) -> Callable[[], nn.Module]:
    """The function that builds the model of a type."""
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda: build(name)


def build(model_type: str, **fields: Any) -> nn.Module:
    """A model with a head for the next token, parameters at random, in training but that nothing is dropped."""
    own = {**OF_TYPE.get(model_type, {}), **fields}
    known = set(dir(AutoConfig.for_model(model_type)))
    tiny = {name: value for name, value in TINY.items() if name in known}
    config = AutoConfig.for_model(model_type, **{**tiny, **own})
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model.train()


def tensor_parallel(model: Any, mesh: DeviceMesh) -> nn.Module:
    """transformers' plan of the model type; what is tied is tied again, as from_pretrained does after the plan."""
    own = {name for name, _ in (*model.named_modules(), *model.named_parameters())}
    plan = model._expand_parallel_plan(dict(model.tp_plan))
    parallel: Any = apply_tensor_parallelism(model, mesh, {name: style for name, style in plan.items() if name in own})
    parallel.tie_weights()
    return parallel


def layers_sharded(model: Any, mesh: DeviceMesh) -> nn.Module:
    """FSDP2, each layer by itself and what is left at the root."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
