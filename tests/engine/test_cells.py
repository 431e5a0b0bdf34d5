"""Cells in the report: how often each claim came to a conclusion, and where least."""

from __future__ import annotations

from typing import Any

from equivtest.report.cells import as_csv, cells_of, in_words
from equivtest.report.handover import Record
from equivtest.report.tally import Tally
from tests.engine.test_report import record, tally

CLAIMS = ("equals_unsharded", "repeats_itself", "trains_like_unsharded")


def holding(claim: str, count: int = 1, **changes: Any) -> list[Record]:
    """So many records on which that claim alone was judged, and holds."""
    return [record(verdicts={claim: "holds"}, **changes)] * count


def counted(*records: Record) -> Tally:
    """The tally of those records, of two dtypes."""
    others = holding("repeats_itself", dtype="float64")
    return tally(*records, *others, claims=CLAIMS, of_any_dtype=("repeats_itself",))


def test_claim_has_a_cell_for_each_dtype_and_kind_of_shard() -> None:
    cells = cells_of(counted(*holding("equals_unsharded")))

    assert {(cell.claim, cell.dtype, cell.shard_kind) for cell in cells} == {
        *(
            ("equals_unsharded", dtype, kind)
            for dtype in ("float32", "float64")
            for kind in ("even", "uneven", "empty")
        ),
        *(("repeats_itself", "any", kind) for kind in ("even", "uneven", "empty")),
    }


def test_cell_counts_only_holding_and_failed_verdicts_as_conclusive() -> None:
    verdicts = ["holds", "value", "inconclusive", "known", "not_supported", "declined"]
    cells = cells_of(tally(*(record(verdicts={"equals_unsharded": kind}) for kind in verdicts)))

    assert [cell.row[5:] for cell in cells if cell.shard_kind == "uneven"] == [(2, 1, 1, 1, 1)]


def test_summary_names_the_cell_with_the_fewest_conclusive_verdicts() -> None:
    full = [
        each
        for kind in ("even", "uneven", "empty")
        for dtype in ("float32", "float64")
        for each in holding(
            "equals_unsharded", 3 if (kind, dtype) == ("even", "float64") else 20, shard_kind=kind, dtype=dtype
        )
    ]
    repeats = [each for kind in ("even", "uneven", "empty") for each in holding("repeats_itself", 20, shard_kind=kind)]

    assert in_words(counted(*full, *repeats)) == (
        "rowwise_linear: 1 of 9 cells have fewer than 5 conclusive verdicts, 0 are more than 5% inconclusive; "
        "fewest: 3 in equals_unsharded, w3, float64, even"
    )


def test_summary_counts_cells_with_over_five_percent_inconclusive_verdicts() -> None:
    told = []
    for holds in (19, 18):
        verdicts = [*holding("equals_unsharded", holds), record(verdicts={"equals_unsharded": "inconclusive"})]
        told.append(in_words(counted(*verdicts)).partition(";")[0].rpartition(", ")[2])

    assert told == ["0 are more than 5% inconclusive", "1 are more than 5% inconclusive"]


def test_property_that_did_not_run_has_no_cells() -> None:
    assert (in_words(tally()), as_csv([tally()]).count("\n")) == ("", 1)


def test_csv_table_has_a_line_for_every_cell() -> None:
    assert as_csv([counted(*holding("equals_unsharded", 3))]).splitlines()[:2] == [
        "property,claim,world size,dtype,shards,conclusive,inconclusive,known,not_supported,declined",
        "rowwise_linear,equals_unsharded,3,float32,even,0,0,0,0,0",
    ]
