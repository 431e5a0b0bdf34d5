"""Defines `ScaleCase`: a sharded tensor that is multiplied by a number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from equivtest.base import limits
from equivtest.cases.activation import X_ALONE, ActivationCase
from equivtest.cases.axes import shapes, table_of
from equivtest.cases.case import Shape, require
from equivtest.cases.case_tensor import CaseTensor
from equivtest.cases.rules import Dims, OneOf
from equivtest.layout import Layout, Shard

FACTORS = (2, -3, 5)


@dataclass(frozen=True, kw_only=True, repr=False)
class ScaleCase(ActivationCase):
    """Describes y = x * factor, with x and y sharded on one dim.

    Attributes:
        shape: Shape of x and of y.
        dim: The dim that is divided among the ranks.
        factor: The number by which x is multiplied, one of FACTORS.
        requires_grad: ('x',) if x needs a gradient, () if it does not.
        x_contiguous, cotangent_contiguous: Whether the harness passes x, or the cotangent, contiguous in memory.
    """

    VALUE_MODES: ClassVar[tuple[str, ...]] = ("dense", "real")
    MODES_DRAWN: ClassVar[tuple[tuple[str, ...], ...]] = (("dense",), *[("dense", "real", "dense")] * 9)

    shape: Annotated[Shape, Dims(1, limits.MAX_DIMS, smallest=0), shapes((1, 2, 2, 3, 4))] = (1,)
    dim: Annotated[int, table_of(lambda fields: range(len(fields["shape"])))] = 0
    factor: Annotated[int, OneOf(FACTORS)] = 2
    requires_grad: Annotated[tuple[str, ...], OneOf(X_ALONE)] = ("x",)
    x_contiguous: bool = True
    cotangent_contiguous: bool = True

    def check_fields(self) -> None:
        require(0 <= self.dim < len(self.shape), f"dim must be one of the {len(self.shape)} dims, got {self.dim}")

    def describe_tensors(self) -> dict[str, CaseTensor]:
        divided = Layout((Shard(self.dim),))
        tensors = {name: self.given(name, self.shape, divided) for name in ("x", "cotangent")}
        tensors["output"] = CaseTensor(self.shape, divided, "output")
        return tensors | {f"grad.{name}": CaseTensor(self.shape, divided, "gradient") for name in self.requires_grad}
