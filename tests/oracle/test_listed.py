"""Tensors that ranks list element by element: sent, judged, assembled, compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from equivtest.layout import UNTOLD, Layout, Replicate, Shard
from equivtest.oracle.expected import Expected, ExpectedTensor
from equivtest.oracle.held import put_together
from equivtest.programs.case import ModuleCase
from equivtest.ranks.reply import Answer, Reply
from equivtest.ranks.wire import decode_message, encode_reply
from equivtest.tensors import Placed, assemble_listed, same_bits
from equivtest.verdicts.elements import judge_values, shape_mismatch
from equivtest.verdicts.structure import judge_replicas

VALUE = torch.arange(1.0, 7.0, dtype=torch.float64).reshape(3, 2)  # 1 to 6, global
EXPECTED = ExpectedTensor(VALUE, None, Layout((Replicate(),)), "float32", "equal: copied")
CASE = ModuleCase(world_size=2, build="torch.nn:Flatten", parallelize="", x_shape=(1, 1))


def listed(*indices: object) -> dict[int, Placed]:
    """Each rank's elements of these numbers, right."""
    made = {}
    for rank, each in enumerate(indices):
        places = torch.tensor(each, dtype=torch.int64)
        made[rank] = Placed(VALUE.reshape(-1)[places].float(), UNTOLD, indices=places)
    return made


def spoilt(answers: Mapping[int, Placed], rank: int, flat: int, value: float) -> dict[int, Placed]:
    local = answers[rank].local.clone()
    local.view(-1)[flat] = value
    return {**answers, rank: replace(answers[rank], local=local)}


RIGHT = listed([[5, 0], [3, 3]], [4, 2, 1, 0])
"""In any order and shape; 0 on both ranks, 3 twice on the first."""


@pytest.mark.parametrize("indices", [torch.tensor([[2, 0]]), torch.empty((0, 3), dtype=torch.int64)])
def test_tensor_encoded_as_a_list_of_elements_is_decoded_unchanged(indices: torch.Tensor, tmp_path: Path) -> None:
    sent = Placed(torch.randn(indices.shape), UNTOLD, (3, 2), indices)
    message = encode_reply(1, Reply(rank=0, outcome="answered", answers=(Answer({"w": sent}),)), tmp_path)
    found = decode_message(message)[1].answers[0].tensors["w"]

    assert found.indices is not None and torch.equal(found.indices, indices)
    assert same_bits(found.local, sent.local) and (found.layout, found.global_shape) == (UNTOLD, (3, 2))


def test_listed_elements_are_judged_at_their_global_index() -> None:
    assert judge_values("w", EXPECTED, RIGHT, (2,)) == (None, 0.0)


def test_wrong_listed_element_shows_local_and_global_index() -> None:
    mismatch, _ = judge_values("w", EXPECTED, spoilt(RIGHT, 1, 2, 9.0), (2,))

    assert mismatch is not None and (mismatch.rank, mismatch.local_index, mismatch.global_index) == (1, (2,), (0, 1))
    assert (mismatch.expected, mismatch.layout) == ("2.000000000e+00", "by elements")
    assert mismatch.extent == "1 of 4 local elements; rank 1 only"


def test_element_that_every_rank_omits_is_a_shape_mismatch() -> None:
    assert shape_mismatch("w", EXPECTED, RIGHT, (2,)) is None
    mismatch = shape_mismatch("w", EXPECTED, listed([5, 0], [4, 2, 0]), (2,))

    assert mismatch is not None and mismatch.actual == "2 of 6 elements are on no rank, the first is (0, 1)"
    assert shape_mismatch("w", replace(EXPECTED, may_be_none=True), listed([5, 0], [4]), (2,)) is None


def test_listed_elements_of_a_wrong_dtype_are_a_mismatch() -> None:
    doubled = {rank: replace(placed, local=placed.local.double()) for rank, placed in RIGHT.items()}
    mismatch = shape_mismatch("w", EXPECTED, doubled, (2,))

    assert mismatch is not None and mismatch.actual == "local (2, 2) float64"


def test_listed_and_sharded_parts_are_assembled_together() -> None:
    rows = Layout((Shard(0),))
    held = {0: {"w": listed([3, 2, 1, 0])[0]}, 1: {"w": Placed(VALUE[2:].float(), rows)}}

    assert torch.equal(put_together(held, "w", (3, 2), (2,)), VALUE.float())  # type: ignore[arg-type]
    assert put_together({0: held[0], 1: {"w": listed([4])[0]}}, "w", (3, 2), (2,)) is None
    assert put_together({0: held[0], 1: {"w": Placed(VALUE.float(), rows)}}, "w", (3, 2), (2,)) is None


@pytest.mark.parametrize(
    ("rank", "flat", "pairs"), [(1, 3, ((0, 1),)), (0, 2, ((0, 0),)), (0, 1, ((0, 1),)), (1, 0, ())]
)
def test_copies_of_an_element_on_two_ranks_must_be_equal(
    rank: int, flat: int, pairs: tuple[tuple[int, int], ...]
) -> None:
    assembled, holders = assemble_listed(spoilt(RIGHT, rank, flat, 9.0), (3, 2), (2,))

    assert assembled.disagreeing == pairs
    assert holders.tolist() == [[0, 1], [1, 0], [1, 0]]


@pytest.mark.parametrize(
    ("rank", "flat", "place", "told"),
    [(1, 3, ((3,), (0, 0)), (1, "9.0", "on rank 0")), (0, 3, ((1, 0), (1, 1)), (0, "4.0", "on rank 0"))],
)
def test_rank_whose_copy_of_a_listed_element_differs_is_reported(
    rank: int, flat: int, place: tuple[object, object], told: tuple[int, str, str]
) -> None:
    tensors = spoilt(RIGHT, rank, flat, 9.0)
    answers = {number: Answer({"w": placed}) for number, placed in tensors.items()}
    judged = judge_replicas(CASE, Expected({"w": EXPECTED}, {}), answers)

    assert judged.kind == "replica"
    (mismatch,) = judged.mismatches
    assert (mismatch.local_index, mismatch.global_index) == place
    assert (mismatch.rank, mismatch.actual[:3]) == told[:2] and told[2] in mismatch.expected


def test_claim_on_replicas_holds_for_equal_copies_of_an_element() -> None:
    answers = {rank: Answer({"w": placed}) for rank, placed in RIGHT.items()}
    judged = judge_replicas(CASE, Expected({"w": EXPECTED}, {}), answers)

    assert (judged.kind, judged.agreeing) == ("holds", ("w",))
