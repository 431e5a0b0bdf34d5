"""Defines `PreparedCase`: one tensor that passes through a module whose input, output or both torch redistributes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from equivtest.cases.case import require
from equivtest.cases.operands import without_partial
from equivtest.cases.rules import OneOf
from equivtest.families.redistribute.case import RedistributeCase
from equivtest.layout import Layout, Partial, Shard, parse_placement

STYLES = ("input", "output", "input_output")


@dataclass(frozen=True, kw_only=True, repr=False)
class PreparedCase(RedistributeCase):
    """Describes one call of a module that returns its input, so that output = x.

    The mesh has one axis. x is a DTensor or a plain tensor. The target is never partial.

    Attributes:
        style: The prepared tensors: 'input', 'output' or 'input_output'.
        middle: For the style 'input_output', the placement under which the module gets x.
        x_is_dtensor: Whether x is passed as a DTensor. Uneven shards require this, because torch computes the global
            shape of a plain tensor as local size times ranks.
        use_local_input: For the style 'input_output', whether the module gets a plain tensor. If so, the shards under
            `middle` must be even.
        use_local_output: Whether the prepared module returns a plain tensor.
        as_kwarg: Whether x is passed by name.
    """

    style: Annotated[str, OneOf(STYLES)] = "input"
    middle: str = "replicate"
    x_is_dtensor: bool = False
    use_local_input: bool = False
    use_local_output: bool = False
    as_kwarg: bool = False

    def check_fields(self) -> None:
        super().check_fields()
        require(not self.mesh, f"a prepared module needs a mesh of one axis, got {self.mesh}")
        require(self.road == "dtensor" and not self.cotangent, "road and cotangent follow from the module: omit them")
        require(
            not (self.from_end or self.grad_source or self.forward_dtype or self.backward_dtype),
            "from_end, grad_source and the two dtypes are arguments of redistribute: omit them",
        )
        placements = [parse_placement(text) for text in (*self.target, self.middle)]
        require(
            not any(isinstance(placement, Partial) for placement in placements),
            f"target and middle must be replicate or shard(DIM), got {self.target} and {self.middle!r}",
        )
        require(
            self.source[0] in ("replicate", "partial(sum)") or isinstance(parse_placement(self.source[0]), Shard),
            f"source must be replicate, shard(DIM) or partial(sum), got {self.source[0]!r}",
        )
        require(not self.as_kwarg or self.style != "output", "as_kwarg needs a style that prepares inputs")
        require(
            self.style == "input_output" or (self.middle, self.use_local_input) == ("replicate", False),
            "middle and use_local_input are for style 'input_output'",
        )

    def check_layouts(self) -> None:
        require(
            self.x_is_dtensor or self.is_even(self.source[0]),
            f"x of shape {self.shape} is uneven: set x_is_dtensor=True",
        )
        require(
            not self.use_local_input or self.is_even(self.middle),
            f"x of shape {self.shape} is uneven under {self.middle}: set use_local_input=False",
        )

    def is_even(self, text: str) -> bool:
        placement = parse_placement(text)
        return not isinstance(placement, Shard) or self.shape[placement.dim] % self.world_size == 0

    @property
    def steps(self) -> tuple[str, ...]:
        return (*self.source, *((self.middle,) if self.style == "input_output" else ()), *self.target)

    @property
    def leaves_as_plain_tensor(self) -> bool:
        return self.use_local_output

    @property
    def gradient_layout(self) -> Layout:
        return without_partial(self.operand_layout("x"))
