"""Whose fault a failure is: each call of a watched visit, judged from its own operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.distributed.tensor.parallel import loss_parallel

from equivtest.cases.case import Case
from equivtest.diagnose.blame import DECLINED, HELD, blame
from equivtest.diagnose.calls import first_wrong
from equivtest.diagnose.wholes import whole_arguments
from equivtest.families.collectives.case import CollectivesCase
from equivtest.families.linear.case import LinearCase
from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.layout import Layout, parse_placement
from equivtest.oracle.single_collective import Inconsistent, Right, Unjudged, premultiplied, right_results
from equivtest.oracle.single_operation import right_of_operation
from equivtest.programs.case import ModuleCase
from equivtest.ranks.backend import Backend
from equivtest.ranks.observe.notes import Part
from equivtest.ranks.observe.watching import _has_another_meaning
from equivtest.ranks.pool import Pool
from equivtest.ranks.reply import Reply
from equivtest.verdicts.judging import judge_replies
from equivtest.verdicts.verdict import Judgement, Verdict
from tests.programs import sharded_layers as layers
from tests.programs.planted import FAULT

LINEAR = LinearCase(world_size=2, style="rowwise", in_features=4, out_features=3, dtype="float16")
FETCH = FetchCase(world_size=2, parameters=((5,),), requires_grad=(True,), collective="all_gather")
PROGRAMS = "tests.programs.blame:"


def told(subject: str, case: Case, pool: Pool, kind: str = "value") -> str:
    """Whose fault it is that the subject fails on the case."""

    def is_shown_by(replies: Sequence[Reply]) -> bool:
        return any(verdict.failed for verdict in judge_replies(subject, case, replies))

    return blame(Verdict(claim="", subject=subject, case=case, judgement=Judgement(kind)), pool, is_shown_by)


def part(values: list[Any], placement: str) -> Part:
    """One rank's part of a tensor of one element, on two ranks."""
    return Part(torch.tensor(values), Layout((parse_placement(placement),)), (1,), (2,), (0, 1))


# Of ranks.


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("fault", "subject", "case", "layer"),
    [
        ("swapped_gather", "zero3_fetch_all_gather", FETCH, "collective: all_gather of float32 (3,), call 1 of it"),
        ("drops_rank", "rowwise_linear", LINEAR, "collective: all_reduce (sum) of float16 (1, 3), call 1 of it"),
        ("raises_attribute", "zero3_fetch_all_gather", FETCH, HELD),
    ],
)
def test_fault_line_blames_the_collective_if_the_backend_computes_it_wrongly(
    pool: Pool, fault: str, subject: str, case: Case, layer: str
) -> None:
    with Pool(
        Backend("planted", imports=("tests.programs.planted",)), environment={FAULT: fault}, beside=pool
    ) as wrong:
        assert told(subject, case, wrong).startswith(layer)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("subject", "case", "layer"),
    [
        ("on_a_wrong_kernel", LINEAR, "kernel: aten.mm.default of float16 ("),
        ("with_another_reduction", FETCH, "parallelization: all_reduce (sum) of float32 (1,), call 1 of it in the f"),
        ("with_an_operand_changed", FETCH, "parallelization: every call is right for its operands: 2 collectives "),
    ],
)  # fmt: skip
def test_fault_line_blames_the_program_if_the_backend_computed_rightly_from_its_operands(
    pool: Pool, subject: str, case: Case, layer: str
) -> None:
    assert told(PROGRAMS + subject, case, pool).startswith(layer)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("subject", "difference"),
    [
        ("gathers_rows_of_its_own", "the ranks pass 1 and 2 elements to one all_gather"),
        ("sends_more_than_is_awaited", "the ranks send 3 elements to rank 0, whose output has room for 2"),
        ("broadcasts_more_than_is_awaited", "the ranks pass 1 and 2 elements to one broadcast"),
    ],
)
def test_fault_line_blames_the_program_for_operands_of_unequal_shapes(
    pool: Pool, subject: str, difference: str
) -> None:
    fault = told(PROGRAMS + subject, FETCH, pool, "timed_out")

    assert fault.startswith("parallelization: ") and difference in fault


