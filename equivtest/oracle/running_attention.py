"""Computes attention as torch's 16-bit CPU kernel does, which stores the operands of matrix products in 16 bits.

A program may instead compute attention step by step in float32, as other kernels of torch do. Such a program stores
fewer results, so the bounds hold for it too. Its backward multiplies by the output before the output is stored, and the
bounds allow for this. A program that divides the keys among the ranks stores each share of the output.

Source: ATen/native/cpu/FlashAttentionKernel.cpp, compared with torch 2.13.0 by `python -m studies.bounded_ops`:
cpu_flash_attention rounds the probabilities (qk_reduced_data); cpu_flash_attention_backward rounds the probabilities
and the gradients of the scores (attn_reduced_data, grad_attn_reduced_data).  In the tensors' own dtype, the backward
adds the products of each block of queries to grad_k and grad_v, and of each block of keys to grad_q; the blocks have
the sizes of flash_attention_kernel_impl.
"""

from __future__ import annotations

import math

import torch

from equivtest.oracle.running_outs import Kernel, Out

KEYS = 512  # keys in a block
QUERIES = ((768, 256), (192, 64), (0, 32))
"""Pairs (least number of queries, queries per block): from 192 to 767 queries, a block has 64."""


def attention(
    kernel: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002  (torch's own)
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[Out, Out]:
    """Returns the output of attention, and one logarithm for each query.

    The logarithm is that of the sum of the exponentials of the query's scores.
    """
    scores = _scores(q, _to_heads_of(q, k), is_causal, attn_mask, scale)
    found = kernel.stored(_probabilities(scores)) @ _to_heads_of(q, v)
    return Out(found, is_sum=True), Out(scores.logsumexp(-1), is_whole=True)


def attention_backward(
    kernel: Kernel,
    g: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    log_sums: torch.Tensor,
    dropout: float,
    is_causal: bool,  # noqa: FBT001  (torch's own)
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[Out, Out, Out]:
    """Returns the gradients of queries, keys and values.

    A program may multiply by `out` before or after it stores `out` in 16 bits. The bounds of the gradients hold for
    both.
    """
    keys, values, factor = _to_heads_of(q, k), _to_heads_of(q, v), _factor(q, scale)
    p = _probabilities(_scores(q, keys, is_causal, attn_mask, scale))
    d_scores = p * (g @ values.transpose(-2, -1) - (g * kernel.stored(out)).sum(-1, keepdim=True))
    stored = kernel.stored(d_scores)
    grads = stored @ keys, stored.transpose(-2, -1) @ q, kernel.stored(p).transpose(-2, -1) @ g
    num_queries, heads = q.shape[-2], q.shape[1] // k.shape[1]
    of_queries = math.ceil(num_queries / next(size for least, size in QUERIES if num_queries >= least)) * heads
    return (
        Out(grads[0] * factor, stores=math.ceil(k.shape[-2] / KEYS), is_sum=True),
        Out(_to_fewer(grads[1] * factor, heads), stores=of_queries, is_sum=True),
        Out(_to_fewer(grads[2], heads), stores=of_queries, is_sum=True),
    )


def _factor(q: torch.Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def _scores(
    q: torch.Tensor,
    keys: torch.Tensor,
    is_causal: bool,  # noqa: FBT001
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    scores = q @ keys.transpose(-2, -1) * _factor(q, scale)
    if mask is not None:
        scores = scores + mask
    if is_causal:
        later = torch.ones(q.shape[-2], keys.shape[-2], dtype=torch.bool).tril().logical_not()
        scores = scores.masked_fill(later, -math.inf)
    return scores


def _probabilities(scores: torch.Tensor) -> torch.Tensor:
    """Returns the probabilities of the scores. If a query sees no key, all its probabilities are zero."""
    sees_none = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(sees_none, 0.0).softmax(-1).masked_fill(sees_none, 0.0)


def _to_heads_of(q: torch.Tensor, each: torch.Tensor) -> torch.Tensor:
    return each if each.shape[1] == q.shape[1] else each.repeat_interleave(q.shape[1] // each.shape[1], 1)


def _to_fewer(grad: torch.Tensor, heads: int) -> torch.Tensor:
    return grad if heads == 1 else grad.reshape(grad.shape[0], -1, heads, *grad.shape[2:]).sum(2)
