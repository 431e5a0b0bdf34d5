"""Modules of which the bound says nothing: from where on, and what would do."""

from __future__ import annotations

from typing import Any

import pytest

from equivtest.errors import Misuse
from equivtest.module import module_property
from equivtest.property import Space

HERE = "tests.rank_programs_module:"


def told(build: str, shape: tuple[int, ...], dtype: str, **fields: Any) -> str:
    prop = module_property(HERE + build, HERE + "whole", (shape,), batch="whole", **fields)
    with pytest.raises(Misuse) as raised:
        prop.cases(Space((1,), (dtype,)))
    return str(raised.value)


def test_a_bound_that_grows_from_layer_to_layer_is_told_with_the_layer_where_it_ends() -> None:
    """In no dtype would it do, by parts it would."""
    message = told("deep", (2, 3), "float32", by_parts=False)

    assert (
        "may come to more than 0.1 of output; the bound says nothing from what 6.0 gives on (nor would float64 do): "
        "say by_parts=True, or nothing of it, for each part to be judged by itself; or judge a smaller part" in message
    )


def test_a_bound_that_ends_in_the_backward_is_told_with_the_part_and_the_dtype_that_would_do() -> None:
    message = told("encoder_layer", (1, 3, 4), "float32", by_parts=False)

    assert (
        "more than 0.1 of grad.x; the bound says nothing from the gradient that comes back to norm1:input on: say "
        "by_parts=True, or nothing of it, for each part to be judged by itself; or take float64, in which it would do "
        "(--dtypes float64); or judge a smaller part" in message
    )


def test_a_part_of_which_the_bound_says_nothing_is_named() -> None:
    message = told("encoder_layer", (1, 3, 4), "bfloat16")

    assert (
        "of grad.x; the first part of which the bound says nothing is what self_attn[0] gives: take float64, in which "
        "it would do (--dtypes float64); or judge a smaller part" in message
    )
