"""Whole steps of DeepSpeed's engine in each stage, on tokens that ranks and micro-batches do not share evenly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from hypothesis import strategies as st

from equivtest import ids, module_property, targets
from equivtest.programs.case import ModuleCase
from equivtest.programs.inputs import Input
from equivtest.property import Property, Space
from tests.clients.engines import MAX_NORM, SETTINGS

HERE, MODELS = "tests.clients.engines:", "tests.clients.engine_models:"

TOKENS: Mapping[str, Input] = {"input_ids": ids(8, ("batch", "seq")), "labels": targets(8, ("batch", "seq"))}
INPUTS: Mapping[str, Mapping[str, Input]] = {
    "sitting_out": {**TOKENS, "passes": ids(2, ("batch",))},
    "narrow": {"x": ids(2, ("batch", 4)), "factors": ids(3, ("batch", 12))},
}
"""Inputs by model; all others take tokens."""


def trained(
    setting: str, model: str = "twice", num_micro_batches: int = 2, parallelize: str = "handed_over"
) -> Property:
    """Two updates of several micro-batches each."""
    found = module_property(
        MODELS + model,
        HERE + parallelize,
        inputs=INPUTS.get(model, TOKENS),
        sizes={"batch": (8,)} if model == "narrow" else {"batch": (8, 5), "seq": (3,)},
        batch="parts of the whole",
        optimizer=HERE + "adamw",
        step=f"{HERE}{setting}_step",
        micro_batches=num_micro_batches,
        max_norm=MAX_NORM if SETTINGS[setting].stage or model == "narrow" else 0.0,
        by_parts=False,
        placed=HERE + "held",
        needs_world=True,
    )
    cases = partial(in_float32, found)
    return replace(found, requires="deepspeed", cases=cases, leaves_out=left_out, conclusive_dtypes=("float32",))


def in_float32(found: Property, space: Space) -> st.SearchStrategy[ModuleCase]:
    """The engine keeps what it updates in float32, whatever the model is of."""
    drawn: st.SearchStrategy[ModuleCase] = found.cases(replace(space, dtypes=("float32",)))
    return drawn


def left_out(space: Space) -> dict[str, str]:
    return {dtype: "" for dtype in space.dtypes if dtype != "float32"}


engine_step_of_stage_0 = trained("stage_0")
engine_step_of_stage_1 = trained("stage_1")
engine_step_of_stage_2 = trained("stage_2")
engine_step_of_stage_3 = trained("stage_3")

three_micro_batches_of_stage_0 = trained("stage_0", num_micro_batches=3)
three_micro_batches_of_stage_1 = trained("stage_1", num_micro_batches=3)
three_micro_batches_of_stage_2 = trained("stage_2", num_micro_batches=3)
three_micro_batches_of_stage_3 = trained("stage_3", num_micro_batches=3)

recomputed_in_stage_0 = trained("stage_0", "twice_recomputed")
recomputed_in_stage_1 = trained("stage_1", "twice_recomputed")
recomputed_in_stage_2 = trained("stage_2", "twice_recomputed")
recomputed_in_stage_3 = trained("stage_3", "twice_recomputed")
reentrant_in_stage_0 = trained("stage_0", "twice_reentrant")
reentrant_in_stage_1 = trained("stage_1", "twice_reentrant")
reentrant_in_stage_2 = trained("stage_2", "twice_reentrant")
reentrant_in_stage_3 = trained("stage_3", "twice_reentrant")

sitting_out_in_stage_0 = trained("stage_0_sitting_out", "sitting_out")
sitting_out_in_stage_1 = trained("stage_1_sitting_out", "sitting_out")
sitting_out_in_stage_2 = trained("stage_2_sitting_out", "sitting_out")
sitting_out_in_stage_3 = trained("stage_3_sitting_out", "sitting_out")

offloaded_in_stage_1 = trained("stage_1_offloaded")
offloaded_in_stage_2 = trained("stage_2_offloaded")
offloaded_in_stage_3 = trained("stage_3_offloaded")

not_synchronized_in_stage_0 = trained("stage_0_not_synchronized")
not_synchronized_in_stage_1 = trained("stage_1_not_synchronized")
coalesced_in_stage_1 = trained("stage_1_coalesced")
coalesced_in_stage_2 = trained("stage_2_coalesced")
coalesced_in_stage_3 = trained("stage_3_coalesced")

backward_of_the_loss_in_stage_1 = trained("stage_1_of_the_loss")
backward_of_the_loss_in_stage_2 = trained("stage_2_of_the_loss")
backward_of_the_loss_in_stage_3 = trained("stage_3_of_the_loss")

in_turn_in_stage_1 = trained("stage_1_in_turn")
in_turn_in_stage_2 = trained("stage_2_in_turn")
overlapped_in_stage_2 = trained("stage_2_overlapped")
overlapped_in_stage_3 = trained("stage_3_overlapped")

divided_when_made_in_stage_3 = trained("stage_3", parallelize="with_config")

narrow_in_stage_0 = trained("stage_0_narrow", "narrow")
narrow_in_stage_1 = trained("stage_1_narrow", "narrow")
narrow_in_stage_2 = trained("stage_2_narrow", "narrow")
narrow_in_stage_3 = trained("stage_3_narrow", "narrow")
narrow_added_in_float32_in_stage_1 = trained("stage_1_narrow_in_float32", "narrow")
narrow_added_in_float32_in_stage_2 = trained("stage_2_narrow_in_float32", "narrow")
narrow_added_in_float32_in_stage_3 = trained("stage_3_narrow_in_float32", "narrow")
