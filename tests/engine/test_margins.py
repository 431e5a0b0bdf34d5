"""Margins of a run: counted by tensor and dtype, binned by powers of two, and written down."""

from __future__ import annotations

import pytest

from equivtest.report.margins import BINS, HEAD, Margins, merged, rows


def margins(*values: float) -> Margins:
    made = Margins()
    for value in values:
        made.add(value)
    return made


@pytest.mark.parametrize(
    ("margin", "place"), [(1.0, 0), (0.75, 0), (0.5, -1), (0.26, -1), (2.0**-10, -10), (1e-30, -10)]
)
def test_margin_is_counted_in_the_first_bin_that_contains_it(margin: float, place: int) -> None:
    assert margins(margin).bins == {place: 1}


def test_margins_of_zero_and_of_failures_are_in_no_bin() -> None:
    found = margins(0.0, 3.0)

    assert (found.bins, found.zeros, found.beyond, found.largest) == ({}, 1, 1, 3.0)


def test_mean_margin_ignores_failures() -> None:
    assert margins(0.25, 0.75, 1e300).mean == 0.5


def test_mean_margin_of_no_draws_is_zero() -> None:
    assert Margins().mean == 0.0


def test_margin_tables_of_several_properties_are_merged() -> None:
    key = ("output", "float32")
    table = merged([{key: margins(0.5)}, {key: margins(0.1, 0.9)}])

    assert (table[key].draws, table[key].largest) == (3, 0.9)


def test_row_of_the_table_of_margins_has_a_value_for_every_column() -> None:
    row = rows({("output", "float32"): margins(0.5, 0.4)})[0]

    assert len(row) == len(HEAD) == 7 + len(BINS)
    assert row[:5] == ("output", "float32", "2", "0.5", "0.45")
