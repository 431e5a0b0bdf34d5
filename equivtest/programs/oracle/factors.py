"""Accepts constant factors in a backward, because a program may scale its loss and divide its gradients later.

If a program applies such a factor, the gradient at a boundary is a multiple of the unsharded gradient on all ranks. The
oracle accepts a factor only if the ranks' values show that the program has taken the factor out again. The oracle
computes everything twice: first from the ranks' values with the factor left in, then from the values divided by the
factor. Each gradient of a parameter, an input or a boundary that the factor reaches must distinguish the two
computations. Each gradient of a parameter or an input must agree with the second computation. So claims still fail for
a factor that is left in, for a factor on one of two paths or on one of several ranks, and for a factor so near to 1
that a bound cannot see it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import torch

from equivtest.base import limits
from equivtest.oracle.expected import Expected, ExpectedTensor, says_nothing
from equivtest.oracle.rounding import Bounded
from equivtest.programs.boundaries import is_boundary
from equivtest.programs.micro_batches import split_micro_batch
from equivtest.programs.oracle.held import HeldAt, Whole, is_agreed

if TYPE_CHECKING:
    from equivtest.programs.oracle.forced import Forced

GRADIENT = "grad."
LARGEST_DENOMINATOR = 64
"""Largest denominator of a simple factor; covers numbers of ranks, micro-batches and rows, times a power of two."""

SCALED = 4
"""Number of roundings of a share of a gradient, if a step scales the share before the ranks' shares are added.

Derived here.  In a mean over n terms, a rank with m terms may divide its sum by n, or by m and multiply by m / n, or
multiply by ranks / n if ranks are averaged later: a quotient that is rounded once, and three products at most.
"""

NEAR = 16
"""Roundings by which a ratio of norms may be off; decides which factor is tried first, never which is accepted."""

Ran = tuple[Expected, Sequence["Forced"]]
"""(right answers, run of the unsharded module on each part of the batch)."""

HeldOf = Callable[[str, tuple[int, ...]], torch.Tensor | None]
"""(name of an answer, its global shape) -> the ranks' values, assembled; None if some are missing."""


class Rounded(NamedTuple):
    """Extra errors of values that a program scales by a factor.

    Attributes:
        error: Extra error of each value if its product with the factor is rounded.
        lost: Largest error of a product that underflows, even if the factor is a power of two.
        share: Relative error of one rounding.
    """

    error: torch.Tensor
    lost: float
    share: float


class Multiple(NamedTuple):
    """Values of the ranks that are a constant factor times the right values.

    Attributes:
        right: The right values multiplied by the factor.
        whole: The ranks' values.
    """

    factor: float
    right: Bounded
    whole: Whole


def multiple_of(
    held: HeldAt, name: str, whole: Whole, right: Bounded, rounded: Rounded, known: Sequence[float] = ()
) -> Multiple | None:
    """Finds a factor for which the ranks' values are a multiple of the right values.

    The result is None if there is no such factor.

    The factors in `known`, which belong to boundaries nearer to the loss, are tried first, in their order. If the bound
    is too wide to estimate another factor, no other factor is tried.
    """
    factors = [*known]
    if not says_nothing(right.value, right.allowed, share=limits.STILL_SHOWS):
        ratio = float(whole.value.double().norm() / right.value.norm())
        factors += [*_near(ratio, rounded.share), ratio] if 0 < ratio < math.inf else []
    for factor in dict.fromkeys(factors):
        allowed = right.allowed if is_exact(factor) else right.allowed + rounded.error
        multiple = Bounded(right.value * factor, allowed * factor + rounded.lost, right.derivation)
        found = held(name, multiple)
        if factor != 1 and found is not None and is_agreed(found, multiple):
            return Multiple(factor, multiple, found)
    return None


