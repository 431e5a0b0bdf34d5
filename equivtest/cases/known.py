"""What known failures ask of any case, by name, in `where`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equivtest.cases.case import Case


def has_axis_of_one(case: Case) -> bool:
    """Whether an axis of the mesh has one rank."""
    return 1 in case.mesh_shape


def freezes(case: Case) -> bool:
    """Whether a parameter that is handed over needs no gradient."""
    parameters = [name.partition("param.")[2] for name in case.tensors if name.startswith("param.")]
    return any(
        tensor.is_given and not tensor.needs_grad and any(part in (name, f"rowwise.{name}") for part in parameters)
        for name, tensor in case.tensors.items()
    )
