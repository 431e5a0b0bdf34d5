"""Computes ZeRO-3's collectives and memory for a sequence of operations, by formula.

Letters: w ranks, b bytes of an element. A_i is the number of elements of parameter i, padded to a multiple of w. s_i =
A_i / w is the number of elements in one partition. n_i is the number of elements without padding.

    fetch, launch   all_gather: one collective of sum(s_i) b bytes, over the named parameters
                    all_reduce: one collective of sum(A_i) b bytes
    use             one reduce_scatter of A_i b bytes for each parameter that requires a gradient
    all others      nothing; also nothing if there are no elements, or if the operation is refused

Each rank has, in bytes:

    partitions      s_i b of every parameter
    wholes          all_gather: A_i b of every parameter that is available
                    all_reduce: sum(A_j) b over all parameters that one fetch has named, while any of them is
                    in flight or available, because they are views of one buffer
    gradients       s_i b of every parameter that has a gradient
    saved           n_i b of every parameter that was saved
    others          nothing, while nothing is in flight

Source: Rajbhandari et al., ZeRO (2020), sections 5.3 and 7.2.2; DeepSpeed PR 5420 for the buffers.
"""

from __future__ import annotations

from equivtest.base.collective import Collective
from equivtest.families.zero3.lifecycle.case import FETCHES, MEMORY, LifecycleCase
from equivtest.families.zero3.lifecycle.oracle.model import Moment, moments
from equivtest.oracle.collectives import Collectives, expected_collectives
from equivtest.tensors import DTYPES


@expected_collectives.register
def lifecycle_collectives(case: LifecycleCase, rank: int) -> Collectives:
    """Returns the collectives of all operations. No collective runs in a backward."""
    calls: list[Collective] = []
    for moment in moments(case, 0):
        if moment.refusal == "none":
            calls += _calls_of(case, moment)
    return tuple(call for call in calls if call.size_bytes)


def _calls_of(case: LifecycleCase, moment: Moment) -> list[Collective]:
    named = moment.operation.parameters
    if moment.operation.verb in FETCHES:
        padded = sum(padded_bytes(case, index) for index in named)
        share = case.world_size if case.collective == "all_gather" else 1
        return [Collective(case.collective, padded // share)]
    if moment.operation.verb == "use":
        return [Collective("reduce_scatter", padded_bytes(case, index)) for index in named if case.requires_grad[index]]
    return []


def padded_bytes(case: LifecycleCase, index: int) -> int:
    return case.padded_numel(index) * DTYPES[case.dtype_of(index)].itemsize


def memory_after(case: LifecycleCase, moment: Moment) -> list[int]:
    """Returns the bytes that each rank has after the operation, for each kind of memory in MEMORY."""
    padded = {index: padded_bytes(case, index) for index in moment.parameters}
    parameters = moment.parameters.items()
    held = {
        "partitions": sum(padded.values()) // case.world_size,
        "wholes": _wholes(case, moment, padded),
        "gradients": sum(padded[i] for i, parameter in parameters if parameter.gradient is not None) // case.world_size,
        "saved": sum(
            parameter.saved.numel() * DTYPES[case.dtype_of(index)].itemsize
            for index, parameter in parameters
            if parameter.saved is not None
        ),
        "others": 0,
    }
    return [held[kind] for kind in MEMORY]


def _wholes(case: LifecycleCase, moment: Moment, padded: dict[int, int]) -> int:
    parameters = moment.parameters.items()
    if case.collective == "all_gather":
        return sum(padded[index] for index, parameter in parameters if parameter.status == "available")
    fetches = {parameter.fetched_by for _, parameter in parameters if parameter.status != "not available"}
    return sum(padded[index] for number in fetches for index in case.sequence()[number].parameters)
