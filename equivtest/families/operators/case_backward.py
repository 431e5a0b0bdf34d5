"""Lists the operators that autograd calls in the backward.

Their operands are a cotangent and a tensor of the same shape.

Autograd often passes the result of the forward as that tensor, and the result of an operator that is not linear is
never partial. A program that calls such an operator itself may pass any DTensor.
"""

from __future__ import annotations

from typing import Any

import torch

from equivtest.families.operators.case_forms import Argument, alike, either
from equivtest.families.operators.case_operator import ANY, FRACTION, UNIT, rounded

_POINTWISE: tuple[tuple[str, dict[str, Argument], str], ...] = (
    ("gelu_backward", {}, ANY), ("silu_backward", {}, ANY), ("sigmoid_backward", {}, FRACTION),
    ("tanh_backward", {}, UNIT), ("logit_backward", {}, FRACTION), ("threshold_backward", {"threshold": 0.5}, ANY),
)  # fmt: skip
"""Name, arguments, and the domain of the tensor."""


def _log_softmax_backward(cotangent: torch.Tensor, result: torch.Tensor, dim: int) -> Any:
    return torch.ops.aten._log_softmax_backward_data(cotangent, result, dim, cotangent.dtype)


ROWS = (
    *(
        rounded(name, getattr(torch.ops.aten, name), alike(**arguments), domains=(ANY, domain), num_dims=(2,))
        for name, arguments, domain in _POINTWISE
    ),
    rounded("_log_softmax_backward_data", _log_softmax_backward, either(alike(dim=0), alike(dim=-1)), num_dims=(2,)),
)
