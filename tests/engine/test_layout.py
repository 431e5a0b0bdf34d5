"""Places of elements, compared with torch's own arithmetic."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.distributed.tensor import placement_types as torch_placements
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from equivtest.errors import Misuse
from equivtest.layout import (
    Flat,
    Layout,
    Partial,
    Replicate,
    Shard,
    check_layout,
    coordinate_of,
    divided_dim,
    flat_axis,
    flat_bounds,
    local_box,
    local_shape,
    parse_placement,
    replicas,
    shard_axes,
    shard_bounds,
    shard_kind,
)

PLACEMENTS = (Replicate(), Shard(0), Shard(1))
SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 12, 13)


def ranks_of(mesh_shape: tuple[int, ...]) -> range:
    return range(math.prod(mesh_shape))


def torch_box(
    shape: tuple[int, ...], placements: tuple[object, ...], mesh_shape: tuple[int, ...], rank: int
) -> tuple[tuple[int, int], ...]:
    """Returns the bounds of torch's part of `rank`, from torch's placements."""
    coordinate = list(coordinate_of(rank, mesh_shape))
    local, offset = _compute_local_shape_and_global_offset(shape, mesh_shape, coordinate, placements)
    return tuple((start, start + size) for start, size in zip(offset, local, strict=True))


def as_torch(layout: Layout) -> tuple[object, ...]:
    return tuple(
        torch_placements.Shard(placement.dim) if isinstance(placement, Shard) else torch_placements.Replicate()
        for placement in layout.placements
    )


def has_elements(box: tuple[tuple[int, int], ...]) -> bool:
    return all(start < stop for start, stop in box)


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 5, 8, 33])
def test_shards_of_a_dim_equal_torch_chunk(num_shards: int) -> None:
    for length in range(70):
        chunks = [tuple(chunk.tolist()) for chunk in torch.arange(length).chunk(num_shards)]
        chunks += [()] * (num_shards - len(chunks))

        shards = [tuple(range(*shard_bounds(length, num_shards, index))) for index in range(num_shards)]

        assert [shard or () for shard in shards] == chunks


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("length", SIZES)
def test_shards_cover_a_dim_once_and_in_order(length: int, num_shards: int) -> None:
    bounds = [shard_bounds(length, num_shards, index) for index in range(num_shards)]

    assert [element for start, stop in bounds for element in range(start, stop)] == list(range(length))


def test_dim_larger_than_the_number_of_shards_can_leave_the_last_shard_empty() -> None:
    assert [shard_bounds(4, 3, index) for index in range(3)] == [(0, 2), (2, 4), (4, 4)]


@pytest.mark.parametrize(("length", "num_shards", "index"), [(-1, 2, 0), (4, 0, 0), (4, 2, 2), (4, 2, -1)])
def test_shard_bounds_refuses_arguments_out_of_range(length: int, num_shards: int, index: int) -> None:
    with pytest.raises(ValueError, match=r"must be .*, got"):
        shard_bounds(length, num_shards, index)


@pytest.mark.parametrize("mesh_shape", [(1,), (3,), (2, 3), (2, 1, 3)])
def test_ranks_are_numbered_row_by_row_in_the_mesh(mesh_shape: tuple[int, ...]) -> None:
    expected = list(itertools.product(*map(range, mesh_shape)))

    assert [coordinate_of(rank, mesh_shape) for rank in ranks_of(mesh_shape)] == expected


@pytest.mark.parametrize("rank", [-1, 6])
def test_coordinate_of_a_rank_outside_of_the_mesh_raises(rank: int) -> None:
    with pytest.raises(ValueError, match=r"rank must be in 0\.\.5"):
        coordinate_of(rank, (2, 3))


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 5])
def test_local_boxes_on_one_axis_equal_the_shards_of_torchs_dtensor(num_shards: int) -> None:
    for shape, placement in itertools.product(itertools.product(SIZES, SIZES), PLACEMENTS):
        layout = Layout((placement,))
        for rank in range(num_shards):
            box = local_box(shape, layout, (num_shards,), rank)
            expected = torch_box(shape, as_torch(layout), (num_shards,), rank)

            assert box == expected, f"{shape} under {layout}, rank {rank}"


@pytest.mark.parametrize("mesh_shape", [(1, 3), (2, 2), (2, 3), (3, 2), (4, 2)])
def test_local_boxes_on_two_axes_equal_the_shards_of_torchs_dtensor(mesh_shape: tuple[int, int]) -> None:
    for shape, pair in itertools.product(itertools.product(SIZES, (1, 4, 5)), itertools.product(PLACEMENTS, repeat=2)):
        layout = Layout(pair)
        for rank in ranks_of(mesh_shape):
            box = local_box(shape, layout, mesh_shape, rank)
            expected = torch_box(shape, as_torch(layout), mesh_shape, rank)
            place = f"{shape} under {layout}, rank {rank}"

            assert local_shape(shape, layout, mesh_shape, rank) == tuple(b - a for a, b in expected), place
            assert box == expected or not has_elements(box), place


@pytest.mark.parametrize("mesh_shape", [(2, 2), (2, 3), (3, 2)])
def test_shard_order_with_the_second_axis_first_equals_torchs_strided_shard(mesh_shape: tuple[int, int]) -> None:
    """torch spells this order as a strided shard on the first axis; sizes that divide evenly."""
    length = 2 * math.prod(mesh_shape)
    spelled = (torch_placements._StridedShard(0, split_factor=mesh_shape[1]), torch_placements.Shard(0))
    layout = Layout((Shard(0), Shard(0)), shard_order=(1, 0))

    for rank in ranks_of(mesh_shape):
        assert local_box((length,), layout, mesh_shape, rank) == torch_box((length,), spelled, mesh_shape, rank)


def test_axis_that_is_first_in_the_shard_order_divides_the_whole_dim() -> None:
    boxes = {
        order: [local_box((7,), Layout((Shard(0), Shard(0)), order), (2, 2), rank)[0] for rank in range(4)]
        for order in ((0, 1), (1, 0))
    }

    assert boxes[0, 1] == [(0, 2), (2, 4), (4, 6), (6, 7)]
    assert boxes[1, 0] == [(0, 2), (4, 6), (2, 4), (6, 7)]


def test_layout_without_a_shard_order_is_divided_by_the_first_axis_first() -> None:
    assert shard_axes(Layout((Shard(1), Replicate(), Shard(0)))) == (0, 2)


@pytest.mark.parametrize("order", [(0,), (0, 1), (0, 0), (2, 0, 2)])
def test_shard_order_must_name_every_sharded_axis_once(order: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"sharded axes \(0, 2\) once each"):
        shard_axes(Layout((Shard(1), Replicate(), Shard(0)), order))


def test_flat_partition_ends_in_padding() -> None:
    layout = Layout((Flat(6),))

    assert [flat_bounds(4, Flat(6), 3, index) for index in range(3)] == [(0, 2, 2), (2, 4, 2), (4, 4, 2)]
    assert [local_shape((2, 2), layout, (3,), rank) for rank in range(3)] == [(2,)] * 3


@pytest.mark.parametrize("padded_to", [3, 5])
def test_padding_that_is_too_small_or_does_not_divide_is_refused(padded_to: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of 2 and at least 4, got {padded_to}"):
        check_layout((2, 2), Layout((Flat(padded_to),)), (2,))


@pytest.mark.parametrize("other", [Flat(4), Shard(0)])
def test_flat_placement_beside_a_shard_or_a_second_flat_placement_is_refused(other: Flat | Shard) -> None:
    with pytest.raises(ValueError, match="Flat may be combined only with Replicate and Partial"):
        flat_axis(Layout((Flat(4), other)))


def test_flat_placement_is_found_on_any_axis() -> None:
    assert flat_axis(Layout((Replicate(), Flat(4)))) == 1
    assert flat_axis(Layout((Replicate(), Partial("sum")))) is None


@pytest.mark.parametrize("layout", [Layout(()), Layout((Replicate(), Replicate()))])
def test_layout_with_a_wrong_number_of_placements_is_refused(layout: Layout) -> None:
    with pytest.raises(ValueError, match="one placement per mesh axis"):
        local_box((4,), layout, (2,), 0)


@pytest.mark.parametrize("dim", [-1, 2])
def test_placement_on_a_missing_dim_is_refused(dim: int) -> None:
    with pytest.raises(ValueError, match="names no dim"):
        local_box((4, 4), Layout((Shard(dim),)), (2,), 0)


@pytest.mark.parametrize(
    ("shape", "layout", "kind"),
    [
        ((6, 1), Layout((Shard(0),)), "even"),
        ((5, 1), Layout((Shard(0),)), "uneven"),
        ((4, 1), Layout((Shard(0),)), "empty"),
        ((2, 9), Layout((Shard(0),)), "empty"),
        ((5, 1), Layout((Replicate(),)), "even"),
        ((5, 1), Layout((Partial(),)), "even"),
        ((0, 5), Layout((Shard(1),)), "even"),
        ((2, 3), Layout((Flat(6),)), "even"),
        ((5, 1), Layout((Flat(6),)), "uneven"),
        ((2, 2), Layout((Flat(6),)), "empty"),
        ((), Layout((Flat(3),)), "empty"),
    ],
)
def test_shard_kind_depends_on_the_sizes_of_shards(shape: tuple[int, ...], layout: Layout, kind: str) -> None:
    assert shard_kind(shape, layout, (3,)) == kind


@pytest.mark.parametrize("placement", [Replicate(), Shard(2), Flat(12), *map(Partial, ("sum", "avg", "max", "min"))])
def test_written_placement_can_be_read(placement: Replicate | Shard | Flat | Partial) -> None:
    assert parse_placement(str(placement)) == placement


@pytest.mark.parametrize("text", ["", "Replicate", "shard", "shard(-1)", "shard(1) ", "partial(product)", "flat()"])
def test_error_for_an_invalid_placement_names_the_placement(text: str) -> None:
    with pytest.raises(Misuse, match="unknown placement") as caught:
        parse_placement(text)

    assert repr(text) in str(caught.value)


def test_text_of_a_layout_includes_its_shard_order() -> None:
    assert str(Layout((Shard(0), Replicate()))) == "shard(0), replicate"
    assert str(Layout((Shard(0), Shard(0)), (1, 0))) == "shard(0), shard(0) (axes divide in order (1, 0))"


@pytest.mark.parametrize(
    ("local", "mesh_shape", "rank", "dim"),
    [
        ((3, 4), (2,), 0, 0),
        ((2, 4), (2,), 1, 0),
        ((3, 4), (2,), 1, None),
        ((5, 2), (2,), 1, 1),
        ((5, 2), (3, 2), 0, 1),
        ((5, 4), (2,), 0, None),
        ((5,), (2,), 0, None),
    ],
)
def test_divided_dim_is_inferred_from_local_and_global_shape(
    local: tuple[int, ...], mesh_shape: tuple[int, ...], rank: int, dim: int | None
) -> None:
    assert divided_dim((5, 4), local, mesh_shape, rank) == dim


@pytest.mark.parametrize(
    ("layout", "groups"),
    [
        (Layout((Replicate(), Replicate())), [[0, 1, 2, 3]]),
        (Layout((Replicate(), Shard(0))), [[0, 2], [1, 3]]),
        (Layout((Partial(), Replicate())), [[0, 1], [2, 3]]),
        (Layout((Flat(4), Partial())), [[0], [1], [2], [3]]),
    ],
)
def test_replicas_are_the_ranks_along_replicated_axes(layout: Layout, groups: list[list[int]]) -> None:
    assert replicas(layout, (2, 2)) == groups
