"""One reduction, or softmax, along dims of a tensor that the ranks share.

Letters: R terms of one result (product of the reduced dims).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from equivtest import limits
from equivtest.kit.activation import ActivationCase
from equivtest.kit.case import Shape, replicated, require
from equivtest.layout import Layout, Partial, Replicate, Shard, parse_placement

SOFTMAXES = ("softmax", "log_softmax")
OPS = ("sum", "mean", "amax", "norm", *SOFTMAXES)


@dataclass(frozen=True, kw_only=True, repr=False)
class ReductionCase(ActivationCase):
    """output = op(x) over some dims, forward and backward; the output whole on every rank.

    Attributes:
        op: 'sum', 'mean', 'amax', 'norm' (the root of the sum of squares), 'softmax' or 'log_softmax'.
        shape: Of x, one to four dims.
        layout: Of x: 'replicate', 'shard(DIM)' or 'partial(sum)', of which each rank holds an operand.
        dims: Those that are reduced, ascending; a softmax takes one.
        keepdim: Whether they stay, of size 1; not of a softmax, which keeps them as they are.
        requires_grad: ('x',) or ().
        x_contiguous, cotangent_contiguous: Memory format of what the harness hands over.
    """

    VALUE_MODES: ClassVar[tuple[str, ...]] = ("dense", "real")

    op: str = "sum"
    shape: Shape = (1,)
    layout: str = "replicate"
    dims: Shape = (0,)
    keepdim: bool = False
    requires_grad: tuple[str, ...] = ("x",)
    x_contiguous: bool = True
    cotangent_contiguous: bool = True

    def __post_init__(self) -> None:
        require(self.op in OPS, f"op must be one of {', '.join(OPS)}, got {self.op!r}")
        require(
            1 <= len(self.shape) <= limits.MAX_DIMS and min(self.shape) >= 1,
            f"shape must have 1 to {limits.MAX_DIMS} dims of at least 1, got {self.shape}",
        )
        require(
            self.dims == tuple(sorted(set(self.dims) & set(range(len(self.shape))))) and len(self.dims) > 0,
            f"dims must be some of the {len(self.shape)} dims, ascending, got {self.dims}",
        )
        if self.op in SOFTMAXES:
            require(len(self.dims) == 1, f"{self.op} takes one dim, got {self.dims}")
            require(not self.keepdim, f"{self.op} keeps its dim: leave keepdim at False")
        require(self.requires_grad in ((), ("x",)), f"requires_grad must be () or ('x',), got {self.requires_grad}")
        require(
            self.placement == Partial("sum") or isinstance(self.placement, Replicate | Shard),
            f"layout must be replicate, shard(DIM) or partial(sum), got {self.layout!r}",
        )
        require(
            not self.is_partial or all(mode == "dense" for mode, _ in self.values),
            "operands of a partial sum must be dense: real ones are rounded before the reduction",
        )
        super().__post_init__()

    @property
    def placement(self) -> Replicate | Shard | Partial:
        """Of x on the only mesh axis."""
        return parse_placement(self.layout)  # type: ignore[return-value]

    @property
    def is_partial(self) -> bool:
        """Whether each rank holds an operand of x."""
        return isinstance(self.placement, Partial)

    @property
    def reduces_shards(self) -> bool:
        """Whether the dim that the ranks share is reduced."""
        return isinstance(self.placement, Shard) and self.placement.dim in self.dims

    @property
    def shared_size(self) -> int:
        """Size of the dim that the ranks share; 0 where they share none."""
        return self.shape[self.placement.dim] if isinstance(self.placement, Shard) else 0

    @property
    def has_empty_shard(self) -> bool:
        """Whether some rank has no element of x."""
        return self.worst_shard_kind(("x",)) == "empty"

    @property
    def num_terms(self) -> int:
        """R."""
        return math.prod(self.shape[dim] for dim in self.dims)

    def shapes(self) -> dict[str, Shape]:
        """Of x, where it is partial, all operands in rank order."""
        kept = tuple(1 if dim in self.dims else size for dim, size in enumerate(self.shape))
        output = kept if self.keepdim else tuple(s for dim, s in enumerate(self.shape) if dim not in self.dims)
        if self.op in SOFTMAXES:
            output = self.shape
        x = (self.world_size, *self.shape) if self.is_partial else self.shape
        shapes = {"x": x, "cotangent": output, "output": output}
        return shapes | {f"grad.{name}": self.shape for name in self.requires_grad}

    def layouts(self) -> dict[str, Layout]:
        given = Layout((Shard(0) if self.is_partial else self.placement,))
        base = {"x": given, "cotangent": replicated(), "output": replicated()}
        return base | {f"grad.{name}": replicated() if self.is_partial else given for name in self.requires_grad}

    def given_names(self) -> tuple[str, ...]:
        return ("x", "cotangent")

    def answer_names(self) -> tuple[str, ...]:
        return ("output", *(f"grad.{name}" for name in self.requires_grad))
