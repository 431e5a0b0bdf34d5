"""Lists operators that draw at random or leave memory unwritten. Only one result of each listed call is right.

Such calls have, for example, the probabilities 0 and 1, distributions of zero width, or histograms with one bin for all
drawn numbers.
"""

from __future__ import annotations

import math

import torch

from equivtest.families.operators.case_forms import each
from equivtest.families.operators.case_operator import BITS, POSITIVE, chooses, in_place


def _drawn_below(x: torch.Tensor) -> torch.Tensor:
    """Draws with a standard deviation of 2**-10. No drawn number is 16 deviations away."""
    drawn: torch.Tensor = in_place("normal_")(x, mean=0.0, std=2.0**-10)
    return drawn.abs() < 2.0**-6


def _all_drawn(x: torch.Tensor) -> torch.Tensor:
    """Draws every index once, and sorts the indices, so that only one result is right."""
    return torch.multinomial(x, x.shape[-1]).sort(-1).values


ROWS = (
    chooses("bernoulli", torch.bernoulli, domain=BITS),
    chooses("multinomial", _all_drawn, domain=POSITIVE, num_dims=(1, 2)),
    chooses("exponential", lambda x: in_place("exponential_")(x, lambd=math.inf), rounds=True),
    chooses("geometric", in_place("geometric_"), each(p=1 - 2.0**-52), rounds=True),
    chooses("log_normal", in_place("log_normal_"), each(mean=0.0, std=1e-300), rounds=True),
    chooses("normal", in_place("normal_"), each(mean=2.0, std=0.0)),
    chooses("normal of a deviation", _drawn_below),
    chooses("uniform", in_place("uniform_"), each(**{"from": 2.0, "to": 2.0})),
    chooses("rand_like", lambda x: torch.rand_like(x).floor(), rounds=True),
    chooses("randn_like", lambda x: torch.randn_like(x).isfinite()),
    chooses("randint_like", lambda x: torch.randint_like(x, 3, 4)),
    chooses("empty_like", lambda x: torch.empty_like(x).zero_()),
    chooses("new_empty", lambda x: x.new_empty(x.shape).zero_()),
    chooses("new_empty_strided", lambda x: x.new_empty_strided(x.shape, x.stride()).zero_()),
)
