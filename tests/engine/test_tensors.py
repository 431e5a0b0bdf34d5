"""Slicing, assembling and comparing bits."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from equivtest.layout import Flat, Layout, Partial, Placement, Replicate, Shard, local_shape
from equivtest.tensors import DTYPES, as_bits, assemble, dtype_name, same_bits, slice_local

MESHES = ((1,), (3,), (2, 3), (2, 2, 2))
SHAPES = ((), (0,), (1,), (7,), (5, 4), (3, 1, 6), (2, 0, 3))


def layouts_of(num_dims: int, num_axes: int) -> list[Layout]:
    """Every layout of shards and replicas, in every shard order."""
    placements: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(num_dims))]
    layouts = []
    for chosen in itertools.product(placements, repeat=num_axes):
        sharded = [axis for axis, placement in enumerate(chosen) if isinstance(placement, Shard)]
        layouts += [Layout(chosen, order) for order in itertools.permutations(sharded)]
    return layouts


def sliced(
    tensor: torch.Tensor, layout: Layout, mesh_shape: tuple[int, ...], *, padding: float = 0.0
) -> dict[int, torch.Tensor]:
    ranks = range(math.prod(mesh_shape))
    return {rank: slice_local(tensor, layout, mesh_shape, rank, padding=padding) for rank in ranks}


def counted(shape: tuple[int, ...]) -> torch.Tensor:
    """1, 2, 3, ... in `shape`, float32."""
    return torch.arange(1.0, math.prod(shape) + 1).reshape(shape)


@pytest.mark.parametrize("mesh_shape", MESHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_assembling_the_shards_of_a_tensor_gives_the_tensor(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...]
) -> None:
    whole = counted(shape)
    for layout in layouts_of(len(shape), len(mesh_shape)):
        assembled = assemble(sliced(whole, layout, mesh_shape), shape, layout, mesh_shape)

        assert same_bits(assembled.tensor, whole), layout
        assert not assembled.disagreeing, layout


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mesh_shape", [(1,), (3,), (4,)])
def test_flat_partition_is_assembled_without_its_padding(shape: tuple[int, ...], mesh_shape: tuple[int]) -> None:
    whole = counted(shape)
    layout = Layout((Flat(-(-whole.numel() // mesh_shape[0]) * mesh_shape[0]),))

    assembled = assemble(sliced(whole, layout, mesh_shape, padding=math.nan), shape, layout, mesh_shape)

    assert same_bits(assembled.tensor, whole)


def test_flat_partition_may_be_replicated_on_another_axis() -> None:
    layout = Layout((Replicate(), Flat(8)))

    locals_ = sliced(counted((7,)), layout, (3, 2), padding=-1.0)

    assert locals_[5].tolist() == [5.0, 6.0, 7.0, -1.0]
    assert same_bits(assemble(locals_, (7,), layout, (3, 2)).tensor, counted((7,)))


def test_slice_has_the_local_shape_of_its_layout() -> None:
    layout = Layout((Shard(0), Shard(1)))

    for rank, local in sliced(counted((3, 5)), layout, (2, 3)).items():
        assert tuple(local.shape) == local_shape((3, 5), layout, (2, 3), rank)


@pytest.mark.parametrize("layout", [Layout((Replicate(),)), Layout((Shard(1),)), Layout((Flat(6),))])
def test_slice_is_contiguous_and_shares_no_memory(layout: Layout) -> None:
    whole = counted((3, 2)).t()

    local = slice_local(whole, layout, (2,), 0)
    local.fill_(0.0)

    assert local.is_contiguous()
    assert whole.min() == 1.0


@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_partial_slices_of_a_tensor_reduce_to_the_tensor(op: str) -> None:
    layout = Layout((Partial(op), Shard(0)))

    assembled = assemble(sliced(counted((5,)), layout, (3, 2)), (5,), layout, (3, 2))

    assert same_bits(assembled.tensor, counted((5,)))


@pytest.mark.parametrize(("op", "reduced"), [("sum", 6.0), ("avg", 2.0), ("max", 3.0), ("min", 1.0)])
def test_partial_operands_are_reduced_by_their_op(op: str, reduced: float) -> None:
    locals_ = {rank: torch.tensor([rank + 1.0]) for rank in range(3)}

    assert assemble(locals_, (1,), Layout((Partial(op),)), (3,)).tensor.tolist() == [reduced]


def test_layout_with_two_different_reductions_is_refused() -> None:
    layout = Layout((Partial("sum"), Partial("max")))

    with pytest.raises(ValueError, match="one reduction per tensor"):
        assemble({rank: torch.ones(1) for rank in range(4)}, (1,), layout, (2, 2))


@pytest.mark.parametrize("ranks", [(0,), (0, 2), (0, 1, 2)])
def test_assembling_from_too_few_or_too_many_ranks_is_refused(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="one tensor of each of 2 ranks"):
        assemble({rank: torch.ones(1) for rank in ranks}, (1,), Layout((Replicate(),)), (2,))


def test_assembling_a_shard_of_a_wrong_shape_raises_and_names_the_rank() -> None:
    with pytest.raises(ValueError, match=r"rank 1 must hold a shard of shape \(1,\), got \(2,\)"):
        assemble({0: torch.ones(2), 1: torch.ones(2)}, (3,), Layout((Shard(0),)), (2,))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.tensor([1.0]), torch.tensor([1.0 + 2.0**-23])),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([0x7FC00000]).int().view(torch.float32), torch.tensor([0x7FC00001]).int().view(torch.float32)),
    ],
    ids=["value", "sign of zero", "payload of NaN"],
)
def test_replicas_that_differ_in_a_bit_are_found(left: torch.Tensor, right: torch.Tensor) -> None:
    assembled = assemble({0: left, 1: left, 2: right}, (1,), Layout((Replicate(),)), (3,))

    assert assembled.disagreeing == ((0, 2),)
    assert same_bits(assembled.tensor, left)


def test_replicas_of_a_shard_are_compared_with_each_other_only() -> None:
    locals_ = sliced(counted((4,)), Layout((Shard(0), Replicate())), (2, 2))
    locals_[3] = locals_[3] + 1

    assert assemble(locals_, (4,), Layout((Shard(0), Replicate())), (2, 2)).disagreeing == ((2, 3),)


def test_operands_of_a_partial_tensor_are_not_compared_as_replicas() -> None:
    locals_ = {rank: torch.tensor([float(rank)]) for rank in range(2)}

    assert not assemble(locals_, (1,), Layout((Partial(),)), (2,)).disagreeing


def test_nans_with_equal_bits_count_as_equal() -> None:
    assert same_bits(torch.tensor([math.nan]), torch.tensor([math.nan]))


@pytest.mark.parametrize("other", [torch.ones(2, dtype=torch.float64), torch.ones(1, 2), torch.tensor([1.0, 2.0])])
def test_tensors_differ_in_their_bits_if_dtype_shape_or_a_value_differs(other: torch.Tensor) -> None:
    assert not same_bits(torch.ones(2), other)


def test_strides_do_not_change_the_compared_bits() -> None:
    assert same_bits(counted((2, 3)).t().contiguous(), counted((2, 3)).t())


@pytest.mark.parametrize("name", DTYPES)
def test_integer_view_of_bits_has_the_element_size_of_the_dtype(name: str) -> None:
    tensor = torch.ones(3, dtype=DTYPES[name], requires_grad=True)

    assert as_bits(tensor).element_size() == tensor.element_size()
    assert dtype_name(tensor.dtype) == name
