"""Describes the tensors that a correct subject returns, and the largest error that each element may have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from equivtest.base import limits
from equivtest.layout import Layout

COPIED = "equal: copied, nothing is computed"
"""Derivation for values that no operation may change."""


@dataclass(frozen=True)
class ExpectedTensor:
    """The right value of one tensor, its allowed error and its layout.

    Attributes:
        value: The right value, a global float64 tensor.
        allowed: Largest absolute error per element, a global float64 tensor. If None, the subject's tensor must equal
            `value`.
        layout: Layout of the tensor according to the case's contract.
        dtype: Name of the dtype that the subject's tensor must have.
        derivation: Derivation of `allowed` in words, for the message.
        requires_grad: The flag requires_grad that the subject's tensor must have. If None, both values of the flag are
            right.
        is_symmetric: True if a correct subject's errors prefer no sign and share no rounding, so
            that their sums stay small: see `equivtest.verdicts.lean`.
        bits: The right value, a global tensor in the dtype of the subject's tensor, if a correct subject must return
            these bits exactly. None if correct subjects may return different bits.
        flushed_below: Magnitude below which an element may be zero instead. It is set if a backend that declares to
            flush subnormals added zeros to the tensor.
        scale: Smallest size with which `allowed` is compared to decide if the bound is too wide. If the values are
            larger than this size, `allowed` is compared with the values. Values that are zero in exact arithmetic need
            such a size, because every bound is too wide compared with zero.
        is_sum: True if elements are sums, so that a zero may have either sign: the sum is -0 if a
            kernel begins with the product 0 * -1, and +0 if it begins with +0.
        may_be_none: True if a correct subject may return None instead of zeros. This is allowed for the gradient of a
            tensor that no output needs, and for any tensor if the case accepts None.
        is_inner: True if the claim does not become open when the bound of this tensor is too wide. Values within a
            module are such tensors. If such a bound is too wide, the oracle continues with its own value, so that an
            error of the ranks shows in later tensors.
        is_open: True if an error within the bound proves nothing, however narrow the bound is.
        is_part: True for inputs, outputs and gradients of a submodule.
        factor: Factor by which the unsharded value was multiplied. The ranks' gradient has this factor too, until a
            later step of the ranks' backward removes the factor.
        resolution: Largest error per element, a float64 tensor, at which a rank's value counts as right although the
            bound is too wide or proves nothing: see `resolution_of`. If None, no value counts as right under such a
            bound.
        takes_wider: True if only the value counts and not the dtype, as for numbers that a step reports. Then the
            subject's tensor may have any integer dtype, and any dtype that can represent every number of `dtype`.
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
        return not bool(self.value.any())


def says_nothing(
    value: torch.Tensor, allowed: torch.Tensor, scale: float = 0.0, share: float = limits.TOO_WIDE
) -> bool:
    """True if the bound proves nothing: an allowed error is infinite, or the median allowed error is too large.

    Let the size be the root mean square of the right values, or `scale` if `scale` is larger. The median allowed error
    is too large if it exceeds `share` times the size.
    """
    if not allowed.numel():
        return False
    if not bool(allowed.isfinite().all()):
        return True
    return float(allowed.median()) > share * max(float(value.square().mean().sqrt()), scale)


def resolution_of(value: torch.Tensor, scale: float = 0.0, change: torch.Tensor | None = None) -> torch.Tensor | None:
    """Returns the resolution of each element. Up to this error a value counts as right, however wide its bound is.

    A bound counts as narrow if it allows an error of at most limits.TOO_WIDE times the size of the tensor. The size of
    the tensor is the root mean square of `value`, or `scale` if `scale` is larger. A rank's value may have such a small
    error although its bound is wider. Then this value proves as much as a value with a narrow bound.

    So the resolution of an element is limits.TOO_WIDE times the size of the tensor, or times the size of the element if
    the element is larger. An error above the resolution does not make a value wrong. A value with such an error within
    its bound proves nothing.

    Args:
        change: The change of `value` that an error must not hide, such as an update. The size of `change` takes the
            place of the size of `value`. If None, the size of `value` counts.

    Returns:
        A float64 tensor in the shape of `value`. None if an element is not finite, or if `change` is zero everywhere.
    """
    seen = value if change is None else change
    if not bool(seen.isfinite().all()) or (change is not None and not bool(change.any())):
        return None
    root = max(float(seen.square().mean().sqrt()) if seen.numel() else 0.0, scale)
    return limits.TOO_WIDE * seen.abs().clamp(min=root)


@dataclass(frozen=True)
class Expected:
    """All tensors that a subject must return for one draw, by name.

    Attributes:
        bits_used: name -> number of bits of the largest sum of magnitudes. Each element of the tensor has one such sum,
            of the terms behind the element.
        drops: name -> probability that dropout sets an element to zero, independent of other elements.
        again: Right values of the draw's second run on a backend whose order of summation may vary. If None, the second
            run must have the same bits as the first run.
    """

    tensors: Mapping[str, ExpectedTensor]
    bits_used: Mapping[str, int]
    drops: Mapping[str, float] = field(default_factory=dict)
    again: Expected | None = None
