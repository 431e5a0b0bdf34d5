"""The unsharded cross entropy."""

from __future__ import annotations

import torch
from torch.nn import functional

from equivtest.families.cross_entropy.case import CrossEntropyCase
from equivtest.families.cross_entropy.gathered.case import GatheredCrossEntropyCase
from tests.unsharded import answers_of, unsharded


@unsharded.register
def unsharded_cross_entropy(case: CrossEntropyCase, index: int) -> dict[str, torch.Tensor]:
    """nn.functional.cross_entropy, forward and backward."""
    smoothing = case.label_smoothing if isinstance(case, GatheredCrossEntropyCase) else 0.0
    options = {"ignore_index": case.ignore_index, "reduction": case.reduction, "label_smoothing": smoothing}

    def forward(given: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(given["x"], given["target"], given.get("weight"), **options)

    return answers_of(case, index, forward)
