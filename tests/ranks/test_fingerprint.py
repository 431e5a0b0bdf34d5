"""Fingerprints: what is measured of gloo and torch's CPU kernels, and what is concluded of others."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from equivtest.cases.values import draw
from equivtest.errors import Misuse
from equivtest.fingerprint.case import FUNCTIONS, NUM_ROWS, WIDTHS, FingerprintCase
from equivtest.fingerprint.measuring import Fingerprint, Reading, conclude, describe, measure, write
from equivtest.oracle.declared import load_arithmetics
from equivtest.oracle.rounding import TORCH_CPU
from equivtest.ranks.backend import Backend
from equivtest.ranks.pool import Pool

Answers = dict[str, torch.Tensor]


def right(case: FingerprintCase) -> list[Answers]:
    """Computes every rank's values, in the order of the ranks, rounded by IEEE 754."""
    given = draw(case, 0)
    points, total, tiny = given["points"], given["terms"][0].clone(), given["tiny"]
    for terms in given["terms"][1:]:
        total += terms
    found = {"sums": total.repeat(case.num_calls, 1), "tiny_sum": tiny[0], "product": given["left"] @ given["right"]}
    found["elements"] = torch.stack((points + points.roll(1), points * points.roll(1)))
    found |= {name: getattr(torch, name)(points) for name in FUNCTIONS}
    for width in WIDTHS:
        table = torch.zeros(NUM_ROWS, width, dtype=points.dtype)
        for row, index in zip(given[f"rows.{width}"], given["ids"].tolist(), strict=True):
            table[index] += row
        found[f"table.{width}"] = table
    return [{**found, "tiny_product": tiny[rank]} for rank in range(case.world_size)]


def concluded(change: Callable[[Answers], Answers], dtype: str = "float32", *, world_size: int = 2) -> Fingerprint:
    """Concludes after the same change of every rank's right answers."""
    case = FingerprintCase(world_size=world_size, dtype=dtype)
    return conclude(dtype, [Reading(case, draw(case, 0), tuple({**each, **change(each)} for each in right(case)))])


def cut_off_sums(each: Answers) -> Answers:
    """Two ranks allow one rounding to nearest: only a dtype with fewer bits allows other numbers."""
    return {"sums": each["sums"].nextafter(torch.tensor(0.0))}


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_measured_arithmetic_of_gloo_and_cpu_kernels_equals_the_declared(pool: Pool, dtype: str) -> None:
    found = measure(pool, dtype, (2, 4))

    assert found.record == TORCH_CPU[dtype] and not found.problems
    assert "order_varies=False: 8 sums over the ranks of the same operands had the same bits" in describe(found)


@pytest.mark.parametrize(
    ("change", "declares"),
    [
        (lambda each: {}, {}),
        (lambda each: {"sums": each["sums"].half().float()}, {"reduce": "float16"}),
        (lambda each: {"sums": each["sums"].bfloat16().float()}, {"reduce": "bfloat16"}),
        (lambda each: {"product": each["product"].half().float()}, {"accumulate": "float16"}),  # as TF32
        (lambda each: {"exp": each["exp"] * (1 + 12 * 2**-23)}, {"libm_ulp": 13.0}),
        (lambda each: {"elements": each["elements"].nextafter(torch.tensor(0.0))}, {"rounds_to_nearest": False}),
        (cut_off_sums, {"reduce": "float16", "rounds_to_nearest": False}),
        (lambda each: {"tiny_sum": each["tiny_sum"] * 0}, {"flushes_subnormals": True}),
        (lambda each: {"tiny_product": each["tiny_product"] * 0}, {"flushes_subnormals": True}),
        (lambda each: {"table.64": each["table.64"].nextafter(torch.tensor(0.0))}, {"adds_rows_in_order": False}),
    ],
    ids=[
        "arithmetic of torch", "sums of float16", "sums of bfloat16", "products as of TF32", "an inaccurate exp",
        "truncated sums", "sums off by a rounding too many", "sums flush subnormals",
        "kernels flush subnormals", "rows in another order",
    ],
)  # fmt: skip
def test_fingerprint_infers_each_field_of_the_arithmetic_from_measurements(
    change: Callable[[Answers], Answers], declares: dict[str, object]
) -> None:
    assert concluded(change).record == replace(TORCH_CPU["float32"], **declares)  # type: ignore[arg-type]


def test_fingerprint_finds_that_the_order_of_sums_varies_between_calls() -> None:
    terms = draw(FingerprintCase(world_size=4), 0)["terms"]
    backwards = terms[3] + terms[2] + terms[1] + terms[0]
    found = concluded(lambda each: {"sums": torch.stack((*each["sums"][:-1], backwards))}, world_size=4)

    assert found.record is not None and found.record.order_varies and found.record.reduce == "float32"


def test_fingerprint_reports_a_measurement_that_no_declaration_allows() -> None:
    for change, problem in (
        (
            lambda each: {"sums": each["sums"] * 1.5},
            "the errors of sums or products are larger than any declaration allows",
        ),
        (lambda each: {"tiny_sum": each["tiny_sum"] * 2}, "tiny_sum of"),
        (lambda each: {"product": each["product"] * float("nan")}, "the errors of sums or products"),
        (lambda each: {"exp": each["exp"] * float("nan")}, "rank 1 of 2: exp of numbers from 1/64 to 8 is not finite"),
    ):
        found = concluded(change)
        assert found.record is None and any(problem in each for each in found.problems), found


def test_fingerprint_reports_ranks_with_different_sums() -> None:
    case = FingerprintCase(world_size=2)
    answers = right(case)
    answers[1] |= {"sums": answers[1]["sums"].nextafter(torch.tensor(0.0))}
    found = conclude("float32", [Reading(case, draw(case, 0), tuple(answers))])

    assert found.record is None
    assert found.problems == ("rank 1 of 2: all_reduce gave other bits here than on rank 0",)


def test_written_declaration_can_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "measured_by_a_vendor.py"
    monkeypatch.syspath_prepend(tmp_path)
    found = [concluded(lambda each: {}), Fingerprint("bfloat16", lacking="no such dtype")]
    write(found, Backend("gloo", "cpu"), (2, 4), path)

    assert load_arithmetics("measured_by_a_vendor:MEASURED") == {"float32": TORCH_CPU["float32"]}
    assert path.read_text().startswith(
        '"""What gloo on cpu computes, as measured on 2 and 4 ranks; nothing of it is pro'
    )
    with pytest.raises(Misuse, match="cannot be written: File exists; name a new file"):
        write(found, Backend("gloo", "cpu"), (2, 4), path)
    del sys.modules["measured_by_a_vendor"]
