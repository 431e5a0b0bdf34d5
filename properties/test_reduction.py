"""Claims about reductions and softmaxes of DTensors.

A failure here means that a sum, mean, largest element, norm or softmax depends on where elements live. Look first at
shards of unequal size, then at how a partial result is interpreted.
"""

from __future__ import annotations

from typing import Any

from equivtest.families.operators.case import OperatorCase
from equivtest.families.operators.strategy import REDUCTIONS, reduction_cases
from equivtest.property import Property
from equivtest.verdicts.claims import (
    agrees_on_all_ranks,
    does_not_touch_its_inputs,
    equals_unsharded,
    gradients_equal_unsharded,
    repeats_itself,
    uses_only_collectives,
)


def seven_rows(operator: str, **fields: Any) -> OperatorCase:
    """Returns a case in which three ranks have 3, 3 and 1 rows: a mean of their means is not the mean of seven rows."""
    arguments = (("dim", 0 if "softmax" in operator else (0,)),)
    return OperatorCase(
        world_size=3, operator=operator, operands=((7, 4),), arguments=arguments, placements=(("shard(0)",),), **fields
    )


reduction = Property(
    subject="dtensor_operators",
    statement="A reduction or softmax of a DTensor equals the whole tensor's, and so does its gradient.",
    source="torch/distributed/tensor/_ops/_math_ops.py, common_reduction_strategy and softmax_strategy (2.13.0)",
    cases=reduction_cases,
    claims=(
        equals_unsharded,
        gradients_equal_unsharded,
        agrees_on_all_ranks,
        does_not_touch_its_inputs,
        repeats_itself,
        uses_only_collectives,
    ),
    examples=(
        seven_rows("sum", records=True),
        *(seven_rows(name, requires_grad=(0,), values=(("real", 0), ("dense", 1))) for name in REDUCTIONS),
    ),
    weight=3,
)
