"""Claims about torch's operators on DTensors, one call at a time.

A failure here means that an operator of DTensors differs from the operator of whole tensors. Look first at what it does
with a partial operand, then at a sharded dim, then at the gradient's placement.
"""

from __future__ import annotations

from equivtest.families.operators.strategy import operator_cases
from equivtest.families.operators.strategy_calls import ENUMERATION
from equivtest.property import Property
from equivtest.verdicts.claims import (
    agrees_on_all_ranks,
    does_not_touch_its_inputs,
    equals_unsharded,
    gradients_equal_unsharded,
    repeats_itself,
)

dtensor_operators = Property(
    subject="dtensor_operators",
    statement="An operator gives the same result on DTensors as on whole tensors, and the same gradients.",
    source="torch.distributed.tensor.DTensor and torch/distributed/tensor/_ops (2.13.0)",
    cases=operator_cases,
    claims=(
        equals_unsharded,
        gradients_equal_unsharded,
        agrees_on_all_ranks,
        does_not_touch_its_inputs,
        repeats_itself,
    ),
    weight=4,
    enumeration=ENUMERATION,
    incomplete="many cases find failures of torch that the known ones do not cover yet",
)