def _near(ratio: float, share: float) -> Iterator[float]:
    """Yields up to two factors near a ratio of norms. Each factor is a simple fraction times a power of two.

    The first candidate is the simplest fraction within NEAR roundings of the ratio, if there is one. The last candidate
    is the nearest fraction.
    """
    fraction, exponent = math.frexp(ratio)
    for denominator in range(1, LARGEST_DENOMINATOR + 1):
        simple = round(fraction * denominator) / denominator
        if abs(simple - fraction) <= NEAR * share * fraction:
            yield simple * 2.0**exponent
            break
    yield float(Fraction(fraction).limit_denominator(LARGEST_DENOMINATOR) * Fraction(2) ** exponent)


def is_exact(factor: float) -> bool:
    """True if the factor is a power of two. Then scaling by the factor is exact unless a value underflows."""
    return math.frexp(factor)[0] == 0.5


def rounds_factors(runs: Sequence[Forced]) -> bool:
    """True if a factor of these runs is no power of two. Then a program rounds when it takes the factor out."""
    return not all(is_exact(factor) for run in runs for factor in run.factors.values())


def divided(whole: Whole, factor: float) -> Whole:
    spread, magnitude = (None if each is None else each / factor for each in (whole.spread, whole.magnitude))
    return whole._replace(value=whole.value.double() / factor, spread=spread, magnitude=magnitude)


def without_factors(ran: Callable[[bool], Ran], held: HeldOf) -> Expected:
    """Returns the right values. Constant factors of the backward are divided out if the program divides them out.

    If the program leaves a factor in, or if a bound is too wide to tell, nothing is divided out.  In these cases the
    ranks' value at the first boundary with the factor counts as wrong.

    Args:
        ran: Function that returns the right values and the runs. If its argument is True, the factors are divided out.
        held: Function that assembles the ranks' values of a tensor.
    """
    expected, left_in = ran(False)  # noqa: FBT003
    wrong = {name for run in left_in for name in run.wrong}
    if not wrong or not all(name.startswith(GRADIENT) for name in wrong):
        return expected
    other, taken_out = ran(True)  # noqa: FBT003
    if any(run.wrong for run in taken_out) or not any(run.factors for run in taken_out):
        return expected
    are_told_apart = all(_tells_apart(*runs) for runs in zip(left_in, taken_out, strict=True))
    return other if are_told_apart and _is_taken_out(expected.tensors, other.tensors, held) else expected


def _tells_apart(left_in: Forced, taken_out: Forced) -> bool:
    """True unless the ranks' value at some boundary agrees with both runs. Such a bound cannot show the factor."""
    both = left_in.agreed.keys() & taken_out.agreed.keys()
    return all(
        torch.equal(left_in.agreed[name].value, taken_out.agreed[name].value) or _is_zero(taken_out.agreed[name])
        for name in both
    )


def _is_taken_out(left_in: Mapping[str, ExpectedTensor], taken_out: Mapping[str, ExpectedTensor], held: HeldOf) -> bool:
    """True if the ranks' gradients show that the program has taken the factor out.

    This needs two conditions. All gradients of parameters and inputs agree with `taken_out`, and no gradient that the
    factor reaches agrees with `left_in`.
    """
    for name, right in taken_out.items():
        if not (own := split_micro_batch(name)[1]).startswith(GRADIENT) or is_boundary(own):
            continue
        value = held(name, tuple(right.value.shape))
        if value is None and right.may_be_none:
            continue
        if value is None or not _agrees(value, right):
            return False
        is_reached = not torch.equal(left_in[name].value, right.value)
        if is_reached and not _is_zero(right) and _agrees(value, left_in[name]):
            return False
    return True


def _agrees(value: torch.Tensor, right: ExpectedTensor) -> bool:
    error = (value.double() - right.value).abs()
    is_within = error <= (0.0 if right.allowed is None else right.allowed)
    return bool((is_within if right.resolution is None else is_within | (error <= right.resolution)).all())


def _is_zero(right: Bounded | ExpectedTensor) -> bool:
    """True if the right value is zero within its bound. Then each multiple of the right value is zero too."""
    return right.allowed is None or bool((right.value.abs() <= right.allowed).all())
