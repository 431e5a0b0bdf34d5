"""Claims about torch's operators on DTensors, several calls one after the other in one process.

A failure here that no single call shows means that state outlives a call. Look first at state that is kept from the
same operator with other arguments or on another shape, then at writes through views, then at `to_local` and
`from_local`.
"""

from __future__ import annotations

from equivtest.families.operators.chains.strategy import chain_cases
from equivtest.families.operators.chains.strategy_calls import ENUMERATION
from equivtest.property import Property
from equivtest.verdicts.claims import (
    agrees_on_all_ranks,
    does_not_touch_its_inputs,
    equals_unsharded,
    gradients_equal_unsharded,
    repeats_itself,
)

dtensor_operator_chains = Property(
    subject="dtensor_operator_chains",
    statement="Each operator of a chain gives the same result on DTensors as on whole tensors, and the same gradients.",
    source="torch.distributed.tensor.DTensor and torch/distributed/tensor/_ops (2.13.0)",
    cases=chain_cases,
    claims=(
        equals_unsharded,
        gradients_equal_unsharded,
        agrees_on_all_ranks,
        does_not_touch_its_inputs,
        repeats_itself,
    ),
    conclusive_dtypes=("float32", "float64"),
    enumeration=ENUMERATION,
    incomplete="many cases find failures of torch that the known ones do not cover yet",
)
