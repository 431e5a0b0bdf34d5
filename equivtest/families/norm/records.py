"""Defects of norms."""

from __future__ import annotations

from equivtest.families.norm.case import NormCase
from equivtest.kit.defect import Defect

_HERE = "equivtest.families.norm.defects:"

DEFECTS = (
    Defect(
        _HERE + "gradient_of_own_tokens",
        "sequence_layer_norm",
        "a reduction missing in the backward",
        "gradients_equal_unsharded",
        "value",
        NormCase(
            world_size=2,
            norm="layer_norm",
            leading=(2,),
            parameters=("weight", "bias"),
            requires_grad=("bias",),
        ),
        "two ranks need one token each, since torch gathers a shorter sequence",
    ),
    Defect(
        _HERE + "eps_outside_the_root",
        "sequence_rms_norm",
        "eps at another place",
        "equals_unsharded",
        "value",
        NormCase(world_size=1, norm="rms_norm", requires_grad=(), values=(("real", 1),)),
        "of mean square q, values are off by eps / sqrt(q) of themselves, by right by eps / 2 q: the same at a quarter",
    ),
    Defect(
        _HERE + "moments_of_a_feature",
        "sequence_rms_norm",
        "another dim",
        "equals_unsharded",
        "value",
        NormCase(world_size=1, norm="rms_norm", requires_grad=()),
        "of a single token each feature would become a sign",
    ),
)
