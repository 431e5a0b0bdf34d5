"""What known failures ask of cases of this family, by name, in `where`."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from equivtest.layout import Shard, local_shape, parse_placement

if TYPE_CHECKING:
    from equivtest.cases.case import Shape
    from equivtest.families.redistribute.prepared.case import PreparedCase


def copies_uneven_gradient(case: PreparedCase) -> bool:
    """Whether autograd copies the gradient of a DTensor, divided unevenly, and does not take it as it came.

    It copies what somebody else holds, here the cotangent itself where nothing is redistributed, and what has other
    strides than x (accumulateGrad in torch/csrc/autograd/functions/accumulate_grad.h, 2.8.0).
    """
    if not case.x_is_dtensor or case.is_even(case.source[0]) or not case.requires_grad:
        return False
    own = _strides(case.shape, is_contiguous=case.x_contiguous)
    if case.leaves_as_plain_tensor and not case.cotangent_contiguous:
        return True  # or may: what a rank holds has strides of its own
    if case.leaves_as_plain_tensor:
        return any(_differ(case.shape, own, _as_whole(case, rank)) for rank in range(case.world_size))
    is_moved = any(before != after for before, after in itertools.pairwise(case.steps))
    return not is_moved or _differ(case.shape, own, _strides(case.shape, is_contiguous=case.cotangent_contiguous))


def _differ(shape: Shape, left: Shape, right: Shape) -> bool:
    """Whether strides do, of dims of more than one element."""
    return any(size != 1 and a != b for size, a, b in zip(shape, left, right, strict=True))


def _strides(shape: Shape, *, is_contiguous: bool) -> Shape:
    """Of the harness's tensors: where they are not contiguous their last two dims are swapped in memory."""
    sizes = [max(size, 1) for size in shape]
    strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    if not is_contiguous and len(shape) > 1:
        strides[-2:] = 1, sizes[-2]
    return tuple(strides)


def _as_whole(case: PreparedCase, rank: int) -> Shape:
    """The strides that torch takes a whole tensor to have of which a rank's plain cotangent is the part.

    Source: compute_global_tensor_info in torch/distributed/tensor/_utils.py (2.8.0).
    """
    local = local_shape(case.shape, case.cotangent_layout, case.mesh_shape, rank)
    strides = _strides(local, is_contiguous=True)
    placement = parse_placement(case.target[0])
    if not isinstance(placement, Shard):
        return strides
    front = strides[placement.dim]
    return tuple(
        stride * case.world_size if dim != placement.dim and stride >= front else stride
        for dim, stride in enumerate(strides)
    )
