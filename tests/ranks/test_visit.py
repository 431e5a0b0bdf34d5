"""One visit within a rank: local tensors, answers, changes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from equivtest import layout
from equivtest.cases.case import Case
from equivtest.cases.subject import copied
from equivtest.cases.values import draw
from equivtest.errors import Misuse
from equivtest.layout import Layout
from equivtest.ranks.layouts import layout_of
from equivtest.ranks.visit import hand_out, strided, take_answers, touched, visit_draw
from equivtest.tensors import Placed, slice_local
from tests.replies import FETCH, LINEAR

WHOLE = Layout((layout.Replicate(),))
X = torch.arange(6.0).reshape(2, 3)


@contextmanager
def as_rank(rank: int, mesh_shape: tuple[int, ...]) -> Iterator[DeviceMesh]:
    """This process as one rank of a mesh whose collectives do nothing."""
    world_size = torch.Size(mesh_shape).numel()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield init_device_mesh("cpu", mesh_shape)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "case", [LINEAR, replace(LINEAR, input_layout="shard(1)"), FETCH], ids=["x", "shards", "fetch"]
)
def test_ranks_get_the_shards_of_the_drawn_tensors(case: Case) -> None:
    for rank in range(case.world_size):
        with as_rank(rank, case.mesh_shape) as mesh:
            given = hand_out(case, 0, mesh)
        assert tuple(given) == case.given_names()
        for name, whole in draw(case, 0).items():
            expected = slice_local(whole, case.layouts()[name], case.mesh_shape, rank)
            assert torch.equal(given[name], expected) and given[name].is_contiguous()
            assert given[name].requires_grad == case.given_flags()[name]


def test_tensors_of_two_draws_have_separate_memory() -> None:
    with as_rank(0, (3,)) as mesh:
        one, other = hand_out(LINEAR, 0, mesh), hand_out(LINEAR, 0, mesh)

    assert all(one[name].data_ptr() != other[name].data_ptr() for name in one)


def test_case_decides_which_tensors_are_passed_as_noncontiguous() -> None:
    case = replace(LINEAR, x_contiguous=False, cotangent_contiguous=False)
    with as_rank(1, (3,)) as mesh:
        given, plain = hand_out(case, 0, mesh), hand_out(LINEAR, 0, mesh)

    assert [name for name in given if not given[name].is_contiguous()] == ["x", "cotangent"]
    assert all(torch.equal(given[name], plain[name]) for name in given)


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4), (5,)])
def test_function_strided_keeps_values_and_changes_strides(shape: tuple[int, ...]) -> None:
    tensor = torch.rand(shape)

    assert torch.equal(strided(tensor), tensor) and not strided(tensor).is_contiguous()


def test_function_strided_leaves_a_zero_dim_tensor_unchanged() -> None:
    """A 0-dim tensor stays as it is."""
    assert strided(torch.tensor(3.0)).shape == ()


# Answers.


def test_answers_of_a_subject_are_sent_as_detached_contiguous_copies() -> None:
    leaf = X.clone().requires_grad_()
    answers, flags = take_answers(LINEAR, {"output": Placed(leaf.T, WHOLE, (3, 2))})
    taken = answers["output"]

    assert torch.equal(taken.local, X.T) and taken.local.is_contiguous() and not taken.local.requires_grad
    assert (taken.layout, taken.global_shape, flags) == (WHOLE, (3, 2), {"output": True})


def test_returned_tensors_are_copied_when_the_subject_returns() -> None:
    local = X.clone()
    answers, _ = take_answers(LINEAR, {"output": Placed(local, WHOLE)})
    local.zero_()

    assert torch.equal(answers["output"].local, X)


def test_returned_dtensor_is_sent_as_its_shard_with_the_global_shape() -> None:
    """Without a collective, though the whole would need another rank."""
    with as_rank(1, (3,)) as mesh:
        tensor = DTensor.from_local(X, mesh, [Shard(0)], run_check=False, shape=torch.Size((6, 3)), stride=(3, 1))
        answers, flags = take_answers(LINEAR, {"output": tensor})

    taken = answers["output"]
    assert torch.equal(taken.local, X) and type(taken.local) is torch.Tensor
    assert (taken.layout, taken.global_shape) == (Layout((layout.Shard(0),)), (6, 3)) and flags == {"output": False}


def test_none_returned_for_a_tensor_counts_as_a_missing_tensor() -> None:
    assert take_answers(LINEAR, {"grad.x": None}) == ({}, {})


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "must return a dict of tensors by name, got NoneType"),
        (X, "must return a dict of tensors by name, got Tensor"),
        (
            {"outptu": Placed(X, WHOLE)},
            "returned outptu; a LinearCase may have the answers output, param.weight, param.bias, grad.x",
        ),
        ({3: Placed(X, WHOLE)}, "returned 3; a LinearCase may have the answers"),
        ({"output": X}, r"output must be a DTensor, Placed\(local tensor, layout\) or None, got Tensor"),
        ({"output": 3.0}, "output must be .*, got float"),
        ({"output": Placed([1.0], WHOLE)}, "output must be .*, got Placed"),  # type: ignore[arg-type]
    ],
)
def test_invalid_value_that_a_subject_returns_raises_misuse(returned: object, message: str) -> None:
    with pytest.raises(Misuse, match=message):
        take_answers(LINEAR, returned)


# Layouts in our words.

OURS = {
    "shard": ((Shard(1),), Layout((layout.Shard(1),))),
    "shard from behind": ((Shard(-1),), Layout((layout.Shard(2),))),
    "replicate": ((Replicate(),), WHOLE),
    "sum": ((Partial(),), Layout((layout.Partial("sum"),))),
    "max": ((Partial("max"),), Layout((layout.Partial("max"),))),
    "two axes": ((Replicate(), Shard(0)), Layout((layout.Replicate(), layout.Shard(0)))),
    "one dim twice": ((Shard(0), Shard(0)), Layout((layout.Shard(0), layout.Shard(0)))),
    "strided": ((_StridedShard(0, split_factor=2), Shard(0)), Layout((layout.Shard(0), layout.Shard(0)), (1, 0))),
    "strided by nothing": ((_StridedShard(0, split_factor=1),), Layout((layout.Shard(0),))),
    "three axes": (
        (_StridedShard(0, split_factor=4), _StridedShard(0, split_factor=2), Shard(0)),
        Layout((layout.Shard(0),) * 3, (2, 1, 0)),
    ),
    "partial beside": ((Partial("min"), Shard(1)), Layout((layout.Partial("min"), layout.Shard(1)))),
}


@pytest.mark.parametrize(("placements", "expected"), OURS.values(), ids=OURS.keys())
def test_layout_of_a_dtensor_is_read_from_its_placements(placements: tuple[Placement, ...], expected: Layout) -> None:
    with as_rank(0, (2,) * len(placements)) as mesh:
        local = torch.zeros(2, 4, 4)
        tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=local.shape, stride=local.stride())
        assert layout_of(tensor, "output") == expected


@pytest.mark.parametrize(
    ("placements", "axis"),
    [
        ((_StridedShard(0, split_factor=2),), 0),
        ((_StridedShard(0, split_factor=2), Shard(1)), 0),
        ((_StridedShard(0, split_factor=4), Shard(0)), 0),
        ((Shard(0), _StridedShard(0, split_factor=2)), 1),
    ],
    ids=["one axis", "another dim", "another factor", "no later axis"],
)
def test_strided_shard_that_no_order_of_mesh_axes_explains_is_refused(
    placements: tuple[Placement, ...], axis: int
) -> None:
    with as_rank(0, (2,) * len(placements)) as mesh:
        local = torch.zeros(2, 4, 4)
        tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=local.shape, stride=local.stride())
        with pytest.raises(
            Misuse, match=rf"^grad\.weight is a DTensor with placement _S.* on axis {axis} of a mesh of "
        ):
            take_answers(LINEAR, {"grad.weight": tensor})


# Changes.


def before(given: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, bool]]:
    return {name: (tensor.detach().clone(), tensor.requires_grad) for name, tensor in given.items()}


def test_unchanged_inputs_are_not_reported() -> None:
    given = {"x": X.clone().requires_grad_(), "weight": X.clone()}

    assert touched(given, before(given)) == []


@pytest.mark.parametrize("value", [0.5, -0.0, float("nan")])
def test_changed_value_of_an_input_is_reported(value: float) -> None:
    """Bits count: -0.0 is not 0.0."""
    given = {"x": X.clone(), "weight": X.clone()}
    kept = before(given)
    given["weight"][0, 0] = value

    assert touched(given, kept) == ["weight: values have changed"]


def test_nan_written_over_the_same_nan_is_not_reported() -> None:
    given = {"x": torch.tensor([float("nan"), 1.0])}
    kept = before(given)
    given["x"].mul_(1)

    assert touched(given, kept) == []


@pytest.mark.parametrize("flag", [True, False])
def test_changed_requires_grad_of_an_input_is_reported(*, flag: bool) -> None:
    given = {"x": X.clone().requires_grad_(not flag)}
    kept = before(given)
    given["x"].requires_grad_(flag)

    assert touched(given, kept) == [f"x: requires_grad was {not flag} and is {flag}"]


def test_input_squeezed_in_place_is_reported() -> None:
    given = {"x": X.clone().reshape(1, 6)}
    kept = before(given)
    given["x"].squeeze_()

    assert touched(given, kept) == ["x: values have changed"]


def test_visit_of_a_draw_returns_the_answers_and_the_changed_inputs() -> None:
    def subject(case: Case, mesh: DeviceMesh, given: Mapping[str, torch.Tensor]) -> dict[str, DTensor | Placed | None]:
        output = given["x"].detach().clone()
        given["cotangent"].add_(1)
        return {"output": Placed(output, WHOLE), "grad.x": None}

    case = replace(LINEAR, values=(("dense", 0), ("dense", 1)))
    with as_rank(0, (3,)) as mesh:
        answers = [visit_draw(subject, case, index, mesh) for index in (0, 1)]

    assert all(torch.equal(answers[i].tensors["output"].local, draw(case, i)["x"]) for i in (0, 1))
    assert answers[0].touched == ("cotangent: values have changed",) and list(answers[0].tensors) == ["output"]


@pytest.mark.parametrize("placement", [Partial(), Shard(0), Replicate()], ids=str)
def test_copy_of_a_dtensor_keeps_its_layout_without_a_collective(placement: Placement) -> None:
    """`DTensor.clone` of operands adds them up, so the copy would differ from the rank's operand."""
    with as_rank(0, (2,)) as mesh:
        held = DTensor.from_local(X.clone(), mesh, [placement], run_check=False)
        with CommDebugMode() as asked:
            copy = copied(held)
        assert isinstance(copy, DTensor)
        assert copy.placements == (placement,) and copy.shape == held.shape and asked.get_total_counts() == 0
        held.to_local().zero_()
        assert copy.to_local().equal(X)


def test_folder_that_a_subject_leaves_is_the_current_folder_again() -> None:
    def subject(case: Case, mesh: DeviceMesh, given: Mapping[str, torch.Tensor]) -> dict[str, Placed]:
        os.chdir("/")
        return {}

    before = os.getcwd()
    with as_rank(0, (3,)) as mesh:
        visit_draw(subject, LINEAR, 0, mesh)
        assert os.getcwd() == before
