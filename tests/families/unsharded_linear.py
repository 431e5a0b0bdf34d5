"""The unsharded linear layer."""

from __future__ import annotations

import torch
from torch.nn import functional

from equivtest.families.linear.case import LinearCase
from tests.unsharded import answers_of, unsharded


@unsharded.register
def unsharded_linear(case: LinearCase, index: int) -> dict[str, torch.Tensor]:
    """nn.functional.linear, forward and backward."""
    return answers_of(case, index, lambda given: functional.linear(given["x"], given["weight"], given.get("bias")))
