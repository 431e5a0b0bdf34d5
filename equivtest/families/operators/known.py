"""Predicates on operator cases, for the conditions `where` in known_failures.toml.

Source: the findings of `dtensor_operators` in known_failures.toml. Most findings are about a rank with an empty shard,
or with one row.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from equivtest.cases.operands import partial_axes
from equivtest.families.operators.case_operator import INDEX, WHOLE
from equivtest.layout import Layout, Placement, Replicate, Shard, local_shape, parse_placement, shard_bounds

if TYPE_CHECKING:
    from equivtest.cases.case import Shape
    from equivtest.families.operators.case import OperatorCase


def _local_shapes(case: OperatorCase, shape: Shape, layout: Layout) -> tuple[Shape, ...]:
    divided = Layout(tuple(each if isinstance(each, Shard) else Replicate() for each in layout.placements))
    return tuple(local_shape(shape, divided, case.mesh_shape, rank) for rank in range(case.world_size))


def _first_operand_of_ranks(case: OperatorCase) -> tuple[Shape, ...]:
    return _local_shapes(case, case.operands[0], case.operand_layout(0))


def names_dim(case: OperatorCase) -> bool:
    return case.dim is not None


def counts_dim_from_end(case: OperatorCase) -> bool:
    return isinstance(case.dim, int) and case.dim < 0


def is_dim_divided(case: OperatorCase) -> bool:
    """True if the first operand is sharded along the dim that the argument `dim` names."""
    if not isinstance(case.dim, int) or not case.operands[0]:
        return False
    return f"shard({case.dim % len(case.operands[0])})" in case.placements[0]


def keeps_all_dims(case: OperatorCase) -> bool:
    """True if the call reduces all dims of a sharded operand, without naming them, and keeps them as dims of size 1."""
    is_sharded = any(text.startswith("shard") for texts in case.placements[:1] for text in texts)
    return case.dim is None and bool(dict(case.arguments).get("keepdim")) and is_sharded


def _indexed_dim(case: OperatorCase) -> int | None:
    """Returns the dim of the first operand that the call names by number, or None if it names none."""
    return case.dim % len(case.operands[0]) if isinstance(case.dim, int) else None


def has_shorter_index(case: OperatorCase) -> bool:
    """True if an index has as many dims as the first operand, but is shorter in a dim that is not indexed."""
    if case.kind_of(len(case.operands) - 1) != INDEX or len(case.operands[0]) != len(case.operands[-1]):
        return False
    pairs = enumerate(zip(*case.operands, strict=True))
    front = _indexed_dim(case)
    return any(index < size for dim, (size, index) in pairs if dim != front)


def shards_index_otherwise(case: OperatorCase) -> bool:
    """True if `has_shorter_index`, and some rank's rows of the index begin elsewhere than its rows of the operand.

    A dim counts if it is not indexed and an operand is sharded along it. If the index is sharded along the indexed dim,
    torch gathers the first operand. torch shards a partial operand along the first other dim that has a row for each
    rank. A dim that is sharded on two axes of a mesh is not seen.
    """
    if not has_shorter_index(case):
        return False
    first, index = case.operands[0], case.operands[-1]
    front = _indexed_dim(case)
    others = [dim for dim in range(len(first)) if dim != front]
    for axis, num_ranks in enumerate(case.mesh_shape):
        given, picking = case.placements[0][axis], case.placements[-1][axis]
        if front is not None and picking == f"shard({front})":
            continue
        sharded = [dim for dim in others if f"shard({dim})" in (given, picking)]
        if given.startswith("partial"):
            sharded += [dim for dim in others if min(first[dim], index[dim]) >= num_ranks][:1]
        if any(_begins_elsewhere(index[dim], first[dim], num_ranks) for dim in sharded):
            return True
    return False


def _begins_elsewhere(size: int, other: int, num_ranks: int) -> bool:
    """True if some rank has rows of `size`, and its rows of `other` begin at another row."""
    bounds = [(shard_bounds(size, num_ranks, rank), shard_bounds(other, num_ranks, rank)) for rank in range(num_ranks)]
    return any(start < stop and start != first for (start, stop), (first, _) in bounds)


def changes_shape(case: OperatorCase) -> bool:
    return bool(case.results) and case.results[0].shape != case.operands[0]


def is_divided(case: OperatorCase) -> bool:
    return any(text.startswith("shard") for text in case.placements[0])


def is_first_whole(case: OperatorCase) -> bool:
    return set(case.placements[0]) == {"replicate"}


def reduced_by(case: OperatorCase) -> str:
    """Returns the reduction by which the first operand is partial, or '' if it is not partial."""
    return case.reduction("operand.0")[0]


def is_divided_too(case: OperatorCase) -> bool:
    """True if the first operand is sharded along one mesh axis, and partial along the other."""
    return bool(reduced_by(case)) and is_divided(case)


def has_partial(case: OperatorCase) -> bool:
    return any(partial_axes(case.operand_layout(number)) for number in range(len(case.operands)))


def has_partial_maximum(case: OperatorCase) -> bool:
    return any(case.reduction(f"operand.{number}")[0] == "max" for number in range(len(case.operands)))


def leaves_nothing_to_reduce(case: OperatorCase) -> bool:
    """True if some rank's shard of the first operand is empty along a reduced dim. No `dim` stands for all dims."""
    num_dims, dim = len(case.operands[0]), case.dim
    if not num_dims:
        return False
    dims = dim if isinstance(dim, tuple) else (dim,) if isinstance(dim, int) else range(num_dims)
    return any(shape[each % num_dims] == 0 for shape in _first_operand_of_ranks(case) for each in dims)


