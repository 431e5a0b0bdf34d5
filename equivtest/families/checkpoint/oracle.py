"""Computes the loaded tensor, which has the bits of the saved tensor."""

from __future__ import annotations

from equivtest.cases.values import draw
from equivtest.families.checkpoint.case import CheckpointCase
from equivtest.oracle import expect
from equivtest.oracle.expected import COPIED, Expected, ExpectedTensor


@expect.register
def expect_checkpoint(case: CheckpointCase, index: int) -> Expected:
    """Returns x, bit by bit."""
    x = draw(case, index)["x"]
    output = ExpectedTensor(
        value=x.double(),
        allowed=None,
        layout=case.layouts()["output"],
        dtype=case.dtype,
        derivation=COPIED,
        bits=x,
    )
    return Expected({"output": output}, {})
