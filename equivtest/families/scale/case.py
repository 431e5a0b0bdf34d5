"""A tensor that the ranks share, multiplied by a number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from equivtest import limits
from equivtest.kit.activation import ActivationCase
from equivtest.kit.case import Shape, require
from equivtest.layout import Layout, Shard

FACTORS = (2, -3, 5)


@dataclass(frozen=True, kw_only=True, repr=False)
class ScaleCase(ActivationCase):
    """y = x factor, x and y divided on one dim.

    Attributes:
        shape: Of x and of y.
        dim: Which dim of it is divided among the ranks.
        factor: One of FACTORS.
        requires_grad: ('x',) or ().
        x_contiguous, cotangent_contiguous: Memory format of what the harness hands over.
    """

    VALUE_MODES: ClassVar[tuple[str, ...]] = ("dense", "real")

    shape: Shape = (1,)
    dim: int = 0
    factor: int = 2
    requires_grad: tuple[str, ...] = ("x",)
    x_contiguous: bool = True
    cotangent_contiguous: bool = True

    def __post_init__(self) -> None:
        require(
            1 <= len(self.shape) <= limits.MAX_DIMS, f"shape must have 1 to {limits.MAX_DIMS} dims, got {self.shape}"
        )
        require(0 <= self.dim < len(self.shape), f"dim must be one of the {len(self.shape)} dims, got {self.dim}")
        require(self.factor in FACTORS, f"factor must be one of {', '.join(map(str, FACTORS))}, got {self.factor}")
        require(self.requires_grad in ((), ("x",)), f"requires_grad must be () or ('x',), got {self.requires_grad}")
        super().__post_init__()

    def shapes(self) -> dict[str, Shape]:
        return dict.fromkeys((*self.given_names(), *self.answer_names()), self.shape)

    def layouts(self) -> dict[str, Layout]:
        return dict.fromkeys(self.shapes(), Layout((Shard(self.dim),)))

    def given_names(self) -> tuple[str, ...]:
        return ("x", "cotangent")

    def answer_names(self) -> tuple[str, ...]:
        return ("output", *(f"grad.{name}" for name in self.requires_grad))
