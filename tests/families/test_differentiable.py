"""Differentiable collectives: the case, the oracle's adjoint, and what torch refuses."""

from __future__ import annotations

from typing import Any

import pytest

from equivtest.cases.values import draw
from equivtest.families.differentiable.case import CALLS, DifferentiableCase
from equivtest.families.differentiable.subject import FUNCTIONS
from equivtest.oracle import expect
from equivtest.ranks.pool import Pool
from tests.families.refusing import refuses

PROGRAMS = "tests.programs.without_backward:"


def case_of(**fields: Any) -> DifferentiableCase:
    return DifferentiableCase(**{"world_size": 4, "collectives": tuple(CALLS), "numel": 3, **fields})


test_error_for_an_invalid_case_names_the_invalid_field = refuses(
    case_of,
    ({"collectives": ("all_gather",)}, "collectives must be some of nn_reduce, .*, got 'all_gather'"),
    ({"collectives": ("all_reduce",) * 2}, r"collectives must be different ones, got \('all_reduce', 'all_reduce'\)"),
    ({"collectives": ()}, r"collectives must be different ones, got \(\)"),
    ({"world_size": 3}, "nn_all_reduce_avg, .* rounds unless world_size is a power of two"),
)


def test_table_of_differentiable_collectives_lists_exactly_the_functions_that_can_run() -> None:
    assert {call.function for call in CALLS.values()} == FUNCTIONS.keys()


@pytest.mark.parametrize("name", CALLS)
def test_expected_gradient_is_the_adjoint_of_the_forward(name: str) -> None:
    """On integers both sums of products are exact in float64."""
    case = case_of(collectives=(name,), dtype="float16")
    given, expected = draw(case, 0), expect(case, 0).tensors
    output, gradient = expected[name].value, expected[f"grad.{name}"].value
    x, cotangent = (given[each].double()[:, : output.shape[1]] for each in ("x", "cotangent"))

    assert float((output * cotangent).sum()) == float((x * gradient).sum()) != 0


def test_uneven_all_to_all_has_parts_of_full_half_and_zero_length() -> None:
    case = case_of()

    assert {case.split(source, target) for source in range(4) for target in range(4)} == {0, 2, 3}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("broadcast", "an autograd kernel was not registered"),
        ("all_reduce_avg", "all_reduce backward only supports 'sum' reduction, got 'avg'"),
        ("reduce_scatter_avg", "reduce_scatter_tensor backward only supports 'sum' reduction, got 'avg'"),
        ("all_gather_base", "Backend not supported!"),
    ],
)
def test_collective_without_a_backward_raises_unsupported(pool: Pool, name: str, words: str) -> None:
    """That is why it is not among the cases; once it has a backward, it belongs there."""
    collective = "nn_all_reduce" if name in ("broadcast", "all_reduce_avg") else "nn_reduce_scatter"
    case = DifferentiableCase(world_size=2, collectives=(collective,))

    replies = pool.run(PROGRAMS + name, case, limit_s=20, may_raise=True)

    assert all(words in reply.error_text for reply in replies), replies
