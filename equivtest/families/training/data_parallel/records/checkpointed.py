"""Defects of activation checkpointing."""

from __future__ import annotations

from equivtest.families.training.data_parallel.case import DataParallelCase
from equivtest.kit.defect import Defect

_HERE = "equivtest.families.training.data_parallel.defects.checkpointed:"
_WEIGHTS = ("in_proj.weight", "out_proj.weight")

DEFECTS = (
    Defect(
        _HERE + "parameters_left_out_of_the_recomputation",
        "fsdp2_mlp",
        "flags",
        "gradients_equal_unsharded",
        "shape",
        DataParallelCase(world_size=1, style="fsdp2", checkpointed="in_proj", requires_grad=_WEIGHTS),
        "one rank; x needs no gradient, the layer's weight does, and another one lets the backward begin",
    ),
    Defect(
        _HERE + "recomputed_with_the_parameters_of_step_1",
        "zero3_mlp_all_gather",
        "state across steps",
        "trains_like_unsharded",
        "value",
        DataParallelCase(
            world_size=1,
            style="zero3",
            fetch="all_gather",
            checkpointed="hidden",
            requires_grad=("in_proj.weight",),
            optimizer="sgd",
            steps=2,
        ),
        "one weight, updated once, is another one from the second step on",
    ),
    Defect(
        _HERE + "whole_kept_after_the_recomputation",
        "zero3_mlp_all_gather",
        "other collectives than documented",
        "uses_only_collectives",
        "collectives",
        DataParallelCase(
            world_size=1,
            style="zero3",
            fetch="all_gather",
            checkpointed="hidden",
            requires_grad=("in_proj.weight",),
            records=True,
        ),
        "one rank fetches as others do; one fetch in the backward is missing",
    ),
)
