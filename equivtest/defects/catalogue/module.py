"""Defects of parallelized modules."""

from __future__ import annotations

from equivtest.cases.module import ModuleCase
from equivtest.defects.catalogue.record import Defect

_HERE = "equivtest.defects.module:"
_SUBJECT = "equivtest.subjects.module:"
_SMALLEST = ModuleCase(
    world_size=2, build=_SUBJECT + "gated_block", parallelize=_SUBJECT + "tensor_parallel", x_shape=(1, 2)
)
_WHY = "one rank has the whole sum; the sizes of the module are its own"

DEFECTS = (
    Defect(
        _HERE + "residual_on_every_rank",
        "module",
        "a term added on every rank",
        "equals_unsharded",
        "value",
        _SMALLEST,
        _WHY,
    ),
    Defect(
        _HERE + "gradient_averaged",
        "module",
        "wrong divisor or wrong group",
        "gradients_equal_unsharded",
        "value",
        _SMALLEST,
        _WHY,
    ),
    Defect(
        _HERE + "shares_of_tokens_not_summed",
        "module",
        "a partial value taken for the whole",
        "equals_unsharded",
        "value",
        _SMALLEST,
        _WHY,
    ),
    Defect(
        _HERE + "gradient_of_own_tokens_alone",
        "module",
        "a reduction missing in the backward",
        "gradients_equal_unsharded",
        "value",
        _SMALLEST,
        "of one token on two ranks the second has none, and gets no gradient of the first's",
    ),
)
