"""Divides the tokens of an attention block among the ranks by torch's context parallelism.

torch has no context parallelism of the CPU's kernel, so the ring attention here calls torch's ring with this kernel.

Source: context_parallel, context_parallel_unshard, _context_parallel_shard, _templated_ring_attention and
_ContextParallel in torch/distributed/tensor/experimental/_context_parallel/_attention.py; _load_balancer.py beside it
(2.13.0).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard, set_rotate_method
from torch.distributed.tensor.experimental._context_parallel import _attention as untyped
from torch.distributed.tensor.experimental._context_parallel._load_balancer import (
    _PerDocumentHeadTailLoadBalancer,
    _PTRRLoadBalancer,
)
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask

from equivtest.programs.examples.attention import AttentionBlock
from equivtest.programs.examples.attention_plan import reduced

Move = Callable[[torch.Tensor], torch.Tensor]
torch_cp: Any = untyped
aten: Any = torch.ops.aten
TOKENS, ROWS_OF_MASK = 1, 2
"""The dim of the tokens in x, and in the mask."""


class Gathered(nn.Module):
    """Attention with a mask. The hook of torch gathers the keys and the values of all ranks."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, mask: torch.Tensor
    ) -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


class ContextBlock(AttentionBlock):
    """An attention block that computes some tokens on each rank. It takes and returns all tokens."""

    mesh: DeviceMesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own: torch.Tensor = _Moved.apply(x, self.divide, self.collect)  # type: ignore[no-untyped-call]
        attended = self.attend(self.norm(own), slice(None))
        output = own + self.out(attended)
        whole: torch.Tensor = _Moved.apply(output, self.collect, self.divide)  # type: ignore[no-untyped-call]
        return whole

    def divide(self, x: torch.Tensor) -> Any:
        """Returns the tokens of this rank. The ranks get the first and the last tokens in pairs.

        torch divides the buffers in place, and restores the tokens.
        """
        tokens, numbers = x.clone(), torch.arange(x.shape[TOKENS], device=x.device)
        context = context_parallel(
            self.mesh, buffers=[tokens, numbers], buffer_seq_dims=[TOKENS, 0], no_restore_buffers={numbers}
        )
        with context:
            own: torch.Tensor = tokens.clone()
        return (own + tokens.index_select(TOKENS, numbers)) / 2

    def collect(self, own: torch.Tensor) -> Any:
        """Returns the tokens of all ranks in the right order."""
        (whole,) = context_parallel_unshard(self.mesh, [own], [TOKENS])
        return whole

    def gather(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = _Ring.apply(query, key, value, self.mesh.get_group())  # type: ignore[no-untyped-call]
        return attended


class InOrder(ContextBlock):
    """The same with consecutive tokens on each rank."""

    def divide(self, x: torch.Tensor) -> Any:
        (own,) = torch_cp._context_parallel_shard(self.mesh, [x], [TOKENS])
        return own.clone()


class InDocuments(ContextBlock):
    """The same with the first and the last tokens of each document. In every second row the documents are reversed.

    The attention does not stop at the end of a document.
    """

    inner: Gathered
    mask: torch.Tensor

    def divide(self, x: torch.Tensor) -> Any:
        balancer, num_tokens = self.balancer(x), x.shape[TOKENS]
        mask = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=x.device).tril()
        buffers = {"tokens": x, "mask": mask.expand(len(x), 1, -1, -1).contiguous()}
        dims = {"tokens": TOKENS, "mask": ROWS_OF_MASK}
        own = torch_cp._context_parallel_shard(self.mesh, buffers, dims, balancer)
        columns = balancer._generate_indices()[:, None, None]
        self.mask = own["mask"].take_along_dim(columns, -1)
        return own["tokens"].clone()

    def collect(self, own: torch.Tensor) -> torch.Tensor:
        (whole,) = context_parallel_unshard(self.mesh, [own], [TOKENS], self.balancer(own, self.mesh.size()))
        return whole

    def gather(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = self.inner(query, key, value=value, mask=self.mask)
        return attended

    def balancer(self, x: torch.Tensor, num_shards: int = 1) -> Any:
        """Returns the balancer of the rows of x, which may be one of several equal shards."""
        part, num_tokens = 2 * self.mesh.size(), x.shape[TOKENS] * num_shards
        lengths = [length for length in (part, 2 * part, num_tokens - 3 * part) if length]
        documents = [lengths[:: -1 if row % 2 else 1] for row in range(len(x))]
        return _PerDocumentHeadTailLoadBalancer(documents, self.mesh.size(), x.device)


class InBlocks(InDocuments):
    """The same with blocks of two tokens, which torch deals out by the work that they are."""

    def balancer(self, x: torch.Tensor, num_shards: int = 1) -> Any:
        num_tokens = x.shape[TOKENS] * num_shards
        mask = create_block_mask(
            lambda row, head, query, key: (query >= key) & (query // 4 % (row + 2) > 0),
            *(len(x), 1, num_tokens, num_tokens),
            device=x.device.type,
            BLOCK_SIZE=2,
        )
        return _PTRRLoadBalancer(mask, self.mesh.size())


class _Moved(torch.autograd.Function):
    """Moves tokens by a function in the forward, and their gradients by its inverse in the backward."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, move: Move, move_back: Move) -> torch.Tensor:
        ctx.move_back = move_back
        return move(tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.move_back(gradients[0]), None, None


class _Ring(torch.autograd.Function):
    """Causal attention of this rank's queries to the keys of all ranks, which go round a ring."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: Any) -> Any:
        output, logsumexp = torch_cp._templated_ring_attention(
            group, 2, aten._scaled_dot_product_flash_attention_for_cpu.default, query, key, value, is_causal=True
        )
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.group = group
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        found = torch_cp._templated_ring_attention_backward(
            ctx.group,
            2,
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
            gradients[0],
            "grad_out",
            *ctx.saved_tensors,
            is_causal=True,
            dropout_p=0.0,
        )
        return *found, None


KINDS: dict[str, type[ContextBlock]] = {
    "context": ContextBlock,
    "in order": InOrder,
    "documents": InDocuments,
    "blocks": InBlocks,
}


def tokens_divided(block: nn.Module, mesh: DeviceMesh, *, kind: str, rotates: str) -> nn.Module:
    """Divides the tokens. There must be at least six tokens for each rank, and an even number for each.

    Args:
        kind: If 'context', `context_parallel` divides, and torch's ring attends. If 'in order', the same with
            consecutive tokens on each rank. If 'documents' or 'blocks', torch gathers the keys and the values.
        rotates: How the keys go round the ring: 'allgather' or 'alltoall'.
    """
    for parameter in block.parameters():
        parameter.register_hook(lambda gradient: reduced(gradient, mesh.get_group()))  # type: ignore[no-untyped-call]
    torch_cp._cp_options.enable_load_balance = True
    torch_cp._cp_options.convert_to_f32 = next(block.parameters()).dtype != torch.float64
    set_rotate_method(rotates)
    block.__class__, block.mesh = KINDS[kind], mesh  # type: ignore[assignment]
    if kind in ("documents", "blocks"):
        style = torch_cp._ContextParallel(ROWS_OF_MASK, torch_cp._ContextParallel.AttentionType.FLEX)
        block.inner = parallelize_module(Gathered(), mesh, style)
    return block
