"""Buffers that follow the rows of a batch, either each rank's rows or the rows of all ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from equivtest.errors import Misuse, PropertyMisuse
from equivtest.module import ids, module_property, real
from equivtest.oracle import expect
from equivtest.programs.case import ModuleCase
from equivtest.property import Property, Space
from equivtest.ranks.pool import Pool
from equivtest.verdicts.judging import judge
from tests.drawing import smallest

HERE = "tests.programs.state:"
OWN, WHOLE = "own rows", "whole batch"
KINDS: dict[str, Any] = {"inputs": (("x", "real", ("batch", 3)), ("kind", "ids(2)", ("batch",)))}
DTYPES = ("float32", "float64")


def case_of(build: str = "counting", parallelize: str = "whole_batch", **fields: Any) -> ModuleCase:
    """Five rows on two ranks, unless said otherwise."""
    rows = fields.pop("rows", 5)
    inputs = {"x_shape": (rows, 3)} if build == "normed" else {**KINDS, "sizes": (("batch", rows),)}
    fields = {"world_size": 2, "batch": "mean of parts", "state": WHOLE, **inputs} | fields
    return ModuleCase(build=HERE + build, parallelize=HERE + parallelize, **fields)


def wrong_tensors(case: ModuleCase, pool: Pool) -> set[str]:
    verdicts = judge("module", case, pool)
    return {mismatch.tensor for verdict in verdicts for mismatch in verdict.judgement.mismatches}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "fields",
    [
        {"world_size": 3},
        {"world_size": 7, "rows": 7, "values": (("real", 0),)},
        {"batch": "sum of parts", "parallelize": "summing"},
        {"dtype": "bfloat16", "by_parts": True, "rows": 4, "values": (("real", 0),)},
        {"build": "normed", "dtype": "float64", "values": (("real", 0),)},
        {"build": "normed", "parallelize": "summing", "batch": "sum of parts", "values": (("real", 0),)},
    ],
)
def test_buffers_reduced_over_the_whole_batch_pass(pool: Pool, fields: dict[str, Any]) -> None:
    assert wrong_tensors(case_of(**fields), pool) == set()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("fields", "first"),
    [
        ({}, "buffer.counts"),
        ({"batch": "sum of parts"}, "buffer.counts"),
        ({"dtype": "bfloat16", "by_parts": True, "rows": 4, "values": (("real", 0),)}, "buffer.counts"),
        ({"build": "normed", "dtype": "float64", "values": (("real", 0),)}, "output"),
    ],
)
def test_buffers_that_are_not_reduced_are_rejected(pool: Pool, fields: dict[str, Any], first: str) -> None:
    assert first in wrong_tensors(case_of(parallelize="own_rows", **fields), pool)


@pytest.mark.ranks
@pytest.mark.parametrize("build", ["counting", "normed"])
def test_reduced_buffers_are_rejected_if_state_says_own_rows(pool: Pool, build: str) -> None:
    values = (("real", 0),)

    assert wrong_tensors(case_of(build, "own_rows", state=OWN, values=values), pool) == set()
    assert any(name.startswith("buffer.") for name in wrong_tensors(case_of(build, state=OWN, values=values), pool))


def test_reference_runs_once_if_buffers_follow_the_whole_batch() -> None:
    case = case_of("normed", dtype="float64", values=(("real", 0),))
    found, own = (expect(each, 0).tensors for each in (case, case_of("normed", state=OWN, values=case.values)))

    assert found["output"].value.shape == own["output"].value.shape == (5, 4)
    assert found["buffer.mean"].value.shape == (4,) and own["buffer.mean"].value.shape == (2, 4)
    assert not found["output"].value.allclose(own["output"].value)


@pytest.mark.parametrize("build", ["counting", "normed"])
def test_buffer_that_depends_on_the_rows_needs_the_state_argument(build: str) -> None:
    with pytest.raises(PropertyMisuse, match=r"buffer \w+ follows the rows .* state='own rows' .* state='whole batch'"):
        case_of(build, state="")


def test_property_of_a_module_whose_buffers_change_needs_the_state_argument() -> None:
    with pytest.raises(Misuse, match=r"state='own rows' if .* or state='whole batch' if"):
        property_of("counting").cases(Space((2,), DTYPES))


def test_property_draws_cases_with_the_declared_state_argument() -> None:
    prop = property_of("counting", state=WHOLE)

    assert smallest(prop.cases(Space((2,), DTYPES))).judge.state == WHOLE


@pytest.mark.ranks
@pytest.mark.parametrize("state", [OWN, WHOLE])
def test_batch_norm_is_judged_on_own_rows_unless_state_says_whole_batch(pool: Pool, state: str) -> None:
    fields = {"dtype": "float64", "values": (("real", 0),), "x_shape": (5, 3), "inputs": (), "sizes": ()}
    case = case_of("batch_norm", "own_rows", state="", **fields)

    assert wrong_tensors(case, pool) == set()
    assert ("output" in wrong_tensors(replace(case, state=state), pool)) == (state == WHOLE)


@pytest.mark.ranks
def test_batch_norm_of_an_unknown_class_needs_the_state_argument(pool: Pool) -> None:
    fields = {"dtype": "float64", "values": (("real", 0),), "x_shape": (5, 3), "inputs": (), "sizes": ()}
    case = case_of("batch_norm", "other_norm", state="", **fields)

    with pytest.raises(
        Misuse, match=r"module\.1 is a OtherNorm, and each rank .* state='own rows' .* state='whole batch'"
    ):
        judge("module", case, pool)
    assert wrong_tensors(replace(case, state=OWN), pool) == set()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_buffer_that_counts_calls_needs_no_state_argument(world_size: int) -> None:
    assert case_of("called", world_size=world_size, state="").is_divided


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"build": "counting_loss"}, r"the first dim of output\.loss must be .* Judge\(outputs=\('logits',\)\)"),
        ({"inputs": (*KINDS["inputs"], ("shift", "real", (3,)))}, "the first dim of shift must be the rows"),
        ({"build": "counting_loss", "batch": "parts of the whole", "state": OWN, "step": f"{HERE}step",
          "values": (("real", 0),)}, "in a step the buffers must follow the rows of the whole batch"),
        ({"state": "whole"}, "state must be one of"),
    ],
)  # fmt: skip
def test_state_argument_that_contradicts_the_case_raises_misuse(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Misuse, match=message):
        case_of(**fields)


def property_of(build: str, **fields: Any) -> Property:
    return module_property(
        HERE + build,
        f"{HERE}whole_batch",
        inputs={"x": real(("batch", 3)), "kind": ids(2, ("batch",))},
        batch="mean of parts",
        **fields,
    )


def test_buffer_that_depends_on_the_first_row_needs_the_state_argument() -> None:
    prop = module_property(f"{HERE}first", f"{HERE}own_rows", x_shapes=[(4, 3)], batch="mean of parts")

    with pytest.raises(Misuse, match=r"state='own rows' .* state='whole batch'"):
        prop.cases(Space((2,), ("float32",)))
