"""Computes the loaded tensors, which have the bits of the saved tensors."""

from __future__ import annotations

from equivtest.cases.values import draw
from equivtest.families.checkpoint.case import CheckpointCase, output_of
from equivtest.oracle import expect
from equivtest.oracle.expected import COPIED, Expected, ExpectedTensor


@expect.register
def expect_checkpoint(case: CheckpointCase, index: int) -> Expected:
    """Returns x and y, bit by bit."""
    loaded = {
        output_of(name): ExpectedTensor(
            value=tensor.double(),
            allowed=None,
            layout=case.layouts()[output_of(name)],
            dtype=case.dtype,
            derivation=COPIED,
            bits=tensor,
        )
        for name, tensor in draw(case, index).items()
    }
    return Expected(loaded, {})
