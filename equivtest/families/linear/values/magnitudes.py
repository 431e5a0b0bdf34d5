"""Chooses odd integers for the tensors of a linear layer, as large as possible with exact sums.

Letters: T tokens, K in_features, N out_features, B the limit for the magnitudes of one sum; x (T, K), W (N, K), G (T,
N) as in `equivtest.families.linear.values.exact`.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import astuple, dataclass

from equivtest.cases.values.integers import odd_floor

_SCALES = tuple(itertools.product((1.0, 0.5, 2.0, 0.25, 4.0), repeat=2))  # tried around balanced magnitudes


def lowest(magnitude: int) -> int:
    """Returns the smallest odd integer that is at least seven eighths of `magnitude`, which is odd."""
    return magnitude - magnitude // 8 // 2 * 2


@dataclass(frozen=True)
class Magnitudes:
    """Largest magnitudes of x, weight and cotangent in one draw. All magnitudes are odd.

    One column of x, one row of the weight and one row of the cotangent have larger numbers, up to `x_peak`,
    `weight_peak` and `cotangent_peak`.
    """

    x: int
    weight: int
    cotangent: int
    x_peak: int
    weight_peak: int
    cotangent_peak: int

    def smallest_sums(self, tokens: int, features: int, outputs: int) -> tuple[int, int, int]:
        """Returns lower limits for the sums of magnitudes behind elements of the output, grad.x and grad.weight.

        Each drawn number is assumed to be at least seven eighths of its largest magnitude.
        """
        x, weight, cotangent, x_peak, weight_peak, cotangent_peak = (lowest(m) for m in astuple(self))
        return (
            ((features - 1) * x + x_peak) * weight_peak,
            ((outputs - 1) * weight + weight_peak) * cotangent_peak,
            ((tokens - 1) * cotangent + cotangent_peak) * x_peak,
        )


@functools.lru_cache(maxsize=1024)
def choose_magnitudes(tokens: int, features: int, outputs: int, limit: int, output_limit: int) -> Magnitudes:
    """Returns odd magnitudes for which the sums have as many bits as possible.

    Letters: T tokens, K in_features, N out_features; x, W and G stand for the magnitudes of x, weight and cotangent.

    Derived here. With one magnitude per tensor, the magnitudes of the products behind one element add up to K x W in
    the output, to N G W in grad.x, and to T G x in grad.weight. All three sums equal `limit` if x = sqrt(limit N / (K
    T)), W = sqrt(limit T / (K N)) and G = sqrt(limit K / (N T)). These roots are rounded down to odd integers. If the
    dtype has few bits, this is too coarse, so the neighbouring odd integers are tried too. The choice prefers sums that
    reach limit / 2: first the output's sum, then as many other sums as possible.

    Args:
        tokens, features, outputs: Largest number of nonzero terms in a sum over tokens, features and outputs, from 1 to
            `limit`.
        limit: Largest sum of the magnitudes of the terms behind one element: 2**p for p significand bits.
        output_limit: Largest sum of the magnitudes of the products behind one output element, to which the bias is
            added.
    """
    best, best_score = None, (-1, -1)
    for x_scale, weight_scale in _SCALES:
        for peak_first in (False, True):
            found = _fill(tokens, features, outputs, limit, output_limit, x_scale, weight_scale, peak_first=peak_first)
            reached = [2 * smallest >= limit for smallest in found.smallest_sums(tokens, features, outputs)]
            score = (int(reached[0]), sum(reached))
            if score > best_score:
                best, best_score = found, score
            if all(reached):
                return found
    assert best is not None
    return best


def _fill(
    tokens: int,
    features: int,
    outputs: int,
    limit: int,
    output_limit: int,
    x_scale: float,
    weight_scale: float,
    *,
    peak_first: bool,
) -> Magnitudes:
    """Returns magnitudes near those that make all sums equal: x times `x_scale`, the weight times `weight_scale`.

    All other magnitudes are the largest that then fit. If `peak_first` is True, the weight's peak is chosen before the
    cotangent's magnitude, which is then smaller.
    """
    x = min(math.isqrt(limit * outputs // (features * tokens)), output_limit // features, limit // tokens)
    x = odd_floor(min(max(1, round(x * x_scale)), output_limit // features, limit // tokens))
    weight = min(math.isqrt(limit * tokens // (features * outputs)), output_limit // (features * x), limit // outputs)
    weight = odd_floor(min(max(1, round(weight * weight_scale)), output_limit // (features * x), limit // outputs))
    cotangent = 1 if peak_first else odd_floor(min(limit // (outputs * weight), limit // (tokens * x)))
    weight_peak = odd_floor(min(output_limit // (features * x), limit // cotangent - (outputs - 1) * weight))
    weight_sum = (outputs - 1) * weight + weight_peak
    if peak_first:
        cotangent = odd_floor(min(limit // weight_sum, limit // (tokens * x)))
    cotangent_peak = odd_floor(min(limit // weight_sum, limit // x - (tokens - 1) * cotangent))
    cotangent_sum = (tokens - 1) * cotangent + cotangent_peak
    x_peak = odd_floor(min(output_limit // weight_peak - (features - 1) * x, limit // cotangent_sum))
    return Magnitudes(x, weight, cotangent, x_peak, weight_peak, cotangent_peak)
