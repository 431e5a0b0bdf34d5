"""Records which collectives a subject calls on this rank, without changing them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from equivtest.base import limits
from equivtest.base.collective import Collective

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor")
"""Namespaces of torch's operators for collectives: dist.* calls 'c10d', DTensor the others."""

KINDS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "monitored_barrier": "barrier",
}
"""Kind of collective by name of the operator, for torch 2.6 to 2.13, without trailing underscores of in-place
operators."""

NO_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd", "check_for_nan", "mesh_get_process_group")
_INPUTS = ("input", "inputs", "input_tensor", "input_tensors", "tensors", "tensor", "self")
_GROUPS = ("process_group", "group_name", "group", "tag")


def is_recordable(group: dist.ProcessGroup) -> bool:
    """True if torch's dispatcher sees the collectives on a group. Then a `Recorder` sees them too.

    If a group is a Python subclass of ProcessGroup, such as one from `register_backend(..., extended_api=True)`, torch
    calls it without the dispatcher.  Then the dispatcher sees only the calls that the subclass itself makes, on groups
    that torch.distributed does not know.

    Source: torch/distributed/distributed_c10d.py (2.13.0), _new_process_group_helper and all_reduce.
    """
    return type(group) is dist.ProcessGroup


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the first limits.MAX_COLLECTIVES collectives that run while this mode is active.

    The mode returns NotImplemented for an operator on DTensors. The DTensor then calls the collectives on plain
    tensors, and the recorder sees these calls. torch calls a mode before subclasses, and a mode does not see its own
    calls.

    Args:
        members: Processes of the mesh, in mesh order.

    Source: torch/distributed/tensor/debug/_comm_mode.py and torch/utils/_python_dispatch.py (2.13.0) for the order of
    modes and subclasses.
    """

    def __init__(self, members: Sequence[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._members = sorted(members)
        self.found: list[Collective] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented
        if getattr(func, "namespace", "") in NAMESPACES:
            self._note(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = func._schema.name.partition("::")[2].rstrip("_")
        if name in NO_COLLECTIVES or len(self.found) >= limits.MAX_COLLECTIVES:
            return
        kind = KINDS.get(name, name)
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        handed = next((named[key] for key in _INPUTS if key in named), None)
        group = next((named[key] for key in _GROUPS if key in named), None)
        phase = "backward" if torch._C._current_graph_task_id() != -1 else "forward"
        self.found.append(Collective(kind, 0 if kind == "barrier" else _bytes_of(handed), phase, self._name(group)))

    def _name(self, group: object) -> str:
        ranks = _ranks_of(group)
        if ranks is None:
            return "an unknown group"
        return "mesh" if sorted(ranks) == self._members else f"processes {', '.join(map(str, ranks))}"


def _bytes_of(handed: object) -> int:
    if isinstance(handed, torch.Tensor):
        return handed.numel() * handed.element_size()
    return sum(map(_bytes_of, handed)) if isinstance(handed, list | tuple) else 0


def _ranks_of(group: Any) -> list[int] | None:
    """Returns the global ranks of a group."""
    if isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[attr-defined,arg-type]
    elif isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    return dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else None
