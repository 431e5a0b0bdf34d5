"""Claims about sequence parallelism of a perceptron: one forward and backward, and training.

A failure here means that a model trained in parallel differs from the unsharded model. Look first at the tensors
captured from the layers, which show the wrong collective or layer.
"""

from __future__ import annotations

from typing import Any

from equivtest.base import limits
from equivtest.families.training.sequence.case import MlpCase
from equivtest.families.training.strategy import mlp_cases, training_cases
from equivtest.property import Property
from equivtest.verdicts.claims import repeats_itself, trains_like_unsharded, uses_only_collectives
from equivtest.verdicts.judging import DEFAULT_CLAIMS

SOURCE = (
    "torch/distributed/tensor/parallel/style.py, classes ColwiseParallel and RowwiseParallel, put together "
    "as in torch's tensor parallel tutorial (2.13.0)"
)
CLAIMS = (*DEFAULT_CLAIMS, repeats_itself, uses_only_collectives)
BOTH = ("in_proj", "out_proj")
DTYPES = sorted(limits.DTYPES, key=lambda dtype: dtype not in ("float32", "bfloat16"))
ALL = ("x", "in_proj.weight", "in_proj.bias", "out_proj.weight", "out_proj.bias")

# Three ranks share a sequence of 12 evenly and 32 hidden features as 11, 11 and 10.
UNEVEN = MlpCase(world_size=3, leading=(4, 12), sequence_dim=1, in_features=10, hidden_features=32, out_features=5,
                 biases=BOTH, use_local_output=False, requires_grad=ALL, records=True,
                 values=(("dense", 0), ("wide-x", 1), ("wide-out", 2), ("real", 3)))  # fmt: skip

# The same as users write it, with the default that loses the uneven size: torch 2.13 refuses it.
UNEVEN_BY_DEFAULT = MlpCase(world_size=3, leading=(4, 12), sequence_dim=1, in_features=10, hidden_features=32,
                            out_features=5, biases=BOTH, requires_grad=ALL)  # fmt: skip


def on_four_ranks(**fields: Any) -> tuple[MlpCase, ...]:
    """Returns cases in every dtype, with sizes that four ranks shard evenly and unevenly.

    The first four, in float32 and bfloat16, are examples; the others are for required cells. Drawn cases are seldom
    even.
    """
    return tuple(
        MlpCase(
            world_size=4, dtype=dtype, leading=(size,), in_features=4, hidden_features=size, out_features=4,
            x_is_dtensor=True, use_local_output=False, values=(("dense", 0), ("real", 1)), **fields,
        )
        for dtype in DTYPES
        for size in (8, 7)
    )  # fmt: skip


sequence_parallel_mlp = Property(
    subject="sequence_parallel_mlp",
    statement="A sequence-parallel perceptron computes what the unsharded one computes, forward and backward.",
    source=SOURCE,
    cases=mlp_cases,
    claims=CLAIMS,
    examples=(UNEVEN, UNEVEN_BY_DEFAULT, *on_four_ranks()[:4]),
    for_cells=on_four_ranks()[4:],
    weight=3,
)

sequence_parallel_mlp_trains = Property(
    subject="sequence_parallel_mlp",
    statement="A sequence-parallel perceptron trains as the unsharded one does, step by step.",
    source=f"{SOURCE}; torch/optim/sgd.py and adamw.py (2.13.0)",
    cases=training_cases,
    claims=(*CLAIMS, trains_like_unsharded),
    examples=(
        # torch's sequence parallel example: 20 tokens a rank, AdamW with a learning rate of 0.25, ten iterations.
        MlpCase(world_size=2, leading=(40,), in_features=10, hidden_features=32, out_features=5, biases=BOTH,
                requires_grad=ALL[1:], optimizer="adamw", steps=10, lr=0.25, weight_decay=0.01, foreach=True,
                values=(("real", 0),)),
        MlpCase(world_size=3, leading=(60,), in_features=10, hidden_features=32, out_features=5, biases=BOTH,
                use_local_output=False, requires_grad=ALL[1:], optimizer="adamw", steps=10, lr=0.25,
                weight_decay=0.01, foreach=True, values=(("real", 0),)),
        *on_four_ranks(optimizer="sgd", steps=2)[:4],
    ),
    for_cells=on_four_ranks(optimizer="sgd", steps=2)[4:],
    weight=2,
)  # fmt: skip
