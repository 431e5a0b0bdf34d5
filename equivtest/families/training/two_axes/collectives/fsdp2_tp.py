"""Derives the collectives of a perceptron with tensor parallelism along the mesh's rows and FSDP2 along its columns.

Letters: d x t ranks. The t ranks of a row divide the hidden features, and the d ranks of a column divide each such
shard. K in_features, H hidden_features, N out_features, H_j the hidden features of column j, T tokens of one
micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from equivtest.base.collective import Collective
from equivtest.cases.case import Shape
from equivtest.families.training.case import LAYERS
from equivtest.families.training.two_axes.case import TwoAxisCase
from equivtest.families.training.two_axes.collectives.hsdp import name_group
from equivtest.layout import shard_bounds
from equivtest.oracle.collectives import Collectives
from equivtest.tensors import DTYPES

HIDDEN_DIM = {"in_proj.weight": 0, "in_proj.bias": 0, "out_proj.weight": 1}
"""Dim of a parameter that counts hidden features. out_proj.bias has no such dim and is replicated along a row."""


def fsdp2_tp_collectives(case: TwoAxisCase, rank: int) -> Collectives:
    """Returns the collectives of one rank, along its row and along its column of the mesh.

    When parameters are distributed along the row, the row's first rank scatters t shards of each parameter, with ceil(H
    / t) hidden features each. The first rank broadcasts out_proj's bias, because this bias has no hidden features.
    Along the column each rank cuts out its own shard without a collective.

    All other collectives run in each micro-batch. In the forward, each layer takes an all_gather along the column. If
    this column of the mesh has r rows of a parameter, each rank gives ceil(r / d) rows, padding included. An element of
    the output is a sum of H products. An all_reduce of T N numbers along the row completes this sum.

    In the backward, released parameters are gathered again. Each rank of a row computes x's gradient only from its own
    hidden features, so an all_reduce of T K numbers along the row adds these terms. The output's gradient is whole on
    each rank and takes no collective. If gradients are reduced, each layer takes one reduce_scatter of its gradients
    along the column. The input of the reduce_scatter is d times as large as the rank's shards of the layer. No other
    gradient crosses a row, because each rank already has all terms for its hidden features.

    An axis of one rank takes no collective, except that parameters are still distributed along a row of one rank.

    Source: Shoeybi et al., Megatron-LM (2019), section 3: f, an all_reduce backward, and g, an all_reduce forward;
    Rajbhandari et al., ZeRO (2020), section 5.3; `_apply` of ColwiseParallel and RowwiseParallel in
    torch/distributed/tensor/parallel/style.py and `_init_sharding_spec_tp` in _fully_shard/_fsdp_param.py (2.13.0).
    """
    num_rows, num_columns = case.mesh
    row, column = rank // num_columns, rank % num_columns
    along_row = name_group(case, range(row * num_columns, (row + 1) * num_columns))
    along_column = name_group(case, range(column, case.world_size, num_columns))
    found = [_hand_out(case, name, column, along_row) for name in case.parameter_names()]
    for step in range(1, case.steps + 1):
        for micro_batch in range(1, case.micro_batches + 1):
            if num_columns > 1:
                found += _across_hidden_features(case, step, along_row)
            if num_rows > 1:
                is_reduced = case.syncs_every or micro_batch == case.micro_batches
                graded = case.graded_parameters(step) if is_reduced else ()
                found += _of_parts(case, graded, column, along_column)
    return tuple(found)


def _hand_out(case: TwoAxisCase, name: str, column: int, group: str) -> Collective:
    numel = math.prod(_padded_shape(case, name))
    size_bytes = numel * DTYPES[case.dtype].itemsize
    if name not in HIDDEN_DIM:
        return Collective("broadcast", size_bytes, group=group)
    return Collective("scatter", size_bytes if column == 0 else 0, group=group)


def _padded_shape(case: TwoAxisCase, name: str) -> Shape:
    padded = -(-case.hidden_features // case.mesh[1]) * case.mesh[1]
    shape, dim = case.shapes()[f"param.{name}"], HIDDEN_DIM.get(name)
    return tuple(padded if each == dim else size for each, size in enumerate(shape))


def _across_hidden_features(case: TwoAxisCase, step: int, group: str) -> list[Collective]:
    token_bytes = math.prod(case.leading) * DTYPES[case.dtype].itemsize
    found = [Collective("all_reduce", token_bytes * case.out_features, "forward", group)]
    if "x" in case.graded_names(step):
        found.append(Collective("all_reduce", token_bytes * case.in_features, "backward", group))
    return found


def _of_parts(case: TwoAxisCase, graded: Iterable[str], column: int, group: str) -> list[Collective]:
    """Returns one micro-batch's collectives along a mesh column. `graded` are the parameters with reduced gradients."""
    found = []
    for layer in LAYERS:
        held, reduced = (_part_bytes(case, layer, names, column) for names in (case.parameter_names(), graded))
        phases = ("forward", "backward") if case.reshards else ("forward",)
        found += [Collective("all_gather", held, phase, group) for phase in phases]
        if reduced:
            found.append(Collective("reduce_scatter", case.mesh[0] * reduced, "backward", group))
    return found


def _part_bytes(case: TwoAxisCase, layer: str, names: Iterable[str], column: int) -> int:
    """Returns the bytes that one rank of the column has of these parameters of a layer, padding included."""
    start, stop = shard_bounds(case.hidden_features, case.mesh[1], column)
    numel = 0
    for name in (name for name in names if name.startswith(layer)):
        shape = case.shapes()[f"param.{name}"]
        rows, *others = (stop - start if each == HIDDEN_DIM.get(name) else size for each, size in enumerate(shape))
        numel += -(-rows // case.mesh[0]) * math.prod(others)
    return numel * DTYPES[case.dtype].itemsize
