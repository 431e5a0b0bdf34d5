"""What a correct subject answers, and how far it may be off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from equivtest.base import limits
from equivtest.layout import Layout

COPIED = "equal: copied, nothing is computed"
"""The derivation of what no operation may change."""


@dataclass(frozen=True)
class ExpectedTensor:
    """One tensor of the unsharded computation.

    Attributes:
        value: The right value, global, float64.
        allowed: Largest absolute error per element, global, float64; None: equal by value.
        layout: Where the case's contract puts it.
        dtype: Name of the dtype that the subject must answer in.
        derivation: Why `allowed` is what it is, for the message.
        requires_grad: The flag that the answered tensor must carry; None: any.
        is_symmetric: Whether a correct subject's errors prefer no sign and share no rounding, so
            that their sums are known to stay small: see `equivtest.verdicts.lean`.
        bits: The right value in the answer's own dtype, global, where nothing may round it and
            every bit has one right value; None: only `value` has.
        flushed_below: Magnitude below which an element may be zero instead: where zeros were added to it, by a backend
            that declares to flush subnormals.
        scale: What `allowed` is measured by where the values are smaller: of values that are zero in exact arithmetic.
        is_sum: Whether elements are sums, so that a zero may have either sign: 0 * -1 alone is -0,
            added to +0 it is +0, and where a sum begins is the kernel's business.
        may_be_none: Whether a correct subject may answer none for the zeros: of a gradient that reaches nothing, or
            one for which the case accepts either.
        is_inner: Whether a bound that is too wide leaves nothing open: of what is within a computation, where the
            oracle goes on from what it computed itself, so that what follows shows what is wrong.
        is_open: Whether staying within the bound shows nothing, however narrow it is.
        is_part: Whether it is what a part of a module gives, is handed, or gets back.
        factor: What the unsharded value was multiplied by, as the ranks' backward has a factor here that they take out
            again.
        resolution: Largest error per element, float64, at which ranks are near enough to show that they are right where
            the bound is too wide, or staying within it shows nothing: see `resolution_of`; None: no error is.
        takes_wider: True if the answer may be of any dtype that holds every number of `dtype`, or of integers, and is
            judged by its value: what a step reports.
    """

    value: torch.Tensor
    allowed: torch.Tensor | None
    layout: Layout
    dtype: str
    derivation: str
    requires_grad: bool | None = None
    is_symmetric: bool = False
    bits: torch.Tensor | None = None
    is_sum: bool = False
    flushed_below: float = 0.0
    scale: float = 0.0
    may_be_none: bool = False
    is_inner: bool = False
    is_open: bool = False
    is_part: bool = False
    factor: float = 1.0
    resolution: torch.Tensor | None = None
    takes_wider: bool = False

    @property
    def is_zero(self) -> bool:
        """True if every element of the right value is 0."""
        return not bool(self.value.any())


def says_nothing(
    value: torch.Tensor, allowed: torch.Tensor, scale: float = 0.0, share: float = limits.TOO_WIDE
) -> bool:
    """Whether some element may be off by anything, or the median allowance is too large.

    That is more than `share` of the root mean square of the right values, or of `scale` where that is more.
    """
    if not allowed.numel():
        return False
    if not bool(allowed.isfinite().all()):
        return True
    return float(allowed.median()) > share * max(float(value.square().mean().sqrt()), scale)


def resolution_of(value: torch.Tensor, scale: float = 0.0, change: torch.Tensor | None = None) -> torch.Tensor | None:
    """How far from the right value an element may be found, and it still shows what a bound that is not too wide shows.

    A bound that is not too wide lets a value be off by limits.TOO_WIDE of the root mean square, or of `scale`.  What is
    found to be no further off than that, or than so much of itself, in every element, is known as well, however much
    the roundings of a correct program might have come to.  It rejects nothing: beyond it, and within the bound, nothing
    is concluded.

    Args:
        change: What the value was changed by, which is to be seen; None: the value itself.

    Returns:
        float64; None where the values are not finite, or nothing was changed, so that nothing could be near.
    """
    seen = value if change is None else change
    if not bool(seen.isfinite().all()) or (change is not None and not bool(change.any())):
        return None
    root = max(float(seen.square().mean().sqrt()) if seen.numel() else 0.0, scale)
    return limits.TOO_WIDE * seen.abs().clamp(min=root)


@dataclass(frozen=True)
class Expected:
    """Every tensor that a subject must answer for one draw, by name.

    Attributes:
        bits_used: name -> bits that the largest sum of magnitudes behind it takes.
        drops: name -> with which probability each element is zero, whatever becomes of the others.
        again: The same of the draw's second run, by a backend that may have added in another order then; None: what
            is answered has the bits of the first.
    """

    tensors: Mapping[str, ExpectedTensor]
    bits_used: Mapping[str, int]
    drops: Mapping[str, float] = field(default_factory=dict)
    again: Expected | None = None
