"""Cases of a linear layer that the tests of values and of the oracle draw."""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st

from equivtest.families.linear.case import LINEAR_MODES, LinearCase
from equivtest.tensors import DTYPES

SIZES = (1, 2, 3, 4, 5, 7, 8, 12, 31, 32, 33)
SETTINGS = settings(max_examples=60, derandomize=True, database=None, deadline=None)


def linear_case(**fields: object) -> LinearCase:
    fields = {
        "world_size": 3,
        "style": "rowwise",
        "leading": (5,),
        "in_features": 33,
        "out_features": 31,
        "bias": True,
        "x_is_dtensor": True,
        **fields,
    }
    flags = ("x", "weight", "bias") if fields["bias"] else ("x", "weight")
    return LinearCase(**{"requires_grad": flags, **fields})


@st.composite
def linear_cases(draw_from, modes=LINEAR_MODES, dtypes=tuple(DTYPES)):
    sizes = st.sampled_from(SIZES)
    leading = tuple(draw_from(st.lists(sizes, max_size=3)))
    return linear_case(
        world_size=draw_from(st.integers(1, 8)),
        leading=leading if math.prod(leading) < 2000 else leading[:2],
        in_features=draw_from(sizes),
        out_features=draw_from(sizes),
        bias=draw_from(st.booleans()),
        dtype=draw_from(st.sampled_from(dtypes)),
        values=((draw_from(st.sampled_from(modes)), draw_from(st.integers(0, 2**40))),),
    )
