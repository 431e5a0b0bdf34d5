"""Draws cases of a perceptron under FSDP2 with mixed precision."""

from __future__ import annotations

from equivtest.cases.picks import Cases, Draw, pick
from equivtest.families.training.data_parallel.strategy import _pick_data_parallel
from equivtest.families.training.mixed.case import NARROW, MixedCase
from equivtest.property import Space

PARAM_DTYPES = ("bfloat16", "bfloat16", "float16")
REDUCE_DTYPES = ("", "float32", "float32", "bfloat16", "float16")


@Cases
def mixed_cases(draw: Draw, space: Space) -> MixedCase:
    """Draws cases with float32 parameters, and the dtypes of NARROW that the space has, or all if it has none.

    Three in four cases train. In every case some parameter needs a gradient. Shrinks to one forward and backward of one
    row; both the computation and the reduction of gradients then use the first narrower dtype.
    """
    fields = _pick_data_parallel(draw, Space(space.world_sizes, ("float32",)), "fsdp2", "", ("",))
    narrow = [dtype for dtype in NARROW if dtype in space.dtypes] or NARROW
    param_dtype = pick(draw, "param_dtype", [dtype for dtype in PARAM_DTYPES if dtype in narrow])
    casts_inputs = pick(draw, "casts_inputs", (True, True, False))
    output_dtype = pick(draw, "output_dtype", ("", "float32", "float32", "as parameters"))
    if output_dtype == "as parameters" or (output_dtype and not casts_inputs):
        output_dtype = param_dtype
    return MixedCase(
        **fields,
        param_dtype=param_dtype,
        reduce_dtype=pick(
            draw, "reduce_dtype", [dtype for dtype in REDUCE_DTYPES if dtype in ("", "float32", *narrow)]
        ),
        output_dtype=output_dtype,
        casts_inputs=casts_inputs,
    )
