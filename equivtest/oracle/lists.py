"""Computes an operation on lists of tensors, such as `_foreach_mul`, as one operation on each element of the lists.

Source: aten/src/ATen/native/ForeachOpsKernels.cpp (2.13.0). Kernels of devices may add the squares of a norm in another
order, which the bounds of sums allow.
"""

from __future__ import annotations

from typing import Any

import torch

PREFIX = "_foreach_"

_OTHER_NAMES = {"norm": "linalg_vector_norm"}
"""Operation on lists -> operation on one tensor, if the names differ."""


def each_apart(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Calls the operation on each element of its lists. An argument that is no list is the same for all elements.

    Returns None if the operation writes to its first list, as torch does.
    """
    name = func.overloadpacket.__name__.removeprefix(PREFIX)
    operation = getattr(torch.ops.aten, _OTHER_NAMES.get(name, name))
    if name.startswith("addc") and len(args) > 3:  # the factors are `value` of the operation on one tensor
        args, kwargs = args[:3], {**kwargs, "value": args[3]}
    results = tuple(
        operation(*(_at(each, place) for each in args), **{key: _at(each, place) for key, each in kwargs.items()})
        for place in range(len(args[0]))
    )
    return results if func._schema.returns else None


def _at(argument: Any, place: int) -> Any:
    return argument[place] if isinstance(argument, list | tuple) else argument
