"""States the collectives of the operators for which torch documents them."""

from __future__ import annotations

from equivtest.families.operators.case import OperatorCase
from equivtest.oracle.collectives import Collectives, expected_collectives


@expected_collectives.register
def operator_collectives(case: OperatorCase, rank: int) -> Collectives:
    """Returns an empty tuple, because no documented call takes a collective.

    The documented calls are sums of operands that are not partial.

    A sum over a sharded dim becomes a partial DTensor, and any other sum keeps its operand's shards. Cases of other
    operators do not record collectives.

    Source: common_reduction_strategy in torch/distributed/tensor/_ops/_math_ops.py (2.13.0).
    """
    return ()
