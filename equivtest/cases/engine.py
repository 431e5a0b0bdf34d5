"""A perceptron trained by DeepSpeed's ZeRO-3 engine, and how the engine is told to fetch, keep and reduce."""

from __future__ import annotations

from dataclasses import dataclass

from equivtest.cases.base import require
from equivtest.cases.data_parallel import DataParallelCase

EVERYTHING = 1_000_000_000
"""More elements than any model of a case has: DeepSpeed's own default of most sizes."""

REDUCE_BUCKET_NUMEL = 1_000
"""Of the buffer that gradients are reduced in, in elements: by default it takes 2 GB on every rank."""

LEAST = {
    "persistence_numel": 0,
    "prefetch_numel": 0,
    "reuse_numel": 0,
    "live_numel": 0,
    "reduce_bucket_numel": 1,
    "sub_group_numel": 1,
}
"""Size of an engine -> the least that it may be."""


@dataclass(frozen=True, kw_only=True, repr=False)
class EngineCase(DataParallelCase):
    """A data-parallel case of style zero3 with options of the engine, none of which may change an answer.

    Sizes are in elements of whole parameters.  A layer's parameters are fetched before its forward and
    before its backward, and released after each; the options say where that is not so.

    Attributes:
        persistence_numel: Parameters of up to so many elements stay fetched until the update.
        prefetch_numel: How much is fetched ahead, from the second forward on.
        reuse_numel: Parameters that are used again within so many stay fetched, from the second forward on.
        live_numel: How much may be fetched ahead of its use, from the second forward on.
        reduce_bucket_numel: Gradients that are reduced together, at least 1.
        reduce_scatter: Whether gradients are reduced by reduce_scatter, not by all_reduce.
        sequential: Whether a fetch by all_gather takes one collective per parameter.
        leaf: Whether the whole model is fetched and released together, as one module.
        sub_group_numel: Parameters that are updated together; 1: each alone.

    Source: deepspeed/runtime/zero/config.py (0.19.8).
    """

    style: str = "zero3"
    persistence_numel: int = 0
    prefetch_numel: int = EVERYTHING
    reuse_numel: int = EVERYTHING
    live_numel: int = EVERYTHING
    reduce_bucket_numel: int = REDUCE_BUCKET_NUMEL
    reduce_scatter: bool = True
    sequential: bool = False
    leaf: bool = False
    sub_group_numel: int = EVERYTHING

    def __post_init__(self) -> None:
        require(self.style == "zero3", f"an engine's style is 'zero3', got {self.style!r}")
        require(not self.members, f"an engine trains on the whole world: leave members out, got {self.members}")
        require(self.dtype == "float32", f"an engine is judged in float32 alone, got {self.dtype!r}")
        require(not self.stopped_steps, f"an engine's steps all go through, got stopped_steps {self.stopped_steps}")
        require(not self.clips, f"an engine is judged without clipping, got clip_norm {self.clip_norm}")
        for name, least in LEAST.items():
            value = getattr(self, name)
            require(least <= value <= EVERYTHING, f"{name} must be in {least}..{EVERYTHING}, got {value}")
        super().__post_init__()

    @property
    def leaf_input_requires_grad(self) -> bool:
        """Whether autograd goes on beyond the leaf, to x; True where there is no leaf."""
        return not self.leaf or "x" in self.requires_grad
