"""The tool that counts which values reveal which defect."""

import pytest

from equivtest.cases.case import Case
from equivtest.families.cross_entropy.gathered.case import RefusedGatheredCrossEntropyCase
from equivtest.families.linear.case import LinearCase
from studies.detection import Task, right, run_task
from studies.detection_table import Row, Tally, write_tables
from tests.defects.defect import defects


def test_detection_study_has_no_torch_result_for_refused_cases() -> None:
    assert right(RefusedGatheredCrossEntropyCase(world_size=1, positions=(2,)), 0) is None


def test_detection_study_has_a_torch_result_for_a_linear_case() -> None:
    case: Case = LinearCase(world_size=1, style="colwise", values=(("dense", 3),))

    found = right(case, 0)

    assert found is not None
    assert found["output"].shape == case.shapes()["output"]


def test_detection_study_stops_once_every_kind_of_values_rejected_the_defect() -> None:
    defect = next(defect for defect in defects() if defect.name == "input_gradient_averaged")

    row = run_task(Task(defect.name, is_defect=True, cases=10, enough=1))

    assert set(row.caught_by()) == set(row.kinds)
    assert 0 < row.num_cases < row.num_planned


@pytest.mark.parametrize(
    ("rejected", "only"), [((), "NONE"), (("dense",), "dense"), (("dense", "real"), "")], ids=["none", "one", "both"]
)
def test_detection_table_names_the_only_kind_of_values_that_catches_a_defect(
    rejected: tuple[str, ...], only: str
) -> None:
    row = Row(defects()[0].name, num_planned=2, kinds=("dense", "real"), num_cases=2)
    for kind in row.kinds:
        row.tally.add((kind, "float32"), rejected=kind in rejected, is_close=True)

    assert row.only() == only
    assert f"| {only} |" in write_tables([(defects()[0], row)], [], 1, 1, 1)


def test_detection_study_counts_rejections_without_compared_values_separately() -> None:
    tally = Tally()
    tally.add(("real", "float16"), rejected=True, is_close=True)
    tally.add(("real", "float16"), rejected=True, is_close=False)
    tally.add(("real", "float16"), rejected=True, is_close=None)

    assert (tally.of(tally.rejected), tally.of(tally.compared), tally.of(tally.missed)) == (3, 2, 1)
