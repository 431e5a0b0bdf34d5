"""Claims about pipelines, in which each rank has some layers of a module.

A failure here means that a pipeline trains another module than the unsharded one. Look first at the micro-batch whose
gradients a stage adds up twice, or not at all.
"""

from __future__ import annotations

from equivtest.module import module_property
from equivtest.programs.examples.pipeline import NUM_FEATURES
from equivtest.programs.inputs import real

PIPELINE = "equivtest.programs.examples.pipeline"

# Five schedules of torch with both kinds of loss.  In 16 bits the bounds are too wide for a conclusion.
pipelined_step = module_property(
    f"{PIPELINE}:chain",
    f"{PIPELINE}_plan:pipelined",
    inputs={"x": real(("batch", NUM_FEATURES)), "weights": real(("batch", NUM_FEATURES))},
    sizes={"batch": (8, 16)},
    batch="whole",
    options={
        "takes_mean": (True, False),
        "infers": (False, True),
        "schedule": ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"),
    },
    optimizer="equivtest.programs.examples.mixture:sgd",
    step=f"{PIPELINE}_plan:scheduled",
    world_sizes=(2, 4),
    conclusive_dtypes=("float32", "float64"),
)
