"""Collectives without ranks."""

from __future__ import annotations

import functools

import torch

from equivtest.cases.values import draw
from equivtest.families.collectives.case import BITWISE, CollectivesCase
from equivtest.families.collectives.oracle import arrange
from tests.unsharded import unsharded


@unsharded.register
def unsharded_collectives(case: CollectivesCase, index: int) -> dict[str, torch.Tensor]:
    """Operands reduced one after the other, in their own dtype."""
    given = draw(case, index)
    joins = {"": None, "max": torch.maximum, "min": torch.minimum, "product": torch.mul}
    joins |= {op: getattr(torch, f"bitwise_{op[1:]}") for op in BITWISE}
    answers = {}
    for call in case.calls:
        whole, join = given[call.operand], joins.get(call.op, torch.add)
        dtype = whole.dtype
        whole = whole.long() if call.op in BITWISE else whole
        whole = whole if join is None else functools.reduce(join, whole / 2 if call.op == "premul" else whole).to(dtype)
        answers[call.name] = arrange(case, call.result, whole / case.world_size if call.op == "avg" else whole)
    return answers
