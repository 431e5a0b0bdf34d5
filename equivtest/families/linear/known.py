"""Predicates on linear cases, for the conditions `where` in known_failures.toml."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from equivtest.layout import Shard, parse_placement

if TYPE_CHECKING:
    from equivtest.cases.case import Shape
    from equivtest.families.linear.case import LinearCase


def last_leading(case: LinearCase) -> int:
    """Returns the size of the last dim of x before the features, 1 if x has no such dim."""
    return case.leading[-1] if case.leading else 1


def output_place(case: LinearCase) -> str:
    """Returns the place of the output's sharded dim: 'first', 'middle', 'last' (also of one dim only), or 'none'."""
    return _place(case.output_layout, case.num_dims)


def has_strided_x(case: LinearCase) -> bool:
    """True if torch sees x as not contiguous. torch sees a DTensor of one dim as contiguous, even if it is strided."""
    if case.num_dims == 1:
        return not case.x_contiguous and not case.x_is_dtensor and case.in_features > 1
    return not case.x_contiguous and min(last_leading(case), case.in_features) > 1


def has_strided_cotangent(case: LinearCase) -> bool:
    """True if torch sees the cotangent as not contiguous. A cotangent of one dim is contiguous."""
    return not case.cotangent_contiguous and min(last_leading(case), case.out_features) > 1


def squeezes_product(case: LinearCase) -> bool:
    """True if x has one dim, F.linear makes a matrix of x, and F.linear then removes the added dim from the product.

    F.linear does so if the layer has no bias, or if x is strided.
    """
    return case.num_dims == 1 and (not case.bias or has_strided_x(case))


def merged_dims(case: LinearCase) -> Shape:
    """Returns the sizes of the leading dims that F.linear merges into one.

    F.linear merges all leading dims. If x is strided and the weight needs no gradient, it merges all except the last.
    """
    keeps_last = has_strided_x(case) and "weight" not in case.requires_grad
    return case.leading[:-1] if keeps_last else case.leading


def input_shard_is_merged(case: LinearCase) -> bool:
    """True if F.linear merges the sharded dim with the dims before it in a view of x, without a copy."""
    copies = has_strided_x(case) and merged_dims(case) == case.leading
    return not copies and _is_merged(case.input_layout, merged_dims(case))


def output_shard_is_merged(case: LinearCase) -> bool:
    """True if the backward merges the sharded dim with dims before it in a view of the cotangent, without a copy."""
    copies = has_strided_cotangent(case) and merged_dims(case) == case.leading
    return not copies and _is_merged(case.output_layout, merged_dims(case))


def output_is_uneven(case: LinearCase) -> bool:
    return case.worst_shard_kind(("output",)) != "even"


def _place(placement: str, num_dims: int) -> str:
    shard = parse_placement(placement)
    if not isinstance(shard, Shard):
        return "none"
    return "last" if shard.dim == num_dims - 1 else "middle" if shard.dim else "first"


def _is_merged(placement: str, merged: Shape) -> bool:
    """True if the placement shards a dim that is merged with dims before it.

    False if one of two sizes is at most 1. The first size is the product of the merged dims before the sharded dim. The
    second size is the product of the sharded dim and all later merged dims.
    """
    shard = parse_placement(placement)
    return isinstance(shard, Shard) and min(math.prod(merged[: shard.dim]), math.prod(merged[shard.dim :])) > 1
