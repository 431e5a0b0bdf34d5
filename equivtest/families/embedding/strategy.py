"""Draws cases of one embedding, within the contract and outside of it."""

from __future__ import annotations

from equivtest.cases.picks import cases_of
from equivtest.families.embedding.case import EmbeddingCase, RefusedEmbeddingCase

embedding_cases = cases_of(EmbeddingCase, dangerous=("num_embeddings", "output_layout", "requires_grad"))

refused_embedding_cases = cases_of(
    RefusedEmbeddingCase, only=("misfit", "leading", "num_embeddings", "embedding_dim", "output_layout")
)
"""Draws cases that every rank must refuse. Every rank has all ids, so none has to know their global shape."""
