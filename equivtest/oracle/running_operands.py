"""Defines functions on the operands of an operation: nested values, with errors and magnitudes.

The module `running` uses these functions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from equivtest.oracle.ranged import Parts, Ranged

NESTED = (tuple, list, dict)


def leaves(tree: Any) -> list[Any]:
    """Lists the leaves of nested tuples, lists and dicts, in order. This is several times as fast as torch's pytree."""
    if not isinstance(tree, NESTED):
        return [tree]
    tensors: list[Any] = []
    for each in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(each, NESTED):
            tensors += leaves(each)
        else:
            tensors.append(each)
    return tensors


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    if type(tree) in (tuple, list):
        return type(tree)([mapped(change, each) for each in tree])
    return {name: mapped(change, each) for name, each in tree.items()} if type(tree) is dict else change(tree)


def is_floating(value: object) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def is_whole(dtype: torch.dtype | None) -> bool:
    return dtype is not None and not dtype.is_floating_point and not dtype.is_complex


def narrowest(tree: Any) -> torch.dtype | None:
    """Returns the first floating-point dtype with fewer than 32 bits in the tree, or None.

    torch's decompositions compute in more bits for such a dtype.
    """
    dtypes = [each.dtype for each in leaves(tree) if is_floating(each)]
    return next((dtype for dtype in dtypes if dtype.itemsize < torch.float32.itemsize), None)


def widened(value: Any, narrow: torch.dtype, wide: torch.dtype) -> Any:
    """Converts a tensor or the dtype itself from `narrow` to `wide`. Returns any other value unchanged."""
    if value is narrow:
        return wide
    if not is_floating(value) or value.dtype != narrow:
        return value
    if not isinstance(value, Ranged):
        return value.to(wide)
    wider = Parts.of(value)._replace(value=value.value.to(wide)).wrapped()
    wider.origin.is_constant = value.origin.is_constant
    return wider


def moved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the `Ranged` result of an operation that only moves elements.

    Errors and magnitudes move like the values. If no operand is `Ranged`, as for a tensor that was made before the
    module ran, the result is a plain tensor.
    """
    if not any(isinstance(each, Ranged) for each in leaves((args, kwargs))):
        return func(*args, **kwargs)
    value, error, magnitude = of_each(func, args, kwargs, kwargs)
    origin = args[0].origin if isinstance(args[0], Ranged) else None
    if isinstance(value, torch.Tensor):
        return Ranged(value, error, magnitude, origin)
    return type(value)(Ranged(v, e, m, origin) for v, e, m in zip(value, error, magnitude, strict=True))


def of_each(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: dict[str, Any]) -> list[Any]:
    """Returns three results of an operation: on the operands' values, on their errors, and on their magnitudes."""
    return [
        func(*mapped(partial(_part, place=place), args), **mapped(partial(_part, place=place), how))
        for place, how in enumerate((kwargs, sizes, sizes))
    ]


def _part(value: Any, *, place: int) -> Any:
    return Parts.of(value)[place] if is_floating(value) else value


def joined(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Concatenates or stacks tensors with their errors and magnitudes. Integers have an error of 0."""
    parts = [Parts.of(each) for each in args[0]]
    return Ranged(*(func([each[place] for each in parts], *args[1:], **kwargs) for place in range(3)))


def ones(args: tuple[Any, ...]) -> Any:
    return mapped(
        lambda each: torch.ones_like(values_of(each), dtype=torch.float64) if is_floating(each) else each, args
    )


def values_of(tree: Any) -> Any:
    return mapped(lambda each: each.value if isinstance(each, Ranged) else each, tree)
