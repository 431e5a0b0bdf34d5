"""Defines `EngineCase`: a perceptron trained by DeepSpeed's engine, with the engine's options."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from equivtest.cases.case import Shape, replicated, require
from equivtest.cases.rules import OneOf, Within
from equivtest.families.training.data_parallel.case import DataParallelCase
from equivtest.layout import Layout, Partial, flat_axis

EVERYTHING = 1_000_000_000
"""Number of elements that is larger than any model of a case. It is DeepSpeed's default for most sizes."""

REDUCE_BUCKET_NUMEL = 1_000
"""Number of elements of the buffer that gradients are reduced in. DeepSpeed's default takes 2 GB per rank."""

STAGES = (1, 2, 3)
OF_STAGE_3 = (
    "persistence_numel", "prefetch_numel", "reuse_numel", "live_numel", "sequential", "leaf", "sub_group_numel",
)  # fmt: skip
"""Names of the options about fetching, keeping and updating partitioned parameters, which only stage 3 has."""


@dataclass(frozen=True, kw_only=True, repr=False)
class EngineCase(DataParallelCase):
    """Describes a data-parallel case of style zero3, and options of DeepSpeed's engine for this case.

    No option except `gradient_clipping` may change an answer. Sizes count elements of whole parameters. If no option
    says otherwise, a layer's parameters are fetched before its forward and before its backward, and released after
    both.

    In stages 1 and 2 every rank has whole parameters. The trained parameters form one flat tensor, and each rank
    updates one range of this tensor, which may begin and end within a parameter. A rank returns the gradients and
    optimizer states of its range, and zeros for all other elements. So the ranks' tensors add up to the whole tensor.

    Attributes:
        stage: The tensors that the ranks divide. In stage 3 they are parameters, gradients and optimizer states. In
            stage 2 they are gradients and optimizer states. In stage 1 they are optimizer states, and the elements of
            gradients that these states need.
        persistence_numel: Number of elements up to which a parameter stays fetched until the update.
        prefetch_numel: Number of elements that are fetched ahead, from the second forward on.
        reuse_numel: A parameter stays fetched after its use if at most this many elements are used before its next use,
            from the second forward on.
        live_numel: Number of elements that may be fetched ahead of their use, from the second forward on.
        reduce_bucket_numel: Number of elements of gradients that are reduced together, at least 1.
        reduce_scatter: True if gradients are reduced by reduce_scatter, False if by all_reduce.
        sequential: Whether a fetch by all_gather takes one collective per parameter.
        leaf: Whether the whole model is fetched and released together, as one module.
        sub_group_numel: Number of elements of parameters that are updated together. If 1, each parameter is updated
            alone.
        saved_after: Number of the step after whose update the engine saves everything. A new engine, built with other
            values, then loads the saved state and continues. If 0, nothing is saved.
        predivide_factor: Number by which gradients are divided before they are reduced, and by which they are
            multiplied afterwards.
        prescales: Whether gradients are divided by the number of ranks before they are reduced. If so,
            `predivide_factor` has no effect.
        gradient_clipping: Limit for the norm of all gradients together. Before each update, gradients with a larger
            norm are scaled down to this norm. If the limit is 0, gradients are never scaled.

    Source: deepspeed/runtime/zero/config.py (0.19.8).
    """

    style: str = "zero3"
    stage: Annotated[int, OneOf(STAGES)] = 3
    persistence_numel: Annotated[int, Within(0, EVERYTHING)] = 0
    prefetch_numel: Annotated[int, Within(0, EVERYTHING)] = EVERYTHING
    reuse_numel: Annotated[int, Within(0, EVERYTHING)] = EVERYTHING
    live_numel: Annotated[int, Within(0, EVERYTHING)] = EVERYTHING
    reduce_bucket_numel: Annotated[int, Within(1, EVERYTHING)] = REDUCE_BUCKET_NUMEL
    reduce_scatter: bool = True
    sequential: bool = False
    leaf: bool = False
    sub_group_numel: Annotated[int, Within(1, EVERYTHING)] = EVERYTHING
    saved_after: int = 0
    predivide_factor: float = 1.0
    prescales: bool = False
    gradient_clipping: float = 0.0

    def check_fields(self) -> None:
        require(self.style == "zero3", f"an engine must have style='zero3', got {self.style!r}")
        require(not self.members, f"an engine trains on the whole world: leave members out, got {self.members}")
        require(self.dtype == "float32", f"an engine is judged only in float32, got {self.dtype!r}")
        for name in OF_STAGE_3 if self.stage != 3 else ():
            require(
                getattr(self, name) == getattr(EngineCase, name),
                f"stage {self.stage} divides no parameters: leave {name} out, got {getattr(self, name)}",
            )
        require(
            not self.stopped_steps, f"an engine runs whole backwards: leave stopped_steps out, got {self.stopped_steps}"
        )
        for name in ("variant", "between_steps"):
            value = getattr(self, name)
            require(not value, f"an engine has its own optimizer: leave {name} out, got {value!r}")
        require(not self.clips, f"an engine clips by gradient_clipping: leave clip_norm out, got {self.clip_norm}")
        super().check_fields()
        require(
            0 <= self.saved_after < self.steps,
            f"saved_after must be in 0..{self.steps - 1}, so that a step follows the checkpoint, got "
            f"{self.saved_after}",
        )
        require(
            0 < self.predivide_factor < math.inf,
            f"predivide_factor must be above 0 and finite, got {self.predivide_factor}",
        )
        require(
            self.stage == 1 or not self.reduce_scatter or (self.predivide_factor == 1 and not self.prescales),
            f"stage {self.stage} does not scale gradients that it reduces by reduce_scatter: set reduce_scatter=False, "
            f"got predivide_factor={self.predivide_factor} and prescales={self.prescales}",
        )
        require(
            0 <= self.gradient_clipping < math.inf,
            f"gradient_clipping must be at least 0 and finite, got {self.gradient_clipping}",
        )
        require(
            self.trains or not self.gradient_clipping,
            f"gradients are clipped before an update: set optimizer with gradient_clipping={self.gradient_clipping}",
        )

    def layout_of(self, name: str, shape: Shape) -> Layout:
        layout = super().layout_of(name, shape)
        if self.stage == 3 or flat_axis(layout) is None:
            return layout
        return replicated() if "param" in name.split(".") else Layout((Partial(),))

    @property
    def predivides(self) -> bool:
        return self.predivide_factor != 1 and not self.prescales
