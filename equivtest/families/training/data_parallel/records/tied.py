"""Defects of weights that two layers have."""

from __future__ import annotations

from equivtest.families.training.data_parallel.case import DataParallelCase
from equivtest.kit.defect import Defect

_HERE = "equivtest.families.training.data_parallel.defects.tied:"


def _trained(style: str) -> DataParallelCase:
    return DataParallelCase(
        world_size=1, style=style, tied="same", requires_grad=("in_proj.weight",), optimizer="sgd", steps=2
    )


DEFECTS = (
    Defect(
        _HERE + "gradient_of_the_second_use_lost",
        "ddp_mlp",
        "a term missing",
        "gradients_equal_unsharded",
        "value",
        DataParallelCase(world_size=1, tied="same", requires_grad=("in_proj.weight",)),
        "one weight of one element; no cotangent is zero, and the hidden activation is not",
    ),
    Defect(
        _HERE + "updated_once_per_place",
        "fsdp2_mlp",
        "state across steps",
        "trains_like_unsharded",
        "value",
        _trained("fsdp2"),
        "one weight of one element, updated twice from the gradient of one step",
    ),
    Defect(
        _HERE + "partitioned_once_per_place",
        "zero3_mlp_all_gather",
        "a copy left behind",
        "trains_like_unsharded",
        "value",
        _trained("zero3"),
        "one weight of one element: its second place is as it was after the first update",
    ),
    Defect(
        _HERE + "copied_once_per_place",
        "zero3_mlp_all_reduce",
        "memory kept",
        "equals_unsharded",
        "value",
        DataParallelCase(world_size=1, style="zero3", tied="same", requires_grad=("in_proj.weight",)),
        "two storages are two, whatever is in them",
    ),
    Defect(
        _HERE + "fetched_once_per_place",
        "zero3_mlp_all_gather",
        "other collectives than documented",
        "uses_only_collectives",
        "collectives",
        DataParallelCase(
            world_size=1,
            style="zero3",
            fetch="all_gather",
            records=True,
            tied="same",
            requires_grad=("in_proj.weight",),
        ),
        "one weight, fetched forward and backward, each time once more than needed",
    ),
)
