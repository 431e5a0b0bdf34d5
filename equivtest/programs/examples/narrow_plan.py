"""Shards the narrow block by FSDP2, which casts, and recomputes its layers in the backward.

Source: MixedPrecisionPolicy in torch/distributed/fsdp/_fully_shard/_fsdp_api.py, and FSDPState._cast_forward_inputs;
torch/distributed/_composable/checkpoint_activation.py, torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py
and torch/utils/checkpoint.py (2.13.0).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from equivtest.programs.examples.narrow import NARROW, WIDE, NarrowBlock, NarrowLayer

PRODUCTS: Any = [torch.ops.aten.mul.Tensor]


def fully_sharded_with_casts(
    block: NarrowBlock, mesh: DeviceMesh, *, casts_in_layers: bool, recomputes: str = "", replicas: bool = False
) -> nn.Module:
    """Shards each layer and the block by FSDP2, with parameters in bfloat16 and outputs of each layer in wide numbers.

    Between the forward and the backward, each two of an even number of ranks keep the parameters of a layer.

    The block's input keeps its dtype. Gradients are reduced in the dtype of the parameters. The block's output has this
    dtype too. If the block widens its output, FSDP2 does so instead, and the block has no other dtype of parameters.

    Args:
        casts_in_layers: Whether the layers cast their inputs. Otherwise FSDP2 casts the inputs of each layer.
        recomputes: How the backward recomputes each layer. See `recompute`. If 'sharded', a wrapper has each layer that
            is sharded, and not FSDP2 each layer that is wrapped.
        replicas: Whether each rank has the whole parameters, by the function `replicate`.
    """
    pairs = {} if replicas or mesh.size() % 2 else {"reshard_after_forward": 2}
    shard: Any = replicate if replicas else fully_shard
    dtype = block.first.weight.dtype
    policy: dict[str, Any] = {"param_dtype": NARROW, "reduce_dtype": dtype}
    block.first.casts = block.second.casts = casts_in_layers
    if recomputes != "sharded":
        recompute(block, recomputes)
    for layer in (block.first, block.second):
        cast = MixedPrecisionPolicy(**policy, output_dtype=dtype, cast_forward_inputs=not casts_in_layers)
        shard(layer, mesh=mesh, mp_policy=cast, **pairs)
    if recomputes == "sharded":
        recompute(block, "wrapped")
    outputs = {"output_dtype": WIDE} if block.widens else {**policy, "output_dtype": dtype}
    block.widens = False
    kept = MixedPrecisionPolicy(**outputs, cast_forward_inputs=False)
    sharded: nn.Module = shard(block, mesh=mesh, mp_policy=kept)
    if recomputes:
        sharded.register_forward_hook(keep_random_numbers)
    return sharded


def recompute(block: NarrowBlock, how: str) -> None:
    """Makes the backward recompute each layer, which has an argument by keyword.

    Args:
        how: If 'composable', the function `checkpoint` changes each layer, and only the recomputation of the first may
            stop early. If 'wrapped', 'reentrant' or 'selective', a wrapper has each layer. With 'selective' the wrapper
            of the first layer keeps the products of x and gate. If empty, nothing is recomputed.
    """
    if how == "composable":
        checkpoint(block.first)
        checkpoint(block.second, early_stop=False)
    elif how:
        implementation = CheckpointImpl.REENTRANT if how == "reentrant" else CheckpointImpl.NO_REENTRANT
        wrap: Any = partial(checkpoint_wrapper, checkpoint_impl=implementation)
        if how == "selective":
            keeps = partial(wrap, context_fn=partial(create_selective_checkpoint_contexts, PRODUCTS))
            first = block.first
            apply_activation_checkpointing(block, keeps, lambda part: part is first)
            apply_activation_checkpointing(block, wrap, lambda part: part is block.second)
        else:
            apply_activation_checkpointing(block, wrap, lambda part: isinstance(part, NarrowLayer))


def keep_random_numbers(block: nn.Module, args: Any, output: torch.Tensor) -> None:
    """Makes the next backward from `output` raise if it changes which random numbers come next."""
    if output.requires_grad:
        output.register_hook(draw_in_backward)  # type: ignore[no-untyped-call]


def draw_in_backward(gradient: torch.Tensor) -> None:
    """Draws a random number, so that the next ones are not those after the forward.

    The engine's callback, which FSDP2 uses too, runs at the end of the backward.
    """
    torch.rand(())
    state = torch.get_rng_state()

    def require_state() -> None:
        if not torch.equal(torch.get_rng_state(), state):
            raise AssertionError("the backward changed which random numbers come next")

    engine: Any = torch.autograd.Variable
    engine._execution_engine.queue_callback(require_state)
