"""The unsharded norms."""

from __future__ import annotations

import torch
from torch.nn import functional

from equivtest.families.norm.case import NormCase
from tests.unsharded import answers_of, unsharded


@unsharded.register
def unsharded_norm(case: NormCase, index: int) -> dict[str, torch.Tensor]:
    """nn.functional.layer_norm or rms_norm, forward and backward."""

    def forward(given: dict[str, torch.Tensor]) -> torch.Tensor:
        x, shape, weight = given["x"], (case.features,), given.get("weight")
        if case.norm == "layer_norm":
            return functional.layer_norm(x, shape, weight, given.get("bias"), case.eps)
        return functional.rms_norm(x, shape, weight, case.eps)

    return answers_of(case, index, forward)
