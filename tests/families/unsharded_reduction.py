"""The unsharded reductions and softmaxes."""

from __future__ import annotations

import torch

from equivtest.families.reduction.case import ReductionCase
from tests.unsharded import answers_of, unsharded


@unsharded.register
def unsharded_reduction(case: ReductionCase, index: int) -> dict[str, torch.Tensor]:
    """torch's operation, forward and backward; operands of a partial sum are added first."""

    def forward(given: dict[str, torch.Tensor]) -> torch.Tensor:
        if case.is_partial:
            given["x"] = given["x"].detach().sum(0).requires_grad_(bool(case.requires_grad))
        if case.op in ("softmax", "log_softmax"):
            return getattr(torch, case.op)(given["x"], case.dims[0])
        if case.op == "norm":
            return torch.linalg.vector_norm(given["x"], 2, case.dims, keepdim=case.keepdim)
        return getattr(torch, case.op)(given["x"], case.dims, keepdim=case.keepdim)

    return answers_of(case, index, forward)
