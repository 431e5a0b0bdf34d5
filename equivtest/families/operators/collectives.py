"""States the collectives of the operators for which torch documents them."""

from __future__ import annotations

from equivtest.families.operators.case import OperatorCase
from equivtest.oracle.collectives import Collectives, expected_collectives


@expected_collectives.register
def operator_collectives(case: OperatorCase, rank: int) -> Collectives:
    """Returns no collectives. Only sums of operands that are not partial are documented.

    A sum over a sharded dim becomes a partial DTensor, and any other sum keeps its operand's shards.

    Source: common_reduction_strategy in torch/distributed/tensor/_ops/_math_ops.py (2.13.0).
    """
    return ()
