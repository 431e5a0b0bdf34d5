"""Every fault of a rank is named, and nothing follows from it.  The whole matrix: `python -m studies.fault_matrix`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from equivtest.base import limits
from equivtest.ranks.pool import Pool
from tests.programs.faults import FAULTS
from tests.ranks.fault_cells import AT_ONCE, NAMINGS, VISIT, Cell, cells, run_cell

pytestmark = pytest.mark.ranks
FEW = [
    *(Cell(fault, "during", 2, (1,)) for fault in NAMINGS),
    *(Cell(fault, "before", 3, (1, 2)) for fault in AT_ONCE if fault != "hangs"),
    *(Cell(fault, "after", 3, (0,)) for fault in ("exits_0", "is_killed", "lacks_memory", "enters_other")),
]


@pytest.fixture(scope="module")
def pool(pool: Pool) -> Iterator[Pool]:
    with Pool(visit=VISIT, beside=pool) as visited:
        yield visited


@pytest.mark.parametrize("cell", FEW, ids=lambda cell: cell.id)
def test_faulty_rank_is_reported_first_within_the_time_limit(pool: Pool, cell: Cell) -> None:
    assert run_cell(pool, cell).problems == ()


def test_fault_matrix_has_every_fault_on_each_rank_at_each_moment() -> None:
    assert {cell.fault for cell in cells()} == FAULTS.keys() - {"nothing"}
    assert len(cells()) == 3 * (5 * len(NAMINGS) + 3 * len(AT_ONCE))


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        (Cell("nothing", "after", 2, (0,)), "named"),
        (Cell("raises", "after", 2, ()), "named"),
    ],
)
def test_fault_matrix_reports_a_fault_that_the_message_misnames(
    pool: Pool, cell: Cell, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell whose fault does not happen, or is named otherwise, has a problem."""
    monkeypatch.setitem(NAMINGS, "nothing", NAMINGS["is_killed"])
    assert problem in " ".join(run_cell(pool, cell).problems)


@pytest.mark.parametrize(("still_s", "num_problems"), [(0.0, 1), (9.0, 0)])
def test_fault_matrix_reports_a_late_answer_unless_the_machine_stood_still(
    pool: Pool, still_s: float, num_problems: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.ranks.fault_cells.LATE_S", -limits.CASE_S)
    result = run_cell(pool, Cell("raises", "after", 2, (0,)), lambda begun_s, ended_s: still_s)
    assert len(result.problems) == num_problems and result.still_s == still_s