def gathers_in_front_of(case: OperatorCase) -> bool:
    """True if `dim` is negative, names the first dim of the first operand, and the operand is sharded along this dim.

    Also True if `dim` is -1, the operand is sharded along its last dim, and some rank's shard has size 1 along dim 0.
    Always False on one rank.
    """
    if case.world_size == 1 or not counts_dim_from_end(case) or not is_dim_divided(case):
        return False
    is_first = case.dim == -len(case.operands[0])
    return is_first or (case.dim == -1 and any(shape[0] == 1 for shape in _first_operand_of_ranks(case)))


def picks_one_of_nothing(case: OperatorCase) -> bool:
    """True if a replicated index picks one row along `dim`, and sharding the rows leaves some rank without a row.

    The first operand must be sharded along `dim`, or partial. Always False with two mesh axes, or with fewer rows than
    ranks.
    """
    if not isinstance(case.dim, int) or len(case.operands) != 2 or len(case.mesh_shape) != 1:
        return False
    x, index = case.operands
    size, world_size = x[case.dim], case.world_size
    is_one = len(index) == len(x) and index[case.dim] == 1 and case.placements[1] == ("replicate",)
    is_spread = is_dim_divided(case) or bool(case.reduction("operand.0")[0])
    return is_one and is_spread and size >= world_size and shard_bounds(size, world_size, world_size - 1)[0] >= size


def divides_index_otherwise(case: OperatorCase) -> bool:
    """True if some rank has more rows of the index than of the first operand, along a dim that is not indexed.

    Both operands' rows are counted under each placement that shards one of the operands.
    """
    if not has_shorter_index(case):
        return False
    texts = {text for placements in case.placements for text in placements if text.startswith("shard")}
    layouts = [
        Layout(tuple(map(parse_placement, (text, *("replicate",) * (len(case.mesh_shape) - 1))))) for text in texts
    ]
    front = _indexed_dim(case)
    return any(
        index > size
        for layout in layouts
        for picked, indices in zip(*(_local_shapes(case, shape, layout) for shape in case.operands), strict=True)
        for dim, (size, index) in enumerate(zip(picked, indices, strict=True))
        if dim != front
    )


def compares_beyond_dims(case: OperatorCase) -> bool:
    """True if the operand with more shards, of two operands, is sharded along a dim that the other does not have."""
    if len(case.operands) != 2 or not all(case.operands):
        return False
    pairs = [zip(case.mesh_shape, case.operand_layout(n).placements, strict=True) for n in (0, 1)]
    divided = [[(size, each.dim) for size, each in own if isinstance(each, Shard)] for own in pairs]
    first = int(math.prod(size for size, _ in divided[0]) < math.prod(size for size, _ in divided[1]))
    return any(dim >= len(case.operands[1 - first]) for _, dim in divided[first])


def squeezes_a_row(case: OperatorCase) -> bool:
    """True if a vector is multiplied by a matrix, and the vector is partial or the matrix has no shards of dim 1."""
    if [len(shape) for shape in case.operands] != [1, 2]:
        return False
    is_partial = bool(case.reduction("operand.0")[0]) and math.prod(case.mesh_shape) > 1
    return is_partial or "shard(1)" not in case.placements[1]