@pytest.mark.ranks
def test_fault_line_blames_a_backend_that_refuses_a_documented_gather_of_uneven_tensors(pool: Pool) -> None:
    """Each rank has room for what every rank gives, which torch documents as supported."""
    fault = told(PROGRAMS + "gathers_rows_into_room_for_all", FETCH, pool, "raised")

    assert fault.startswith("collective: all_gather of float32 (") and "invalid tensor size" in fault


@pytest.mark.ranks
@pytest.mark.parametrize("subject", ["through_two_groups", "from_anybody", "told_by_name", "looked_after"])
def test_fault_line_blames_no_send_or_recv_whose_tensor_arrives_unchanged(pool: Pool, subject: str) -> None:
    assert told(PROGRAMS + subject, FETCH, pool).startswith("parallelization: every call is right for its operands")


@pytest.mark.ranks
def test_case_that_the_program_declines_when_repeated_for_diagnosis_has_no_fault_line(pool: Pool) -> None:
    here = "tests.programs.unsupported:"
    case = ModuleCase(world_size=2, build="tests.programs.module:mlp", parallelize=f"{here}never", x_shape=(2, 3))

    assert told("module", case, pool) == DECLINED


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("mse_loss", "aten.mse_loss_backward.default of float32 () [replicate], float32 (4, 4) [shard(1)], float32 "),
        ("relu_of_shares", "aten.relu.default of float32 (4, 4) [partial(sum)], call 1 of it in the forward on ranks"),
        ("own_parts_softmax", "aten._softmax.default of float32 (4, 4) [shard(1)], call 1 of it in the forward on "),
        ("written_without_its_sum", "aten.add_.Tensor of float32 (4, 4) [replicate], float32 (4, 4) [partial(sum)]"),
    ],
)
def test_fault_line_names_the_first_wrong_operator_on_dtensors(pool: Pool, name: str, fault: str) -> None:
    found = told(layers.subject_of(name), layers.case_of(name), pool)

    assert found.startswith(f"operator: {fault}") and " unsharded" in found and "more calls are wrong" not in found


@pytest.mark.ranks
def test_right_operator_in_a_wrong_program_is_not_blamed(pool: Pool) -> None:
    fault = told("module", layers.case_of("product", "unreduced"), pool)

    assert fault.startswith("parallelization: every call is right") and "operators on DTensors" in fault


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([part([True], "partial(sum)"), part([True], "partial(sum)")], "no layout says"),
        ([part([1.0], "replicate"), part([2.0], "replicate")], "the replicas of an operand differ"),
        ([part([1.0], "shard(0)"), part([2.0], "shard(0)")], "rank 1 must hold a shard of shape"),
    ],
)
def test_operator_is_judged_only_if_the_shards_of_its_operand_form_a_tensor(parts: list[Part], reason: str) -> None:
    with pytest.raises(Unjudged, match=reason):
        whole_arguments(parts)


def test_operator_in_loss_parallel_is_not_judged() -> None:
    with loss_parallel():
        assert _has_another_meaning(torch.ops.aten._log_softmax.default)
    assert not _has_another_meaning(torch.ops.aten._log_softmax.default)
    assert not _has_another_meaning(torch.ops.aten.convolution.default)


DEVIATING = Backend("planted", imports=("tests.programs.deviating",))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("fault", "name", "layer"),
    [
        ("loses_tails", "batched_send_and_receive", "collective: recv of float32 (9,), call 1 of it"),
        ("opens_early", "barrier", "collective: barrier, call 1 of it"),
    ],
)
def test_fault_line_blames_the_backend_for_a_wrong_recv_or_barrier(
    pool: Pool, fault: str, name: str, layer: str
) -> None:
    case = CollectivesCase(world_size=2, collectives=(name,), numels=(9,))
    with Pool(DEVIATING, environment={FAULT: fault}, beside=pool) as wrong:
        assert any(told("collectives", case, wrong).startswith(layer) for _ in range(5))


# Single calls.


def items(*values: float, dtype: torch.dtype = torch.float32) -> list[list[torch.Tensor]]:
    return [[torch.tensor(values, dtype=dtype)]]


