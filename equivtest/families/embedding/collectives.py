"""Derives the collectives of an embedding from its layouts."""

from __future__ import annotations

from dataclasses import replace

from equivtest.families.embedding.case import EmbeddingCase
from equivtest.layout import Partial, Placement, Replicate, Shard
from equivtest.oracle.collectives import Collectives, distribute_parameters, expected_collectives, redistribute
from equivtest.tensors import DTYPES

_IDS_BYTES = {"int64": 8, "int32": 4}


@expected_collectives.register
def embedding_collectives(case: EmbeddingCase, rank: int) -> Collectives:
    """Returns the collectives in the order of the calls.

    The weight is distributed, and the ids are gathered if they are sharded. Then the output is redistributed.

    A rowwise embedding makes a partial output. An all_reduce replicates this output, or a reduce_scatter shards it, as
    the case's output layout says. In the backward, an all_gather replicates the cotangent if it is sharded.

    A colwise embedding makes an output that is sharded on its last dim. An all_gather replicates this output, or an
    all_to_all shards it on another dim, as the case's output layout says. In the backward, the cotangent becomes
    sharded on its last dim, by an all_to_all or without a collective.

    Each rank then has the operands of its shard of the gradient.

    Source: ColwiseParallel and RowwiseParallel in torch/distributed/tensor/parallel/style.py, for nn.Embedding
    (2.13.0); the backward by the chain rule.
    """
    shapes, layouts = case.shapes(), case.layouts()
    last = case.num_dims - 1
    wanted = layouts["output"].placements[0]
    made: Placement = Shard(last) if case.style == "colwise" else Partial()
    back: Placement = made if case.style == "colwise" else Replicate()
    calls = distribute_parameters(case, rank, ("weight",))
    for call in redistribute(case, shapes["ids"], layouts["ids"].placements[0], Replicate(), "forward"):
        numel = call.size_bytes // DTYPES[case.dtype].itemsize
        calls.append(replace(call, size_bytes=numel * _IDS_BYTES[case.ids_dtype]))
    calls += redistribute(case, shapes["output"], made, wanted, "forward")
    if case.requires_grad:
        calls += redistribute(case, shapes["output"], wanted, back, "backward")
    return tuple(calls)
