"""Claims about torch.distributed.checkpoint, which loads a tensor under another placement than it was saved.

A failure here means that training goes on from other parameters than it stopped with.
"""

from __future__ import annotations

from equivtest.families.checkpoint.case import PLAIN, CheckpointCase
from equivtest.families.checkpoint.strategy import checkpoint_cases
from equivtest.property import Property
from equivtest.verdicts.claims import (
    agrees_on_all_ranks,
    does_not_touch_its_inputs,
    equals_unsharded,
    is_exact_without_reduction,
    repeats_itself,
)

ALL_MODES = (("dense", 0), ("index", 1), ("special", 2))

checkpoint = Property(
    subject="checkpoint",
    statement="Tensors that are saved under one placement and loaded under another are the same tensors.",
    source="torch/distributed/checkpoint/state_dict_saver.py, save and async_save; state_dict_loader.py, load (2.13.0)",
    cases=checkpoint_cases,
    claims=(
        equals_unsharded,
        agrees_on_all_ranks,
        does_not_touch_its_inputs,
        is_exact_without_reduction,
        repeats_itself,
    ),
    examples=(
        # Five rows over four ranks: 2, 2, 1 and none.
        CheckpointCase(world_size=4, shape=(5, 3), loaded="shard(1)", values=ALL_MODES),
        # Plain tensors that are views of one memory when a stager copies them.
        CheckpointCase(
            world_size=3, shape=(5, 3), saved=PLAIN, state="nested", saves="async", loads="converted", values=ALL_MODES
        ),
        # The group's first rank is process 2.
        CheckpointCase(
            world_size=2,
            members=(2, 1),
            shape=(5, 3),
            loaded=PLAIN,
            writer="two threads",
            state="nested",
            saves="async",
            values=ALL_MODES,
        ),
    ),
)
