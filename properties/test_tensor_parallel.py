"""Claims about torch's tensor-parallel styles on nn.Linear.

A failure here means that a parallelized layer no longer computes the same as the layer. Look first at the style's input
and output preparation, then at DTensor's sharding propagation.
"""

from __future__ import annotations

from functools import partial

from equivtest.families.linear.case import LinearCase
from equivtest.families.linear.strategy import linear_cases, refused_linear_cases
from equivtest.property import Property
from equivtest.verdicts.claims import (
    is_the_identity_for_one_rank,
    refuses,
    repeats_itself,
    uses_only_collectives,
)
from equivtest.verdicts.judging import DEFAULT_CLAIMS

COLWISE = "torch/distributed/tensor/parallel/style.py, class ColwiseParallel (2.13.0)"
ROWWISE = "torch/distributed/tensor/parallel/style.py, class RowwiseParallel (2.13.0)"
MANY_ELEMENTS = tuple((world_size, dtype) for world_size in (2, 3, 4) for dtype in ("bfloat16", "float16"))
"""(world size, dtype) of cases with enough elements to show errors of an all_reduce that prefer one sign."""

CLAIMS = (*DEFAULT_CLAIMS, is_the_identity_for_one_rank, repeats_itself, uses_only_collectives)

colwise_linear = Property(
    subject="colwise_linear",
    statement="ColwiseParallel(nn.Linear) computes what the unsharded nn.Linear computes.",
    source=COLWISE,
    cases=partial(linear_cases, style="colwise"),
    claims=CLAIMS,
    examples=(
        # Shards of 2, 2 and 1: torch's own tests use sizes that the world size divides.
        LinearCase(world_size=3, style="colwise", leading=(2,), in_features=3, out_features=5, bias=True,
                   requires_grad=("x", "weight", "bias"), values=(("dense", 0), ("wide-x", 1), ("wide-w", 2)),
                   records=True),
        # The gradient of x is reduced.
        *(LinearCase(world_size=world_size, dtype=dtype, style="colwise", leading=(40,), in_features=32,
                     out_features=32, requires_grad=("x",), values=(("real", 0), ("real", 1)))
          for world_size, dtype in MANY_ELEMENTS),
    ),
    weight=8,
)  # fmt: skip

rowwise_linear = Property(
    subject="rowwise_linear",
    statement="RowwiseParallel(nn.Linear) computes what the unsharded nn.Linear computes.",
    source=ROWWISE,
    cases=partial(linear_cases, style="rowwise"),
    claims=CLAIMS,
    examples=(
        # Five over four ranks gives shards of 2, 2, 1 and 0: the last rank is empty.
        LinearCase(world_size=4, style="rowwise", leading=(2,), in_features=5, out_features=3, bias=True,
                   requires_grad=("x", "weight", "bias"), values=(("dense", 0), ("wide-x", 1), ("wide-w", 2)),
                   records=True),
        # The output is reduced.
        *(LinearCase(world_size=world_size, dtype=dtype, style="rowwise", leading=(40,), in_features=32,
                     out_features=32, requires_grad=(), values=(("real", 0), ("real", 1)))
          for world_size, dtype in MANY_ELEMENTS),
    ),
    weight=8,
)  # fmt: skip

colwise_linear_refuses = Property(
    subject="colwise_linear",
    statement="Every rank of ColwiseParallel(nn.Linear) refuses an input that does not fit the weight.",
    source=COLWISE,
    cases=partial(refused_linear_cases, style="colwise"),
    claims=(refuses,),
)

rowwise_linear_refuses = Property(
    subject="rowwise_linear",
    statement="Every rank of RowwiseParallel(nn.Linear) refuses an input that does not fit the weight.",
    source=ROWWISE,
    cases=partial(refused_linear_cases, style="rowwise"),
    claims=(refuses,),
)
