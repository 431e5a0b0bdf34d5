"""Defects of parallelized modules."""

from __future__ import annotations

from dataclasses import replace

from equivtest.families.module.case import ModuleCase
from equivtest.kit.defect import Defect

_HERE = "equivtest.families.module.defects.linears:"
_SUBJECT = "equivtest.families.module.subject:"
_SMALLEST = ModuleCase(
    world_size=2, build=_SUBJECT + "gated_block", parallelize=_SUBJECT + "tensor_parallel", x_shape=(1, 2)
)
_ATTENTION = ModuleCase(
    world_size=2,
    dtype="float64",
    build="equivtest.families.module.subject.attention:attention_block",
    parallelize="equivtest.families.module.subject.attention:heads_divided",
    x_shape=(1, 6),
    values=(("real", 0),),
)
_DATA_PARALLEL = replace(_SMALLEST, parallelize=_SUBJECT + "data_parallel", x_shape=(2, 2), batch="mean of parts")
_FULLY_SHARDED = replace(_DATA_PARALLEL, parallelize=_SUBJECT + "fully_sharded")
_ROWS = "one rank has all rows, and each of two must have one"
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
    Defect(
        "equivtest.families.module.defects.attention:bias_of_every_share",
        "module",
        "a term added on every rank",
        "equals_unsharded",
        "value",
        _ATTENTION,
        _WHY,
    ),
    Defect(
        "equivtest.families.module.defects.attention:gradient_of_own_heads",
        "module",
        "a reduction missing in the backward",
        "gradients_equal_unsharded",
        "value",
        _ATTENTION,
        "of one token a head gathers its value, whose gradient the norm gets; one rank has all heads",
    ),
    Defect(
        "equivtest.families.module.defects.attention:scaled_by_all_features",
        "module",
        "wrong divisor or wrong group",
        "equals_unsharded",
        "value",
        replace(_ATTENTION, world_size=1, x_shape=(2, 6)),
        "a softmax of one token is 1 whatever the scale; one rank has all features",
    ),
    Defect(
        "equivtest.families.module.defects.attention:norm_of_own_features",
        "module",
        "a partial value taken for the whole",
        "equals_unsharded",
        "value",
        _ATTENTION,
        _WHY,
    ),
    Defect(
        _HERE + "gradients_of_own_rows",
        "module",
        "a reduction missing in the backward",
        "gradients_equal_unsharded",
        "value",
        _DATA_PARALLEL,
        _ROWS,
    ),
    Defect(
        _HERE + "one_parameter_left_out",
        "module",
        "a reduction missing in the backward",
        "gradients_equal_unsharded",
        "value",
        _DATA_PARALLEL,
        _ROWS,
    ),
    Defect(
        _HERE + "shards_of_own_gradients",
        "module",
        "a reduction missing in the backward",
        "gradients_equal_unsharded",
        "value",
        _FULLY_SHARDED,
        _ROWS,
    ),
    Defect(
        _HERE + "gradients_added_up",
        "module",
        "wrong divisor or wrong group",
        "gradients_equal_unsharded",
        "value",
        _FULLY_SHARDED,
        _ROWS,
    ),
)
