"""Computes the bits of torch's own unsharded linear layer, which a world of one rank must return."""

from __future__ import annotations

import torch
from torch.nn import functional

from equivtest.families.linear.case import LinearCase

EXACT_MODES = ("dense", "wide-x", "wide-w", "wide-g")
"""Modes in which nothing rounds, so that kernels may add in any order and still agree, except for signs of zero."""


def unsharded_bits(case: LinearCase, index: int, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns every answer of the unsharded layer by name, in the case's dtype.

    Returns an empty dict if the case has more than one rank, or if the draw's values are real.

    Source: torch.nn.functional.linear and autograd (2.13.0), on one thread, as each rank runs them.
    """
    if case.world_size > 1 or case.values[index][0] not in EXACT_MODES:
        return {}
    names = ("x", *case.parameter_names())
    leaves = {name: given[name].clone().requires_grad_(name in case.requires_grad) for name in names}
    output = functional.linear(leaves["x"], leaves["weight"], leaves.get("bias"))
    if case.requires_grad:
        output.backward(given["cotangent"])  # type: ignore[no-untyped-call]
    answers = {"output": output.detach()} | {f"param.{name}": given[name] for name in case.parameter_names()}
    gradients = {f"grad.{name}": leaves[name].grad for name in case.requires_grad}
    return answers | {name: gradient for name, gradient in gradients.items() if gradient is not None}
