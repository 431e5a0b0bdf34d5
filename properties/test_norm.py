"""Claims about torch's sequence-parallel style on nn.LayerNorm and nn.RMSNorm.

A failure here means that a sharded sequence is normalized in another way. Look first at the gradients of the
parameters, which are sums over all ranks' tokens.
"""

from __future__ import annotations

from functools import partial

from equivtest.base import limits
from equivtest.families.norm.case import NormCase
from equivtest.families.norm.strategy import norm_cases
from equivtest.property import Property
from equivtest.verdicts.claims import repeats_itself, uses_only_collectives
from equivtest.verdicts.judging import DEFAULT_CLAIMS

SOURCE = "torch/distributed/tensor/parallel/style.py, class SequenceParallel (2.13.0)"
ON_OWN_TOKENS = "each rank norms its own tokens, and answers its operand of the sum that the gradient is"
CLAIMS = (*DEFAULT_CLAIMS, repeats_itself, uses_only_collectives)


def on_all_ranks(norm: str, parameters: tuple[str, ...]) -> tuple[NormCase, ...]:
    """Returns cases in every dtype whose sequences are sharded evenly, unevenly, and with an empty shard."""
    return tuple(
        NormCase(
            world_size=world_size, dtype=dtype, norm=norm, leading=(1, length), sequence_dim=1, features=16,
            x_is_dtensor=True, parameters=parameters, requires_grad=("x", *parameters),
            values=(("real", 0), ("real", 1), ("real", 2)),
        )
        for world_size in (2, 3, 4)
        for dtype in limits.DTYPES
        for length in (world_size, 2 * world_size - 1, world_size + 1 if world_size > 2 else 1)
    )  # fmt: skip


sequence_layer_norm = Property(
    subject="sequence_layer_norm",
    statement="SequenceParallel(nn.LayerNorm) computes what the unsharded nn.LayerNorm computes.",
    source=SOURCE,
    cases=partial(norm_cases, norm="layer_norm"),
    claims=CLAIMS,
    examples=(
        *on_all_ranks("layer_norm", ("weight", "bias")),
        # A sequence of 5 over four ranks: 2, 2, 1 and 0 tokens.
        NormCase(world_size=4, norm="layer_norm", leading=(2, 5), sequence_dim=1, features=8, x_is_dtensor=True,
                 parameters=("weight", "bias"), requires_grad=("x", "weight", "bias"), records=True),
    ),
    weight=2,
    without_collectives=ON_OWN_TOKENS,
)  # fmt: skip

sequence_rms_norm = Property(
    subject="sequence_rms_norm",
    statement="SequenceParallel(nn.RMSNorm) computes what the unsharded nn.RMSNorm computes.",
    source=SOURCE,
    cases=partial(norm_cases, norm="rms_norm"),
    claims=CLAIMS,
    examples=(
        *on_all_ranks("rms_norm", ("weight",)),
        NormCase(world_size=4, norm="rms_norm", leading=(2, 5), sequence_dim=1, features=8, x_is_dtensor=True,
                 parameters=("weight",), requires_grad=("x", "weight"), records=True),
    ),
    weight=2,
    without_collectives=ON_OWN_TOKENS,
)  # fmt: skip
