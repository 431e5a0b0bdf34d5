"""States the documented collectives of one fetch."""

from __future__ import annotations

from equivtest.base.collective import Collective
from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.oracle.collectives import Collectives, expected_collectives
from equivtest.tensors import DTYPES


@expected_collectives.register
def fetch_collectives(case: FetchCase, rank: int) -> Collectives:
    """Returns one all_gather of the rank's partitions, or one all_reduce of a buffer for all ranks' partitions.

    The partitions of all parameters are in one operand, padding included. If there are no elements, there is no
    collective.

    Source: DeepSpeed PR 5420; deepspeed/runtime/zero/partition_parameters.py (0.19.8), _all_gather_dtype and
    _allgather_params_coalesced: one collective for all parameters.
    """
    padded = sum(case.padded_numel(shape) for shape in case.parameters)
    numel = padded if case.collective == "all_reduce" else padded // case.world_size
    return (Collective(case.collective, numel * DTYPES[case.dtype].itemsize),) if numel else ()
