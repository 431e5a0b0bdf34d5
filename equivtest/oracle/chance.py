"""Bounds how often an event may happen by chance, by the exact limits of a binomial count.

Letters: n independent events, each of probability q; X of them happen.

    P(X = k) = n! / (k! (n - k)!) q**k (1 - q)**(n - k)

The code adds these probabilities from either end, term by term, while the sum stays below half of the allowed
probability. It uses no normal approximation and no inequality. A generator compares a number of at least 24 bits with
q, so the probability of an event is off by at most delta = 2**-23. Every P(X = k) is off by at most the factor exp(n
delta / min(q, 1 - q)). The sums of the code are off by far less than a factor of 2. The limits allow for both errors.

Source: at::bernoulli_distribution in ATen/core/TransformationHelper.h and curand_uniform, which the
fused dropout of ATen/native/cuda/Dropout.cu compares with q (2.13.0).
"""

from __future__ import annotations

import functools
import math

import torch

DELTA = 2.0**-23


@functools.lru_cache(maxsize=2**12)
def count_limits(num: int, probability: float, alarm: float, *, delta: float = DELTA) -> tuple[int, int]:
    """Returns two limits (low, high) for a count of `num` events.

    By chance a count is below `low` or above `high` with a probability of at most `alarm`.

    Args:
        probability: Probability of one event, above 0 and below 1.
        alarm: Allowed probability, above 0 and below 1.
        delta: Largest error of `probability`.
    """
    share = alarm / 2 / 2 / math.exp(num * delta / min(probability, 1 - probability))
    counts = torch.arange(num + 1, dtype=torch.float64)
    ways = math.lgamma(num + 1) - torch.lgamma(counts + 1) - torch.lgamma(num - counts + 1)
    chances = (ways + counts * math.log(probability) + (num - counts) * math.log1p(-probability)).exp()
    low = int((chances.cumsum(0) <= share).sum())
    high = num - int((chances.flip(0).cumsum(0) <= share).sum())
    return low, high


def agreement(probability: float) -> float:
    """Returns the probability that two independent events have the same outcome: both happen, or neither happens."""
    return probability**2 + (1 - probability) ** 2
