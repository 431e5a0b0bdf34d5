"""Assembles a global tensor from the ranks' tensors, such as the operands of an operation.

This module never uses a collective, because collectives may be under test.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from equivtest.layout import is_partial
from equivtest.tensors import Placed, assemble, assemble_listed

Held = Mapping[int, Mapping[str, Placed]]
"""rank -> name -> its answer to one draw."""


def whole(held: Held, name: str, shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> torch.Tensor | None:
    """Assembles the global tensor `name` from the ranks' tensors, in float64.

    Returns None if the ranks' tensors do not fit each other. `put_together` keeps the tensor's dtype and bits instead.
    """
    found = put_together(held, name, shape, mesh_shape)
    return None if found is None else found.double()


def put_together(held: Held, name: str, shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> torch.Tensor | None:
    """Assembles the global tensor `name` from the ranks' tensors, bit by bit.

    Returns None if the ranks' tensors do not fit each other. They do not fit if a rank lacks the tensor, or if dtypes,
    layouts or shapes differ. Claims report these faults. If ranks hold replicas, the function takes the replica of the
    lowest rank; another claim compares replicas. If the layout is partial, the function adds the ranks' operands in
    float64.
    """
    placed = {rank: tensors.get(name) for rank, tensors in held.items()}
    present = {rank: tensor for rank, tensor in placed.items() if tensor is not None}
    if not present or len(present) < len(placed):
        return None
    if len({tensor.local.dtype for tensor in present.values()}) > 1:
        return None
    if any(tensor.indices is not None for tensor in present.values()):
        return _listed(present, shape, mesh_shape)
    layouts = {tensor.layout for tensor in present.values()}
    if len(layouts) > 1:
        return None
    layout = layouts.pop()
    locals_ = {rank: tensor.local.double() if is_partial(layout) else tensor.local for rank, tensor in present.items()}
    try:
        return assemble(locals_, shape, layout, mesh_shape).tensor
    except ValueError:
        return None


def _listed(present: Mapping[int, Placed], shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> torch.Tensor | None:
    """Assembles a global tensor from tensors that list the indices of their elements, or returns None if it cannot."""
    try:
        assembled, holders = assemble_listed(present, shape, mesh_shape)
    except ValueError:
        return None
    return assembled.tensor if bool((holders >= 0).all()) else None
