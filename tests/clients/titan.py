"""torchtitan's Llama under its own plan for tensor parallelism and its own FSDP2.

torchtitan names the device 'cuda' if there is no accelerator (tools/utils.py, get_device_info); here it gets the
mesh's device.  The attention of its Llama is compiled; its other one, which calls torch's
scaled_dot_product_attention, replaces it.  These are the steps of `parallelize_llama` without checkpointing and
compiling; the whole function does not support float64 (config/__init__.py, TORCH_DTYPE_MAP).

Source: torchtitan 0.3.0, models/llama3/parallelize.py, parallelize_llama, with the backend 'partial_dtensor', and
models/llama3/model.py, update_from_config.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import Llama3Model, _build_llama3_layers
from torchtitan.models.llama3.sharding import set_llama3_sharding_config

from tests.clients.sizes import FEATURES, HEADS, VOCABULARY

INIT: dict[str, Any] = {"weight": nn.init.normal_}


def llama_of(*, sequence_parallel: bool, rope: Any = ComplexRoPE) -> nn.Module:
    """Two layers; its configuration holds its plan."""
    config: Any = Llama3Model.Config(
        dim=FEATURES,
        vocab_size=VOCABULARY,
        tok_embeddings=Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=FEATURES, param_init=INIT),
        norm=RMSNorm.Config(normalized_shape=FEATURES, param_init={"weight": nn.init.ones_}),
        lm_head=Linear.Config(in_features=FEATURES, out_features=VOCABULARY, param_init=INIT),
        layers=_build_llama3_layers(
            n_layers=2,
            dim=FEATURES,
            n_heads=HEADS,
            hidden_dim=FEATURES,
            rope=rope.Config(dim=FEATURES // HEADS, max_seq_len=32, theta=10000.0),
            attn_backend="flex",
        ),
    )
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    set_llama3_sharding_config(config, enable_sp=sequence_parallel)
    model: Any = config.build()
    model.init_states()
    return model  # type: ignore[no-any-return]


def llama() -> nn.Module:
    return llama_of(sequence_parallel=False)


def sequence_llama() -> nn.Module:
    """Between its projections each rank has a part of the tokens."""
    return llama_of(sequence_parallel=True)


def cos_sin_llama() -> nn.Module:
    """Its positions are turned by sines and cosines: gradients stay operands of a sum for longer."""
    return llama_of(sequence_parallel=False, rope=CosSinRoPE)


def made_whole(_: Any, __: Any, logits: Any) -> Any:
    """Gathers the logits: its loss accepts logits whose vocabulary is divided, but the test needs all of them."""
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


def dims_of(mesh: DeviceMesh, *, tp: int, dp_shard: int) -> ParallelDims:
    parallel_dims.device_type = mesh.device_type
    dims = ParallelDims(
        dp_replicate=1, dp_shard=dp_shard, cp=1, tp=tp, pp=1, ep=1, world_size=mesh.size(),
        spmd_backend="partial_dtensor",
    )  # fmt: skip
    dims.build_mesh()
    return dims


def fully_sharded(model: Any, dims: ParallelDims) -> nn.Module:
    """Uses its FSDP2 without gradient division: by default torch then requests a reduction that gloo lacks."""
    dtype = next(model.parameters()).dtype
    apply_fsdp_to_decoder(model, dims.get_mesh(["fsdp"]), param_dtype=dtype, reduce_dtype=dtype, pp_enabled=False)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)
    return model  # type: ignore[no-any-return]


def tensor_parallel(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Its plan."""
    if mesh.size() > 1:
        model.parallelize(dims_of(mesh, tp=mesh.size(), dp_shard=1))
    model.register_forward_hook(made_whole)
    return model  # type: ignore[no-any-return]


def layers_sharded(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Its FSDP2, which adds gradients up: the loss divides by all tokens."""
    return fully_sharded(model, dims_of(mesh, tp=1, dp_shard=mesh.size()))


def both(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Its plan along one axis, its FSDP2 along the other."""
    dims = dims_of(mesh, tp=mesh["tp"].size(), dp_shard=mesh["dp"].size())
    if dims.tp_enabled:
        model.parallelize(dims)
    model.register_forward_hook(made_whole)
    return fully_sharded(model, dims)
