"""Defects of data parallelism on a mesh of two axes."""

from __future__ import annotations

from equivtest.families.training.two_axes.case import TwoAxisCase
from equivtest.kit.defect import Defect

_HERE = "equivtest.families.training.two_axes.defects:"

DEFECTS = (
    Defect(
        _HERE + "averaged_over_every_rank",
        "fsdp2_tp_mlp",
        "wrong divisor or wrong group",
        "gradients_equal_unsharded",
        "value",
        TwoAxisCase(
            world_size=2, mesh=(1, 2), hidden_features=2, biases=("out_proj",), requires_grad=("out_proj.bias",)
        ),
        "two ranks of one row, whose gradient is no average; each has a hidden feature, as torch needs it",
    ),
    Defect(
        _HERE + "strided_shards_taken_for_plain_ones",
        "fsdp2_tp_mlp",
        "shard order",
        "equals_unsharded",
        "value",
        TwoAxisCase(world_size=4, mesh=(2, 2), hidden_features=4, requires_grad=("out_proj.weight",)),
        "four ranks need one hidden feature each for two of them to be at each other's place",
    ),
    Defect(
        _HERE + "replicas_not_reduced",
        "hsdp_mlp",
        "a reduction missing in the backward",
        "gradients_equal_unsharded",
        "value",
        TwoAxisCase(world_size=2, mesh=(2, 1), style="hsdp", biases=("out_proj",), requires_grad=("out_proj.bias",)),
        "two replicas, each with a row of its own",
    ),
    Defect(
        _HERE + "released_all_the_same",
        "hsdp_mlp",
        "other collectives than documented",
        "uses_only_collectives",
        "collectives",
        TwoAxisCase(
            world_size=2, mesh=(1, 2), style="hsdp", reshards=False, requires_grad=("out_proj.weight",), records=True
        ),
        "two ranks share each parameter; one rank gathers nothing",
    ),
    Defect(
        _HERE + "reduced_in_every_micro_batch",
        "fsdp2_tp_mlp",
        "other collectives than documented",
        "uses_only_collectives",
        "collectives",
        TwoAxisCase(world_size=2, mesh=(2, 1), micro_batches=2, requires_grad=("out_proj.weight",), records=True),
        "two ranks share each parameter, and the first of two micro-batches reduces nothing",
    ),
    Defect(
        _HERE + "layers_gathered_at_once",
        "fsdp2_tp_mlp",
        "other collectives than documented",
        "uses_only_collectives",
        "collectives",
        TwoAxisCase(world_size=2, mesh=(2, 1), requires_grad=("out_proj.weight",), records=True),
        "two ranks share each parameter; one rank gathers nothing",
    ),
    Defect(
        _HERE + "output_scattered_and_gathered",
        "fsdp2_tp_mlp",
        "other collectives than documented",
        "uses_only_collectives",
        "collectives",
        TwoAxisCase(world_size=2, mesh=(1, 2), hidden_features=2, requires_grad=("out_proj.weight",), records=True),
        "two ranks of a row, each with a hidden feature, as torch needs it",
    ),
    Defect(
        _HERE + "input_sent_along_the_row",
        "fsdp2_tp_mlp",
        "other collectives than documented",
        "uses_only_collectives",
        "collectives",
        TwoAxisCase(world_size=1, requires_grad=("out_proj.weight",), records=True),
        "a row of one rank sends too",
    ),
)
