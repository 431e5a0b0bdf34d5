"""Claims about FSDP2 and DistributedDataParallel with all their options; `make wrappers` judges them.

A failure here means that an argument or a method of a wrapper changes the result: each has its own branch of the
module, whose name says which.
"""

from __future__ import annotations

from equivtest.module import module_property, real
from equivtest.programs.examples.mixture import AXES
from equivtest.property import Property

HERE = "tests.wrappers."
TOLD, STEPS = f"{HERE}branches:", f"{HERE}branches_in_steps:"

# FSDP2 with all documented options, a branch of the module for each; some are divided by their twelve
# columns, which FSDP2 does evenly or not at all.
fsdp2_told = module_property(
    f"{TOLD}branches", f"{HERE}fsdp2:told", x_shapes=[(7, 2)], needs_world=True, world_sizes=(1, 2, 3, 4)
)


def told_in_steps(build: str, parallelize: str, step: str, *, axes: tuple[str, ...] = ()) -> Property:
    """Runs two steps of two micro-batches; between the steps the optimizer's state moves to another one."""
    return module_property(
        f"{STEPS}{build}",
        f"{HERE}steps:{parallelize}",
        inputs={"x": real(("batch", 2))},
        sizes={"batch": (8, 10, 12, 14)},  # three ranks have 3, 3 and 2 of 8 rows, each in two micro-batches
        optimizer=f"{STEPS}momentum",
        step=f"{HERE}steps:{step}",
        micro_batches=2,
        axes=axes,
    )


ddp_told = told_in_steps("replicated_branches", "replicated", "replicated_step")
fsdp2_told_in_steps = told_in_steps("sharded_branches", "sharded", "sharded_step")
hsdp_told_in_steps = told_in_steps("branches_both_ways", "both_ways", "sharded_step", axes=AXES)
