"""Claims about cross entropies of logits that are sharded by class, with torch's loss_parallel and without it.

A failure here means that a model is trained on another loss. Look first at the rows of logits whose maximum, or target,
is on another rank, then at ignored positions.
"""

from __future__ import annotations

from equivtest.base import limits
from equivtest.families.cross_entropy.case import CrossEntropyCase
from equivtest.families.cross_entropy.gathered.case import GatheredCrossEntropyCase
from equivtest.families.cross_entropy.strategy import (
    cross_entropy_cases,
    gathered_cross_entropy_cases,
    refused_cross_entropy_cases,
    refused_gathered_cross_entropy_cases,
)
from equivtest.property import Property
from equivtest.verdicts.claims import refuses, repeats_itself, uses_only_collectives
from equivtest.verdicts.judging import DEFAULT_CLAIMS

SOURCE = "torch/distributed/tensor/parallel/loss.py, loss_parallel (2.13.0)"
ALL_MODES = (("real", 0), ("peaked", 1), ("real", 2), ("peaked", 3), ("real", 4))

parallel_cross_entropy = Property(
    subject="parallel_cross_entropy",
    statement="Within loss_parallel, F.cross_entropy of logits sharded by class equals that of whole logits.",
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
        # The weight of a target that does not count is no part of the mean's divisor.  The gradient raises.
        CrossEntropyCase(world_size=2, positions=(6,), num_classes=5, reduction="mean", weighted=True, ignored="some",
                         requires_grad=(), values=(("real", 0),)),
        # 4096 classes: a sum of exponentials long enough for its roundings to show.
        CrossEntropyCase(world_size=2, positions=(3,), num_classes=4096, reduction="sum", weighted=True),
    ),
    weight=3,
    conclusive_shards=("even", "uneven"),
)  # fmt: skip

parallel_cross_entropy_refuses = Property(
    subject="parallel_cross_entropy",
    statement="Every rank refuses targets, weights, layouts and options that loss_parallel does not support.",
    source=f"{SOURCE}, its docstring; torch.nn.functional.cross_entropy",
    cases=refused_cross_entropy_cases,
    claims=(refuses,),
)

GATHERED = "torch/distributed/tensor/_ops/_math_ops.py, softmax_strategy and nll_loss_forward_strategy (2.13.0)"

dtensor_cross_entropy = Property(
    subject="dtensor_cross_entropy",
    statement="F.cross_entropy of DTensors sharded by class or by position equals F.cross_entropy of whole logits.",
    source=GATHERED,
    cases=gathered_cross_entropy_cases,
    claims=(*DEFAULT_CLAIMS, repeats_itself, uses_only_collectives),
    examples=(
        # Vocabularies that are sharded unevenly, or with empty shards.
        *(
            GatheredCrossEntropyCase(
                world_size=world_size, dtype=dtype, positions=(3,), num_classes=num_classes, reduction="mean",
                ignored="some", label_smoothing=0.125, values=ALL_MODES, records=True,
            )
            for world_size in (2, 3, 4)
            for dtype in limits.DTYPES
            for num_classes in (33, 8 * world_size, world_size + 1 if world_size > 2 else 1)
        ),
        GatheredCrossEntropyCase(world_size=2, positions=(2, 2, 3), num_classes=5, weighted=True, reduction="sum",
                                 weight_is_dtensor=True, label_smoothing=0.1, ignored="some"),
    ),
    weight=2,
)  # fmt: skip

dtensor_cross_entropy_refuses = Property(
    subject="dtensor_cross_entropy",
    statement="Every rank refuses plain targets and weights, targets that are no class, and means over uneven shards.",
    source=f"{GATHERED}; torch/distributed/tensor/_dispatch.py: mixed torch.Tensor and DTensor",
    cases=refused_gathered_cross_entropy_cases,
    claims=(refuses,),
)
