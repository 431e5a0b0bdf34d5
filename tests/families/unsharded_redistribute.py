"""The tensor that is redistributed, whole."""

from __future__ import annotations

import functools

import torch

from equivtest.cases.values import draw
from equivtest.families.redistribute.case import RedistributeCase
from equivtest.tensors import DTYPES
from tests.unsharded import unsharded


@unsharded.register
def unsharded_redistribute(case: RedistributeCase, index: int) -> dict[str, torch.Tensor]:
    """The tensor and its cotangent; operands are reduced one after the other, in the dtype that the case asks for."""
    given, of_x = draw(case, index), DTYPES[case.dtype]
    output = {"output": _reduced(case, "x", given["x"].to(DTYPES[case.forward_dtype or case.dtype]))}
    cotangent = given["cotangent"].to(DTYPES[case.backward_dtype or case.dtype])
    return output | {f"grad.{name}": _reduced(case, "cotangent", cotangent).to(of_x) for name in case.requires_grad}


def _reduced(case: RedistributeCase, name: str, given: torch.Tensor) -> torch.Tensor:
    op, num_operands = case.reduction(name)
    join = {"max": torch.maximum, "min": torch.minimum}.get(op, torch.add)
    total = functools.reduce(join, given.reshape(num_operands, *case.shape))
    return total / num_operands if op == "avg" else total
