"""Claims about torch's loss_parallel.

A failure here means that a model is trained on another loss: look first at the rows of logits whose
maximum, or target, lies on another rank, then at positions that are to be ignored.
"""

from __future__ import annotations

from equivtest import limits
from equivtest.cases.cross_entropy import CrossEntropyCase
from equivtest.cases.strategies import cross_entropy_cases, refused_cross_entropy_cases
from equivtest.check import DEFAULT_CLAIMS
from equivtest.property import Property
from equivtest.verdicts.claims import refuses, repeats_itself, uses_only_collectives

SOURCE = "torch/distributed/tensor/parallel/loss.py, loss_parallel (2.13.0)"
ALL_MODES = (("real", 0), ("peaked", 1), ("real", 2), ("peaked", 3), ("real", 4))

parallel_cross_entropy = Property(
    subject="parallel_cross_entropy",
    statement="F.cross_entropy within loss_parallel, of logits divided by class, is that of the whole logits.",
    source=SOURCE,
    cases=cross_entropy_cases,
    claims=(*DEFAULT_CLAIMS, repeats_itself, uses_only_collectives),
    examples=(
        # A language model's use: (tokens, vocabulary), the mean over the tokens that are not padding.
        *(
            CrossEntropyCase(
                world_size=world_size, dtype=dtype, positions=(12,), num_classes=33, reduction=reduction,
                ignored=ignored, values=ALL_MODES, records=True,
            )
            for world_size in (2, 3, 4)
            for dtype in limits.DTYPES
            for reduction, ignored in (("mean", "some"), ("none", "none"))
        ),
        # 4096 classes: a sum of exponentials long enough for its roundings to show.
        CrossEntropyCase(world_size=2, positions=(3,), num_classes=4096, reduction="sum", weighted=True),
    ),
    weight=3,
    conclusive_shards=("even", "uneven"),
)  # fmt: skip

parallel_cross_entropy_refuses = Property(
    subject="parallel_cross_entropy",
    statement="Targets, weights, layouts and options that loss_parallel does not take are refused on every rank alike.",
    source=f"{SOURCE}, its docstring; torch.nn.functional.cross_entropy",
    cases=refused_cross_entropy_cases,
    claims=(refuses,),
)