def pads_other_rows(case: OperatorCase) -> bool:
    """True if, in the backward of `narrow`, some rank's cotangent has a wrong number of rows along `dim`.

    The right number is the number of rows that `narrow` takes from the rank's shard of an operand with the cotangent's
    layout. The number 1 is right too, and the result's whole number of rows is right too.
    """
    named, whole = dict(case.arguments), case.operands[0]
    start, length, dim = named.get("start"), named.get("length"), case.dim
    if not isinstance(start, int) or not isinstance(length, int) or not isinstance(dim, int) or not changes_shape(case):
        return False
    start %= whole[dim]
    layout = case.cotangent_layout(0)
    operands, cotangents = _local_shapes(case, whole, layout), _local_shapes(case, case.results[0].shape, layout)
    return any(
        rows[dim] not in (1, max(min(start + length, operand[dim]) - start, 0))
        for operand, rows in zip(operands, cotangents, strict=True)
        if rows[dim] != case.results[0].shape[dim]
    )


def selects_other_rows(case: OperatorCase) -> bool:
    """True if, in the backward of `select` by a negative dim, some rank's cotangent does not fit into the gradient.

    A rank writes its cotangent into one slice of its local gradient. DTensor shards the gradient one dim further back
    than the cotangent, so that the slice may have another shape, or the index may lie outside.
    """
    index, dim, shape = dict(case.arguments).get("index"), case.dim, case.operands[0]
    if not isinstance(index, int) or not isinstance(dim, int) or not counts_dim_from_end(case):
        return False
    layout, front = case.cotangent_layout(0), dim % len(shape)
    moved = Layout(tuple(Shard(each.dim + 1) if isinstance(each, Shard) else each for each in layout.placements))
    pairs = zip(_local_shapes(case, shape, moved), _local_shapes(case, case.results[0].shape, layout), strict=True)
    for operand, cotangent in pairs:
        slot = (*operand[:front], *operand[front + 1 :])
        if not -operand[front] <= index < operand[front]:
            return True
        if any(rows not in (1, size) for rows, size in zip(cotangent, slot, strict=True)):
            return True
    return False


def keeps_placements(case: OperatorCase) -> bool:
    """True if `squeeze` removes a dim, and no dim from the first removed dim on is sharded."""
    shape, dim = case.operands[0], case.dim
    dims = (dim % len(shape),) if isinstance(dim, int) and shape else range(len(shape))
    gone = [each for each in dims if shape[each] == 1]
    layout = case.operand_layout(0)
    return bool(gone) and not any(isinstance(each, Shard) and each.dim >= min(gone) for each in layout.placements)


def call(case: OperatorCase) -> str:
    """Returns the text of the argument list if the call is from torch's list of samples, otherwise ''."""
    text = dict(case.arguments).get("call", "")
    assert isinstance(text, str)
    return text


def has_shard(case: OperatorCase) -> bool:
    return any(text.startswith("shard") for placements in case.placements for text in placements)


def has_sharded_integers(case: OperatorCase) -> bool:
    """True if some operand of integers, such as the ids of an embedding, is sharded."""
    integers = [number for number in range(len(case.operands)) if case.kind_of(number) in (INDEX, WHOLE)]
    return any(text.startswith("shard") for number in integers for text in case.placements[number])


def is_whole(case: OperatorCase) -> bool:
    return all(set(placements) == {"replicate"} for placements in case.placements)


def takes_mean(case: OperatorCase) -> bool:
    """True if a loss takes the mean, by its argument `reduction` or by default."""
    return "reduction=" not in call(case) or "reduction='mean'" in call(case)


def convolves_as_held(case: OperatorCase) -> bool:
    """True if a convolution is sharded otherwise than its input by batch, or if some rank has no row of the batch.

    An input with fewer dims than the kernel has no batch. Its first dim is the dim of channels.
    """
    first, *others = case.placements
    rows_of_ranks = [shape[0] if shape else 0 for shape in _first_operand_of_ranks(case)]
    has_batch = len(case.operands[0]) == len(case.operands[1])
    is_right = set(first) <= {"replicate", *(("shard(0)",) if has_batch else ())} and all(rows_of_ranks)
    return not is_right or any(set(texts) != {"replicate"} for texts in others)


