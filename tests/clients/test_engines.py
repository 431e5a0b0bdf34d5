"""Whole steps of DeepSpeed's engine in each stage, on tokens that ranks and micro-batches do not share evenly."""

from __future__ import annotations

from dataclasses import replace

from equivtest import ids, module_property, targets
from equivtest.property import Property
from tests.clients.engines import MAX_NORM

HERE = "tests.clients.engines:"


def trained(stage: int) -> Property:
    """Two updates of two micro-batches each."""
    found = module_property(
        HERE + "twice",
        HERE + "handed_over",
        inputs={"input_ids": ids(8, ("batch", "seq")), "labels": targets(8, ("batch", "seq"))},
        sizes={"batch": (8, 5), "seq": (3,)},
        batch="parts of the whole",
        optimizer=HERE + "adamw",
        step=f"{HERE}stage_{stage}_step",
        micro_batches=2,
        max_norm=MAX_NORM if stage else 0.0,
        placed=HERE + "held",
        needs_world=True,
    )
    return replace(found, requires="deepspeed")


engine_step_of_stage_0 = trained(0)
engine_step_of_stage_1 = trained(1)
engine_step_of_stage_2 = trained(2)
engine_step_of_stage_3 = trained(3)
