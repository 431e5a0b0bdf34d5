"""Draws cases for DeepSpeed's engine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from equivtest.cases.picks import pick
from equivtest.families.training.data_parallel.strategy import data_parallel_cases
from equivtest.families.training.deepspeed.case import EVERYTHING, OF_STAGE_3, REDUCE_BUCKET_NUMEL, EngineCase
from equivtest.property import Space

ENGINE_SIZES = {
    "persistence_numel": ("nothing", "nothing", "nothing", "below", "at", "above", "everything"),
    "prefetch_numel": ("everything", "everything", "nothing", "below", "at", "above"),
    "reuse_numel": ("everything", "nothing", "nothing", "below", "at", "above"),
    "live_numel": ("everything", "everything", "everything", "nothing", "below", "at", "above"),
}
"""Values of the engine's sizes.

DeepSpeed's default comes first, except for persistence, where it would keep every parameter.
"""
BUCKET_SIZES = ("everything", "everything", "nothing", "below", "at", "above")
CLIPPINGS = (0.0, 0.0, 0.0, 2.0**-4, 1.0, 16.0, 2.0**12)
"""Norms that gradients are clipped to: never; far below the usual norms; around them; above most."""
PREDIVIDE_FACTORS = ("none", "none", "none", "two", "half", "three", "ranks")
NUMEL_OF = tuple(range(12))  # which parameter a size lies around, modulo their number, 2 to 4


@st.composite
def engine_cases(draw: DrawFn, space: Space) -> EngineCase:
    """Draws cases for DeepSpeed's ZeRO-3 engine, in float32 only, because narrower parameters have a float32 master
    copy.

    The mesh is always the whole world, because the engine uses the world's group. Trained cases have at least three
    steps, because parameters are fetched ahead from the second step on. Sizes lie around the number of elements of a
    parameter. Shrinks to one forward and backward without persistent parameters and with DeepSpeed's defaults for all
    other options.
    """
    case = draw(data_parallel_cases(Space(space.world_sizes, ("float32",)), style="zero3"))
    steps = pick(draw, "steps of an engine", (3, 3, 4))
    numels = [math.prod(case.shapes()[f"param.{name}"]) for name in case.parameter_names()]
    picked = {name: _pick_numel(draw, name, numels, kinds) for name, kinds in ENGINE_SIZES.items()}
    shared = {field.name: getattr(case, field.name) for field in dataclasses.fields(case)}
    changed = {
        "members": (),
        "padding": "nan",
        "clip_norm": 0.0,
        "norm_type": "2",
        "stopped_steps": (),
        "variant": "",
        "between_steps": "",
        "steps": steps if case.trains else 1,
    }
    saved_after = pick(draw, "saved_after", (0, 0, 0, 0, 0, 1, 2))
    reduce_scatter = pick(draw, "reduce_scatter", (True, True, False))
    return EngineCase(
        **shared | changed | picked,
        **_pick_scaling(draw, case.world_size, reduce_scatter=reduce_scatter),
        reduce_bucket_numel=min(REDUCE_BUCKET_NUMEL, max(1, _pick_numel(draw, "bucket", numels, BUCKET_SIZES))),
        saved_after=saved_after if case.trains else 0,
        reduce_scatter=reduce_scatter,
        sequential=pick(draw, "sequential", (False,) * 7 + (True,)),
        leaf=pick(draw, "leaf", (False, False, False, True)),
        sub_group_numel=pick(draw, "sub_group_numel", (EVERYTHING, EVERYTHING, EVERYTHING, 1)),
        gradient_clipping=pick(draw, "gradient_clipping", CLIPPINGS) if case.trains else 0.0,
    )


@st.composite
def whole_engine_cases(draw: DrawFn, space: Space) -> EngineCase:
    case = draw(engine_cases(space))
    usual = {name: getattr(EngineCase, name) for name in OF_STAGE_3}
    return dataclasses.replace(case, stage=pick(draw, "stage", (2, 2, 1)), **usual)


def _pick_scaling(draw: DrawFn, world_size: int, *, reduce_scatter: bool) -> dict[str, Any]:
    kind, prescales = pick(draw, "predivide", PREDIVIDE_FACTORS), pick(draw, "prescales", (False, False, False, True))
    factor = {"none": 1.0, "two": 2.0, "half": 0.5, "three": 3.0, "ranks": float(world_size)}[kind]
    return {} if reduce_scatter else {"predivide_factor": factor, "prescales": prescales}


def _pick_numel(draw: DrawFn, name: str, numels: Sequence[int], kinds: Sequence[str]) -> int:
    """Draws a number of elements around one of `numels`. A kind that occurs several times is drawn more often."""
    kind = pick(draw, name, kinds)
    numel = numels[pick(draw, f"{name}: of", NUMEL_OF) % len(numels)]
    return {"nothing": 0, "below": numel - 1, "at": numel, "above": numel + 1, "everything": EVERYTHING}[kind]