def masks_ids_twice(case: OperatorCase) -> bool:
    """True if an embedding looks up whole ids, and its weight is sharded along dim 0 on both axes of a mesh.

    An axis of one rank does not count. Fewer rows than ranks are sharded along the first axis only.
    """
    axes = zip(case.mesh_shape, _layout_of_call(case).placements, strict=True)
    num_axes = sum(size > 1 and placement == Shard(0) for size, placement in axes)
    return num_axes == 2 and set(case.placements[1]) == {"replicate"} and 0 not in case.operands[1]


def masks_index_twice(case: OperatorCase) -> bool:
    """True if a whole index picks along a dim that is sharded on two axes of at least two ranks."""
    front = _indexed_dim(case)
    num_axes = sum(
        size > 1 and text == f"shard({front})" for size, text in zip(case.mesh_shape, case.placements[0], strict=True)
    )
    return num_axes == 2 and set(case.placements[-1]) == {"replicate"}


def cuts_blocks_of_pixels(case: OperatorCase) -> bool:
    """True if some rank calls `pixel_unshuffle` or `pixel_shuffle` on a shard that has a part of a block.

    A block is what becomes one row, one column or one channel of the result. A shard of the only block is gathered,
    except if this is the only row and there is one channel, or if this is the only channel and there is one row.
    On two axes torch raises in more cases, if it shards another dim than the case does.
    """
    shape, factor = case.operands[0], _pixels_per_block(case)
    is_merged = shape[-1] < case.results[0].shape[-1]
    blocks = ((-3, factor**2, -2),) if is_merged else ((-2, factor, -3), (-1, factor, None))
    ranks = _local_shapes(case, shape, _layout_of_call(case))
    for dim, block, other in blocks:
        is_called = shape[dim] != block or (other is not None and shape[other] == 1)
        if is_called and any(rows[dim] % block for rows in ranks):
            return True
    return False


def repeats_uneven_rows(case: OperatorCase) -> bool:
    """True if `pixel_shuffle` gives some rank another number of rows or columns than a shard of the result has."""
    layout, factor, shape = _layout_of_call(case), _pixels_per_block(case), case.results[0].shape
    pairs = zip(_local_shapes(case, case.operands[0], layout), _local_shapes(case, shape, layout), strict=True)
    is_merged = case.operands[0][-1] < shape[-1]
    return is_merged and any(rows[dim] * factor != found[dim] for rows, found in pairs for dim in (-2, -1))


def holds_no_channels(case: OperatorCase) -> bool:
    """True if some rank's part of the rows that a one-dimensional pool takes has no channels."""
    return any(shape[-2] == 0 for shape in _first_operand_of_ranks(case))


def gives_one_piece(case: OperatorCase) -> bool:
    return len(case.results) == 1


def differentiates_one_number(case: OperatorCase) -> bool:
    """True if an operand that requires a gradient has two real numbers, which the call views as one complex number."""
    return any(case.operands[number] == (2,) for number in case.graded())


def expands_a_shard(case: OperatorCase) -> bool:
    """True if the cotangent of a reduction is sharded along a dim of one element, and the operand is longer there."""
    if not case.graded() or dict(case.arguments).get("keepdim") is not True:
        return False
    whole, result = case.operands[0], case.results[0].shape
    dims = [each.dim for each in case.cotangent_layout(0).placements if isinstance(each, Shard)]
    return any(result[dim] == 1 < whole[dim] for dim in dims)


def _pixels_per_block(case: OperatorCase) -> int:
    """Returns the factor of `pixel_unshuffle` or `pixel_shuffle`, or 1 if the result is empty."""
    sizes = (case.operands[0][-1], case.results[0].shape[-1])
    return max(sizes) // min(sizes) if all(sizes) else 1


def _layout_of_call(case: OperatorCase) -> Layout:
    """Returns the first operand's layout, whole along each axis for which a sharded dim has too few elements.

    DTensor does not call an operator on a dim of more shards than elements.
    """
    num_shards: dict[int, int] = {}
    placements: list[Placement] = []
    for size, placement in zip(case.mesh_shape, case.operand_layout(0).placements, strict=True):
        if isinstance(placement, Shard):
            num = num_shards.get(placement.dim, 1) * size
            if num > case.operands[0][placement.dim]:
                placements.append(Replicate())
                continue
            num_shards[placement.dim] = num
        placements.append(placement)
    return Layout(tuple(placements))
