"""Derives the collectives of a linear layer from its layouts."""

from __future__ import annotations

from equivtest.families.linear.case import LinearCase
from equivtest.layout import Partial, Placement, Replicate, Shard
from equivtest.oracle.collectives import Collectives, distribute_parameters, expected_collectives, redistribute


@expected_collectives.register
def linear_collectives(case: LinearCase, rank: int) -> Collectives:
    """Returns the collectives of one rank, which distribute the parameters, then redistribute x and the output.

    Source: ColwiseParallel and RowwiseParallel in torch/distributed/tensor/parallel/style.py; distribute_tensor in
    torch/distributed/tensor/_api.py, `src_data_rank`: rank 0 scatters a sharded parameter and broadcasts a replicated
    one (2.13.0). The backward is derived by the chain rule. The gradient of a redistributed tensor is redistributed in
    the opposite direction. The gradient of a partial sum is replicated. The gradient of a replicated input is a partial
    sum. Gradients of parameters take no collective, because each rank has the operands of its shard.
    """
    shapes = case.shapes()
    last = case.num_dims - 1
    colwise = case.style == "colwise"
    given, wanted = case.layouts()["x"].placements[0], case.layouts()["output"].placements[0]
    taken: Placement = Replicate() if colwise else Shard(last)
    made: Placement = Shard(last) if colwise else Partial()
    calls = [
        *distribute_parameters(case, rank, case.parameter_names()),
        *redistribute(case, shapes["x"], given, taken, "forward"),
        *redistribute(case, shapes["output"], made, wanted, "forward"),
    ]
    if case.requires_grad:
        back: Placement = made if colwise else Replicate()
        calls += redistribute(case, shapes["output"], wanted, back, "backward")
    if "x" in case.requires_grad:
        calls += redistribute(case, shapes["x"], Partial() if colwise else Shard(last), given, "backward")
    return tuple(calls)
