"""Claims about pipelines, in which each rank has some layers of a module.

A failure here means that a pipeline trains another module than the unsharded one. Look first at the micro-batch whose
gradients a stage adds up twice, or not at all.
"""

from __future__ import annotations

from typing import Any

from equivtest.module import module_property
from equivtest.programs.examples.pipeline import NUM_FEATURES
from equivtest.programs.inputs import real

PIPELINE = "equivtest.programs.examples.pipeline"

SCHEDULES = ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")

# The schedules of torch with both kinds of loss.  In 16 bits the bounds are too wide for a conclusion.
pipelined_step = module_property(
    f"{PIPELINE}:chain",
    f"{PIPELINE}_plan:pipelined",
    inputs={"x": real(("batch", NUM_FEATURES)), "weights": real(("batch", NUM_FEATURES))},
    sizes={"batch": (16, 32)},
    batch="whole",
    options={
        "takes_mean": (True, False),
        "infers": (False, True),
        "evaluates": (False, True),
        "schedule": SCHEDULES,
    },
    optimizer="equivtest.programs.examples.mixture:sgd",
    step=f"{PIPELINE}_plan:scheduled",
    world_sizes=(2, 4),
    conclusive_dtypes=("float32", "float64"),
)

OF_MANY_ROWS: dict[str, Any] = {
    "inputs": {"x": real(("batch", 2, NUM_FEATURES)), "weights": real(("batch", 2, NUM_FEATURES))},
    "sizes": {"batch": (16,)},
    "axes": ("pp", "dp"),
    "batch_axis": "dp",
    "batch": "parts of the whole",
    "optimizer": "equivtest.programs.examples.mixture:sgd",
    "step": f"{PIPELINE}_plan:sharded_scheduled",
    "world_sizes": (2, 4),
    "conclusive_dtypes": ("float64",),
}
"""Arguments of a pipeline along one axis of a mesh, with other rows for each rank of the other axis."""

# Each stage is sharded or replicated. Ranks have different rows. The dim of the rows, and who divides the loss, change.
sharded_pipelined_step = module_property(
    f"{PIPELINE}:mean_chain",
    f"{PIPELINE}_plan:sharded_pipelined",
    options={
        "counts": (False, True),
        "dim": (0, 1),
        "data": ("recomputed", "layers", "replicas"),
        "schedule": ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"),
    },
    **OF_MANY_ROWS,
)

# Each stage is replicated by DDP, and may take a keyword, or a second tensor from the stage before.  These schedules do
# not split the backward, as DDP needs.
replicated_pipelined_step = module_property(
    f"{PIPELINE}:mean_chain",
    f"{PIPELINE}_plan:replicated_pipelined",
    options={
        "receives": ("", "inferred", "late"),
        "adds_weights": (False, True),
        "dim": (0, 1),
        "schedule": ("GPipe", "1F1B", "Interleaved1F1B"),
    },
    **OF_MANY_ROWS,
)
