"""Claims about PrepareModuleInput and PrepareModuleOutput, which redistribute a module's inputs and outputs.

A failure here means that a module gets, or returns, another tensor. Look first at uneven shards: from a plain tensor
with an uneven shard, torch cannot know the global size.
"""

from __future__ import annotations

from equivtest.families.redistribute.prepared.case import PreparedCase
from equivtest.families.redistribute.prepared.strategy import prepared_cases
from equivtest.property import Property
from equivtest.verdicts.claims import is_exact_without_reduction, repeats_itself, uses_only_collectives
from equivtest.verdicts.judging import DEFAULT_CLAIMS

prepared_module = Property(
    subject="prepared_module",
    statement="PrepareModuleInput, PrepareModuleOutput and both change a tensor's placements and nothing else.",
    source="torch/distributed/tensor/parallel/style.py, classes PrepareModuleInput, PrepareModuleOutput and "
    "PrepareModuleInputOutput (2.13.0)",
    cases=prepared_cases,
    claims=(*DEFAULT_CLAIMS, is_exact_without_reduction, repeats_itself, uses_only_collectives),
    examples=(
        # An attention block under sequence parallelism: x is gathered before it and sharded again after it.
        PreparedCase(world_size=2, shape=(2, 6, 4), source=("shard(1)",), target=("shard(1)",), style="input_output",
                     use_local_output=True, values=(("dense", 0), ("special", 1), ("index", 2)), records=True),
        PreparedCase(world_size=4, shape=(5, 3), source=("shard(0)",), target=("shard(1)",), x_is_dtensor=True,
                     values=(("dense", 0), ("special", 1), ("index", 2))),
    ),
    weight=2,
)  # fmt: skip
