"""Defects of data parallelism."""

from __future__ import annotations

from equivtest.families.training.data_parallel.case import DataParallelCase
from equivtest.families.training.data_parallel.case_refused import RefusedShardingCase
from equivtest.kit.defect import Defect

_HERE = "equivtest.families.training.data_parallel.defects.reductions:"

DEFECTS = (
    Defect(
        _HERE + "gradients_summed",
        "ddp_mlp",
        "wrong divisor or wrong group",
        "gradients_equal_unsharded",
        "value",
        DataParallelCase(world_size=2, biases=("out_proj",), requires_grad=("out_proj.bias",)),
        "one rank's sum is its average; of two it is twice that, and the sum of two cotangents is not zero",
    ),
    Defect(
        _HERE + "gradients_of_the_last_micro_batch",
        "fsdp2_mlp",
        "state across calls",
        "gradients_equal_unsharded",
        "value",
        DataParallelCase(
            world_size=1, style="fsdp2", biases=("out_proj",), requires_grad=("out_proj.bias",), micro_batches=2
        ),
        "two micro-batches are needed, one rank suffices; no cotangent is zero",
    ),
    Defect(
        _HERE + "columns_gathered_as_rows",
        "fsdp2_mlp",
        "another dim",
        "equals_unsharded",
        "value",
        DataParallelCase(
            world_size=2,
            style="fsdp2",
            by_columns=("out_proj.weight",),
            hidden_features=2,
            out_features=2,
            requires_grad=("out_proj.weight",),
        ),
        "two ranks have a column each; of a single row all orders are one",
    ),
    Defect(
        _HERE + "columns_scattered_as_rows",
        "fsdp2_mlp",
        "another dim",
        "gradients_equal_unsharded",
        "value",
        DataParallelCase(
            world_size=2,
            style="fsdp2",
            by_columns=("out_proj.weight",),
            hidden_features=2,
            out_features=2,
            requires_grad=("out_proj.weight",),
        ),
        "as of what is gathered",
    ),
    Defect(
        _HERE + "uneven_columns_sharded_by_rows",
        "fsdp2_mlp",
        "misfits accepted",
        "refuses",
        "not_refused",
        RefusedShardingCase(world_size=2, misfit="uneven"),
        "two ranks, one column",
    ),
    Defect(
        _HERE + "frozen_parameter_decayed",
        "zero3_mlp_all_reduce",
        "flags",
        "trains_like_unsharded",
        "value",
        DataParallelCase(
            world_size=1,
            style="zero3",
            requires_grad=("out_proj.weight",),
            optimizer="sgd",
            steps=2,
            weight_decay=0.25,
        ),
        "one frozen weight of one element; training takes two steps at least",
    ),
    Defect(
        _HERE + "unused_layer_updated",
        "zero3_mlp_all_gather",
        "flags",
        "trains_like_unsharded",
        "value",
        DataParallelCase(
            world_size=1,
            style="zero3",
            requires_grad=("in_proj.weight", "out_proj.weight"),
            optimizer="sgd",
            steps=2,
            weight_decay=0.25,
            stopped_steps=(2,),
        ),
        "one rank; a layer must have been used before it is not, and decays",
    ),
    Defect(
        _HERE + "norm_reads_padding",
        "zero3_mlp_all_reduce",
        "uninitialised memory reaches a value",
        "trains_like_unsharded",
        "value",
        DataParallelCase(world_size=2, style="zero3", requires_grad=("out_proj.weight",), optimizer="sgd", steps=2),
        "one rank pads nothing; of two, the second holds nothing but padding of one element",
    ),
    Defect(
        _HERE + "whole_kept_over_the_update",
        "zero3_mlp_all_gather",
        "state across steps",
        "trains_like_unsharded",
        "value",
        DataParallelCase(
            world_size=1,
            style="zero3",
            requires_grad=("out_proj.weight",),
            optimizer="sgd",
            steps=2,
            values=(("dense", 1),),
        ),
        "one weight, updated once, tells from the second step on, where the hidden feature is active then",
    ),
    Defect(
        _HERE + "rank_without_partition_left_out",
        "zero3_mlp_all_gather",
        "size not a multiple of the world size",
        "gradients_equal_unsharded",
        "value",
        DataParallelCase(world_size=2, style="zero3", requires_grad=("out_proj.weight",)),
        "of two ranks the second holds nothing of one element, and has a row of its own",
    ),
)
