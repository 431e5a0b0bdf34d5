"""Defects of a perceptron under sequence parallelism."""

from __future__ import annotations

from equivtest.families.training.sequence.case import MlpCase
from equivtest.kit.defect import Defect

_HERE = "equivtest.families.training.sequence.defects:"

DEFECTS = (
    Defect(
        _HERE + "stale_parameters",
        "sequence_parallel_mlp",
        "state across steps",
        "trains_like_unsharded",
        "value",
        MlpCase(world_size=1, requires_grad=("in_proj.weight",), optimizer="sgd", steps=2),
        "one weight, updated once, tells from the second step on",
    ),
    Defect(
        _HERE + "momentum_not_carried",
        "sequence_parallel_mlp",
        "state across steps",
        "trains_like_unsharded",
        "value",
        MlpCase(world_size=1, requires_grad=("in_proj.weight",), optimizer="sgd", steps=2, momentum=0.5),
        "the first update needs no momentum, so that two are needed",
    ),
    Defect(
        _HERE + "bias_without_weight_decay",
        "sequence_parallel_mlp",
        "flags",
        "trains_like_unsharded",
        "value",
        MlpCase(
            world_size=1,
            biases=("out_proj",),
            requires_grad=("out_proj.bias",),
            optimizer="sgd",
            steps=2,
            weight_decay=0.25,
        ),
        "one rank, one feature and one decayed bias suffice; training takes two steps at least",
    ),
    Defect(
        _HERE + "activation_on_partial_sum",
        "sequence_parallel_mlp",
        "a partial value taken for the whole",
        "equals_unsharded",
        "value",
        MlpCase(world_size=1, leading=(2,), requires_grad=()),
        "of two tokens of opposite sign one is not activated, whatever the sign of out_proj's weight",
    ),
    Defect(
        _HERE + "bias_gradient_of_own_tokens",
        "sequence_parallel_mlp",
        "a reduction missing in the backward",
        "gradients_equal_unsharded",
        "value",
        MlpCase(
            world_size=2,
            biases=("out_proj",),
            x_is_dtensor=True,
            use_local_output=False,
            requires_grad=("out_proj.bias",),
        ),
        "the second rank holds no token, so that its share of the gradient is zero",
    ),
    Defect(
        _HERE + "output_shards_swapped",
        "sequence_parallel_mlp",
        "shard order",
        "equals_unsharded",
        "value",
        MlpCase(world_size=2, leading=(2,), use_local_output=False, requires_grad=()),
        "two ranks need one token each",
    ),
)
