"""Lists the functions of torch.distributed that a backend may lack, and decides what a run allows it to lack."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from importlib import metadata

from equivtest.base import limits
from equivtest.base.importing import suggestion
from equivtest.base.refusal import is_older
from equivtest.errors import Misuse

PROBED = (
    "all_reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "broadcast",
    "all_gather",
    "reduce",
    "scatter",
    "all_to_all_single",
    "all_to_all",
    "gather",
    "reduce_scatter",
    "send_and_receive",
    "barrier",
)
"""Functions of torch.distributed that are probed, by the names of torch 2.12.

Subjects, DTensor, DDP, FSDP2 and DeepSpeed call the first nine.
"""

NOT_RUN = "the case was not run"
"""Beginning of the message for a case that is not run, because a probe hung or ended a rank."""

FUNCTIONS = (
    *PROBED,
    "batched_send_and_receive",
    "tagged_send_and_receive",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "monitored_barrier",
    "all_to_all_single_uneven",
    "functional_all_reduce",
    "functional_all_gather_tensor",
    "functional_all_reduce_coalesced",
    "functional_all_gather_into_tensor_coalesced",
    "functional_reduce_scatter_tensor_coalesced",
    "functional_all_reduce_inplace",
    "functional_all_gather_tensor_inplace",
    "functional_all_gather_inplace",
    "functional_reduce_scatter_tensor_inplace",
    "functional_all_to_all_inplace",
    "functional_permute_tensor",
    "functional_batch_p2p_ops_inplace",
    "functional_reduce_scatter_tensor",
    "functional_broadcast",
    "functional_all_to_all_single",
    "functional_all_to_all_single_uneven",
    "int64_all_reduce",
    "int64_reduce",
    "int64_reduce_scatter_tensor",
    "coalesced_all_reduce",
    "coalesced_all_gather_into_tensor",
    "coalesced_reduce_scatter_tensor",
)
"""The probed functions, and functions that only the property `collectives` calls, by the names in its cases."""

REDUCING = tuple(
    name
    for name in FUNCTIONS
    if name.removesuffix("_inplace")
    .removesuffix("_coalesced")
    .endswith(("reduce", "reduce_scatter", "reduce_scatter_tensor"))
)
REDUCTIONS = ("sum", "max", "min", "avg", "product", "premul", "band", "bor", "bxor")
"""Names of reductions.  After '_' they end the name of a function in REDUCING, as in 'all_reduce_avg'."""

OF_ONE_BACKEND = ("monitored_barrier", "tagged_send_and_receive", *(f"{name}_premul" for name in REDUCING))
"""Functions that torch documents for only one backend, gloo or NCCL, or not for NCCL. Their refusal fails no run.

Source: the docstrings of monitored_barrier, of ReduceOp and of isend in torch.distributed (2.13.0).
"""

TORCHS_OWN = ("gloo", "nccl")
"""Backends that come with torch.  If one of them refuses a call, the installed release of torch lacks the call."""

ALL = "all"
RELEASE = "release"
"""Name, in --allow-unsupported, of everything that this release of torch, or of a library, lacks."""


def parse_allowed(names: Iterable[str]) -> frozenset[str]:
    """Checks the names of --allow-unsupported, and returns them.

    A name is a dtype, 'dtype:function', 'dtype:function_reduction', 'release' for all that this release of torch lacks,
    or 'all'.

    Raises:
        Misuse: a name has another form.
    """
    allowed = frozenset(names)
    for name in sorted(allowed - {ALL, RELEASE}):
        dtype, colon, function = name.partition(":")
        if dtype not in limits.DTYPES:
            known = [ALL, RELEASE, *limits.DTYPES]
            raise Misuse(f"--allow-unsupported: unknown dtype {dtype!r} in {name!r}; {suggestion(dtype, known)}")
        if colon and function_of(function) not in FUNCTIONS:
            wanted = suggestion(function, list(FUNCTIONS))
            raise Misuse(f"--allow-unsupported: unknown collective {function!r} in {name!r}; {wanted}")
    return allowed


def is_allowed(lacking: Collection[str], allowed: Collection[str]) -> bool:
    """True if a run allows everything that the backend lacked for one verdict.

    Args:
        lacking: 'dtype:function' of each refused collective, or 'dtype:function_reduction' if the backend refused only
            that reduction. The collection is empty if this release of torch, and not the backend, lacks something.
    """
    if ALL in allowed:
        return True
    if not lacking:
        return RELEASE in allowed
    return all(
        name.partition(":")[2] in OF_ONE_BACKEND
        or any(wider in allowed for wider in (name, function_of(name), name.partition(":")[0]))
        for name in lacking
    )


def excused_by(allowed: frozenset[str], backend: str) -> frozenset[str]:
    """Returns the names of everything that the backend may lack.

    'all' is added to `allowed` if `allowed` contains 'release', and `backend` is gloo or NCCL of an older release of
    torch. gloo's all_to_all, for example, came after torch 2.8.0 (pull request 165435 of pytorch, of 2026).
    """
    if RELEASE in allowed and backend in TORCHS_OWN and is_older(metadata.version("torch")):
        return allowed | {ALL}
    return allowed


def function_of(name: str) -> str:
    """Returns a collective's name without its reduction: 'float32:all_reduce' for 'float32:all_reduce_avg'."""
    function, _, reduction = name.rpartition("_")
    is_of_one = reduction in REDUCTIONS and function.rpartition(":")[2] in REDUCING
    return function if is_of_one else name
