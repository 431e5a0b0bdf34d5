"""Defects of clipping by the norm of all gradients."""

from __future__ import annotations

from equivtest.families.training.data_parallel.case import DataParallelCase
from equivtest.families.training.two_axes.case import TwoAxisCase
from equivtest.kit.defect import Defect

_HERE = "equivtest.families.training.data_parallel.defects.clipping:"

DEFECTS = (
    Defect(
        _HERE + "clipped_by_local_norm",
        "zero3_mlp_all_gather",
        "a partial value taken for the whole",
        "trains_like_unsharded",
        "value",
        DataParallelCase(
            world_size=2, style="zero3", requires_grad=("out_proj.weight",), optimizer="sgd", steps=2, clip_norm=1.0
        ),
        "one rank's norm is that of all; of two, the second holds nothing of one element",
    ),
    Defect(
        _HERE + "clipped_without_root",
        "zero3_mlp_all_reduce",
        "wrong divisor or wrong group",
        "trains_like_unsharded",
        "value",
        DataParallelCase(
            world_size=1, style="zero3", requires_grad=("out_proj.weight",), optimizer="sgd", steps=2, clip_norm=1.0
        ),
        "the gradient of one weight is 4 or more, clipped to 1; its square divides by 16",
    ),
    Defect(
        _HERE + "clipped_after_the_update",
        "ddp_mlp",
        "state across steps",
        "trains_like_unsharded",
        "value",
        DataParallelCase(world_size=1, requires_grad=("out_proj.weight",), optimizer="sgd", steps=2, clip_norm=1.0),
        "one rank and one weight whose gradient is more than 1",
    ),
    Defect(
        _HERE + "scaled_up_to_the_norm",
        "ddp_mlp",
        "a term missing",
        "trains_like_unsharded",
        "value",
        DataParallelCase(world_size=1, requires_grad=("out_proj.weight",), optimizer="sgd", steps=2, clip_norm=16.0),
        "one rank and one weight whose gradient is less than 16",
    ),
    Defect(
        _HERE + "replicas_counted_in_the_norm",
        "hsdp_mlp",
        "a partial value taken for the whole",
        "trains_like_unsharded",
        "value",
        TwoAxisCase(
            world_size=4,
            mesh=(2, 2),
            style="hsdp",
            requires_grad=("out_proj.weight",),
            optimizer="sgd",
            steps=2,
            clip_norm=1.0,
        ),
        "a weight of one element that two ranks hold alike; two would do, but such a mesh is seldom drawn",
    ),
)