def found(kind: str, op: str, operands: Any, rank: int = 0, root: int | None = None) -> list[float]:
    right = right_results(kind, op, operands, rank, root)
    assert right is not None
    return [value for each in right for value in each.value.tolist()]


def test_right_result_of_a_collective_is_computed_from_its_operands() -> None:
    operands = [items(1, -2), items(3, 4)]
    divided = [[[torch.tensor([1.0]), torch.tensor([2.0, 5.0])]], [[torch.tensor([3.0]), torch.tensor([4.0, 6.0])]]]

    assert found("all_reduce", "sum", operands) == [4, 2] and found("all_reduce", "min", operands) == [1, -2]
    assert found("all_gather", "", operands) == [1, -2, 3, 4] and found("broadcast", "", operands, root=1) == [3, 4]
    assert found("reduce_scatter", "sum", divided, rank=1) == [6, 11]
    assert found("all_to_all", "", divided, rank=1) == [2, 5, 4, 6]
    assert right_results("reduce", "sum", operands, 0, 1) is None


def test_right_int8_sum_wraps_around_and_right_bxor_combines_bits() -> None:
    operands = [items(100, 6, dtype=torch.int8), items(100, 3, dtype=torch.int8)]

    assert found("all_reduce", "sum", operands) == [-56, 9] and found("all_reduce", "bxor", operands) == [0, 5]


def test_premultiplied_sum_is_judged_only_if_no_product_rounds() -> None:
    assert premultiplied(items(3, -1), 0.5)[0][0].tolist() == [1.5, -0.5]
    with pytest.raises(Unjudged, match=r"the right result is unknown for rounded products with 0\.1"):
        premultiplied(items(3), 0.1)


def test_operands_of_unequal_sizes_raise_inconsistent() -> None:
    with pytest.raises(Inconsistent, match="the ranks pass 1, 2 elements to one all_reduce"):
        right_results("all_reduce", "sum", [items(1), items(1, 2)], 0, None)
    with pytest.raises(Unjudged, match="the right result is unknown for the reduction unknown of float32"):
        right_results("all_reduce", "unknown", [items(1), items(2)], 0, None)


def test_sum_of_real_numbers_is_right_in_any_order_of_addition() -> None:
    terms = [items(value) for value in (1.0, 2.0**-24, 2.0**-24)]
    right = right_results("all_reduce", "sum", terms, 0, None)
    assert right is not None

    assert all(first_wrong([torch.tensor([value])], right) == "" for value in (1.0, 1.0 + 2.0**-23))
    assert first_wrong([torch.tensor([1.0 + 2.0**-21])], right).endswith("allowed at (0,); 1 of 1 elements are wrong")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_single_wrong_element_of_a_matrix_product_is_found(dtype: torch.dtype) -> None:
    left, right = torch.randn(3, 4, dtype=dtype), torch.randn(4, 2, dtype=dtype)
    expected, result = right_of_operation("aten.mm.default", [left, right], {}), left @ right
    off = torch.tensor([[0.0, 0.0], [0.0, 0.1], [0.0, 0.0]], dtype=dtype)

    assert first_wrong([result], expected) == ""
    assert "at (1, 1); 1 of 6 elements are wrong" in first_wrong([result + off], expected)


def test_tensor_that_an_in_place_operator_writes_to_is_judged() -> None:
    right = right_of_operation("aten.add_.Tensor", [torch.ones(2), torch.ones(2)], {})

    assert first_wrong([torch.full((2,), 2.0)] * 2, right) == ""
    assert first_wrong([torch.full((2,), 2.0), torch.ones(2)], right).endswith("at (0,); 2 of 2 elements are wrong")


def test_operator_without_a_bound_is_not_judged() -> None:
    with pytest.raises(Unjudged, match="no bound is known"):
        right_of_operation("aten.nextafter.default", [torch.ones(2), torch.zeros(2)], {})


def test_values_that_an_operator_copies_are_judged_by_their_bits() -> None:
    right = [Right(torch.tensor([-0.0, 1.0]), is_moved=True)]

    assert first_wrong([torch.tensor([-0.0, 1.0])], right) == ""
    assert first_wrong([torch.tensor([0.0, 1.0])], right) == "0.0 instead of -0.0 at (0,); 1 of 2 elements are wrong"
