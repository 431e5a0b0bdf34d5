"""The unsharded embedding."""

from __future__ import annotations

import torch
from torch.nn import functional

from equivtest.families.embedding.case import NO_PADDING, EmbeddingCase
from tests.unsharded import answers_of, unsharded


@unsharded.register
def unsharded_embedding(case: EmbeddingCase, index: int) -> dict[str, torch.Tensor]:
    """nn.functional.embedding, forward and backward."""
    options = {"padding_idx": None if case.padding_idx == NO_PADDING else case.padding_idx}
    options |= {"scale_grad_by_freq": case.scale_grad_by_freq}
    return answers_of(case, index, lambda given: functional.embedding(given["ids"], given["weight"], **options))
