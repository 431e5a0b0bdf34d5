"""One embedding by rows and by columns: what each must answer, and what one must be beside the other.

Letters: V num_embeddings, D embedding_dim, n_v how often id v occurs.

Both copy rows of one table, so that their outputs have the same bits, but that by rows an
all_reduce or reduce_scatter adds the zeros of ranks that do not have the id: -0.0 may become +0.0
and a NaN any other.  Exact gradients are equal.  Of real ones row v is a sum of n_v numbers:

    n_v <= 1                 a zero or a copy: equal
    added in token order     the same additions of the same numbers, element by element: equal, but
                             where each term is scaled by a rounded 1 / n_v, which a kernel may fuse
                             into the addition for some elements and not for others
    any other                each is within the oracle's bound of the right value, so that they are
                             at most twice that apart

Source: `equivtest.families.embedding.oracle` for the bound; embedding_dense_backward_cpu_loop in
ATen/native/Embedding.cpp for the order, and that of add in
ATen/native/cpu/BinaryOpsKernel.cpp, whose vectors take fmadd, for what it may fuse (2.13.0).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from equivtest.cases.values import draw
from equivtest.families.embedding.case import STYLES
from equivtest.families.embedding.collectives import embedding_collectives
from equivtest.families.embedding.oracle import expect_embedding, may_round
from equivtest.families.embedding.ways.case import EmbeddingWaysCase, of_style
from equivtest.oracle import expect, expect_held
from equivtest.oracle.collectives import Collectives, expected_collectives
from equivtest.oracle.declared import arithmetic_of
from equivtest.oracle.expected import Expected, ExpectedTensor, Twin
from equivtest.oracle.held import Held, put_together
from equivtest.tensors import DTYPES


@expect.register
def expect_each_way(case: EmbeddingWaysCase, index: int) -> Expected:
    """What `expect_embedding` knows, of both; errors as there."""
    found = {style: expect_embedding(case.of_style(style), index) for style in STYLES}
    return Expected(
        {of_style(name, style): each.tensors[name] for style, each in found.items() for name in each.tensors},
        {of_style(name, style): bits for style, each in found.items() for name, bits in each.bits_used.items()},
    )


@expect_held.register
def expect_both_ways(case: EmbeddingWaysCase, index: int, held: Held) -> Expected:
    """The same, and of each rowwise tensor what it must be beside the colwise one that the ranks hold."""
    expected = expect_each_way(case, index)
    ones = {name: expected.tensors[of_style(name, "rowwise")] for name in case.of_style("rowwise").answer_names()}
    twins = {of_style(name, "rowwise"): _twin(case, index, name, one, held) for name, one in ones.items()}
    return replace(expected, twins=twins)


@expected_collectives.register
def both_ways_collectives(case: EmbeddingWaysCase, rank: int) -> Collectives:
    """Those of each embedding, one after the other."""
    return tuple(call for style in case.styles for call in embedding_collectives(case.of_style(style), rank))


def _twin(case: EmbeddingWaysCase, index: int, name: str, one: ExpectedTensor, held: Held) -> Twin:
    other = of_style(name, "colwise")
    found = put_together(held, other, case.shapes()[other], case.mesh_shape)
    if found is None or found.dtype != DTYPES[case.dtype]:
        return Twin(other, None)
    right = replace(one, value=found.double(), bits=found, derivation=f"equal: {other} is copied from the same rows")
    if name.startswith("grad."):
        allowed, why = _apart(case, index, one, other)
        right = replace(right, bits=None, allowed=allowed, derivation=why, is_symmetric=False)
    return Twin(other, right, zeros_added=name == "output" and case.world_size > 1)


def _apart(case: EmbeddingWaysCase, index: int, one: ExpectedTensor, other: str) -> tuple[torch.Tensor | None, str]:
    """How far two right gradients may be apart, and why; (V, D), float64."""
    if one.allowed is None:
        return None, f"equal to {other}: sums of integers are exact in any order"
    allowed, why = 2 * one.allowed, f"twice what each, and {other}, may be off: {one.derivation}"
    if arithmetic_of(case.dtype).adds_rows_in_order:
        counts = torch.bincount(draw(case, index)["ids"].flatten(), minlength=case.num_embeddings)
        rounded = torch.tensor([case.scale_grad_by_freq and may_round(int(count)) for count in counts])
        allowed, why = torch.where(rounded[:, None], allowed, 0.0), f"{why}; equal where no term is scaled"
    return allowed, why
