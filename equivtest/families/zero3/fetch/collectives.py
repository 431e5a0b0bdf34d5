"""States the documented collectives of one fetch.

Letters: s_i is the number of elements in one rank's partition of parameter i. A_i is the number of elements in all
ranks' partitions of parameter i together. Both include padding.
"""

from __future__ import annotations

from equivtest.base.collective import Collective
from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.oracle.collectives import Collectives, expected_collectives
from equivtest.tensors import DTYPES


@expected_collectives.register
def fetch_collectives(case: FetchCase, rank: int) -> Collectives:
    """Returns one all_gather or one all_reduce, as the case's `collective` says.

    Returns () if there are no elements.

    The operand of an all_gather is the rank's partitions of all parameters. The operand of an all_reduce is a buffer
    with room for all ranks' partitions, padding included.

    Source: DeepSpeed PR 5420; deepspeed/runtime/zero/partition_parameters.py (0.19.8), _all_gather_dtype and
    _allgather_params_coalesced: one collective for all parameters.
    """
    padded = sum(case.padded_numel(shape) for shape in case.parameters)
    numel = padded if case.collective == "all_reduce" else padded // case.world_size
    return (Collective(case.collective, numel * DTYPES[case.dtype].itemsize),) if numel else ()
