"""The collectives of the operators that document collectives."""

from __future__ import annotations

from equivtest.families.operators.case import OperatorCase
from equivtest.oracle.collectives import Collectives, expected_collectives


@expected_collectives.register
def operator_collectives(case: OperatorCase, rank: int) -> Collectives:
    """Lists none: the sum of a divided dim is a partial sum, and any other sum is divided like its operand.

    Source: common_reduction_strategy in torch/distributed/tensor/_ops/_math_ops.py (2.13.0).
    """
    return ()
