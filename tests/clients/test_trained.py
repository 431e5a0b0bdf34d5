"""Whole steps of real trainers, on tokens that ranks and micro-batches do not share evenly."""

from __future__ import annotations

from dataclasses import replace

from equivtest import ids, module_property, targets
from equivtest.property import Property

HERE = "tests.clients.trained:"


def trained(build: str, step: str, rows: tuple[int, ...] = (8, 5)) -> Property:
    """Two updates of two micro-batches each."""
    found = module_property(
        HERE + build,
        HERE + "handed_over",
        inputs={"input_ids": ids(8, ("batch", "seq")), "labels": targets(8, ("batch", "seq"))},
        sizes={"batch": rows, "seq": (3,)},
        outputs=("loss",),
        batch="parts of the whole",
        optimizer=HERE + "adamw",
        step=step if ":" in step else HERE + step,
        micro_batches=2,
        max_norm=0.5,
        needs_world=True,
    )
    return replace(found, requires="transformers")


trainer_step = trained("plain", "trainer_step")
trainer_step_smoothed = trained("smoothed", "smoothing_trainer_step")
accelerated_step = trained("plain", "accelerated_step")
# Equally large micro-batches: the mean of their auxiliary losses is the whole batch's.
trainer_step_balanced = trained("balanced", "trainer_step", rows=(24,))


SHARDED = "tests.clients.sharded:"
accelerated_fsdp2_step = trained("plain", SHARDED + "accelerated_step")
trainer_fsdp2_step = trained("plain", SHARDED + "trainer_step")
