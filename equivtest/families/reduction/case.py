"""One reduction, or softmax, along dims of a tensor that the ranks share.

Letters: R terms of one result (product of the reduced dims).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from equivtest.base import limits
from equivtest.cases.activation import X_ALONE, ActivationCase
from equivtest.cases.case import Shape, replicated, require
from equivtest.cases.case_tensor import CaseTensor
from equivtest.cases.rules import Dims, OneOf
from equivtest.layout import Layout, Partial, Replicate, Shard, parse_placement

SOFTMAXES = ("softmax", "log_softmax")
OPS = ("sum", "mean", "amax", "norm", *SOFTMAXES)


@dataclass(frozen=True, kw_only=True, repr=False)
class ReductionCase(ActivationCase):
    """output = op(x) over some dims, forward and backward; the output whole on every rank.

    Attributes:
        op: 'sum', 'mean', 'amax', 'norm' (the root of the sum of squares), 'softmax' or 'log_softmax'.
        shape: Shape of x, one to four dims.
        layout: Layout of x: 'replicate', 'shard(DIM)' or 'partial(sum)', with an operand on each rank.
        dims: The reduced dims, ascending; a softmax takes one.
        keepdim: Whether they stay, with size 1; not for a softmax, which preserves them.
        requires_grad: ('x',) or ().
        x_contiguous, cotangent_contiguous: Memory format of the tensors that the harness passes.
    """

    VALUE_MODES: ClassVar[tuple[str, ...]] = ("dense", "real")

    op: Annotated[str, OneOf(OPS)] = "sum"
    shape: Annotated[Shape, Dims(1, limits.MAX_DIMS)] = (1,)
    layout: str = "replicate"
    dims: Shape = (0,)
    keepdim: bool = False
    requires_grad: Annotated[tuple[str, ...], OneOf(X_ALONE)] = ("x",)
    x_contiguous: bool = True
    cotangent_contiguous: bool = True

    def check_fields(self) -> None:
        require(
            self.dims == tuple(sorted(set(self.dims) & set(range(len(self.shape))))) and len(self.dims) > 0,
            f"dims must be some of the {len(self.shape)} dims, ascending, got {self.dims}",
        )
        if self.op in SOFTMAXES:
            require(len(self.dims) == 1, f"{self.op} takes one dim, got {self.dims}")
            require(not self.keepdim, f"{self.op} keeps its dim: leave keepdim at False")
        require(
            self.placement == Partial("sum") or isinstance(self.placement, Replicate | Shard),
            f"layout must be replicate, shard(DIM) or partial(sum), got {self.layout!r}",
        )
        require(
            not self.is_partial or all(mode == "dense" for mode, _ in self.values),
            "operands of a partial sum must be dense: real ones are rounded before the reduction",
        )

    @property
    def placement(self) -> Replicate | Shard | Partial:
        """The placement of x on the only mesh axis."""
        return parse_placement(self.layout)  # type: ignore[return-value]

    @property
    def is_partial(self) -> bool:
        """True if each rank has an operand of x."""
        return isinstance(self.placement, Partial)

    @property
    def reduces_shards(self) -> bool:
        """True if the dim that is divided among the ranks is reduced."""
        return isinstance(self.placement, Shard) and self.placement.dim in self.dims

    @property
    def num_terms(self) -> int:
        """R."""
        return math.prod(self.shape[dim] for dim in self.dims)

    @property
    def output_shape(self) -> Shape:
        """Shape of x after the reduction."""
        if self.op in SOFTMAXES:
            return self.shape
        kept = tuple(1 if dim in self.dims else size for dim, size in enumerate(self.shape))
        return kept if self.keepdim else tuple(size for dim, size in enumerate(self.shape) if dim not in self.dims)

    def describe_tensors(self) -> dict[str, CaseTensor]:
        """Describes the tensors; all operands of a partial x are stacked in rank order."""
        x = (self.world_size, *self.shape) if self.is_partial else self.shape
        given = Layout((Shard(0) if self.is_partial else self.placement,))
        gradient = CaseTensor(self.shape, replicated() if self.is_partial else given, "gradient")
        return {
            "x": self.given("x", x, given),
            "cotangent": self.given("cotangent", self.output_shape, replicated()),
            "output": CaseTensor(self.output_shape, replicated(), "output"),
            **{f"grad.{name}": gradient for name in self.requires_grad},
        }
