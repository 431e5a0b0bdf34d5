"""The collectives of a perceptron that is tensor parallel along the rows of a mesh and fully sharded along its columns.

Letters: d x t ranks; the t of a row divide the hidden features and the d of a column divide each such part;
K in_features, H hidden_features, N out_features, H_j the hidden features of column j, T tokens of one micro-batch.
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
"""The dim of hidden features of a parameter; out_proj.bias has none, and every rank of a row holds it whole."""


def fsdp2_tp_collectives(case: TwoAxisCase, rank: int) -> Collectives:
    """Lists collectives: each micro-batch gathers layers along the column, and reduces output and x's gradient by row.

    When parameters are distributed along the row, its first rank scatters t parts of ceil(H / t) hidden features of a
    parameter, and broadcasts out_proj's bias, which has no hidden features.  Along the column each rank cuts its own
    part.

    Forward, each layer takes an all_gather along the column: of a parameter of r rows in this column of the mesh
    ceil(r / d) rows, padding included.  The sum of H products for an output element ends in an all_reduce of
    T N numbers along the row.  Backward, released parameters are gathered again.  The gradient of x, which each rank of
    a row has only from its own hidden features, takes an all_reduce of T K numbers along the row; the output's
    gradient, being whole, takes none.  If gradients are reduced, a layer's gradients take one reduce_scatter along the
    column of d times its parts.  No other gradient crosses a row: each rank has what its hidden features need.

    An axis of one rank takes nothing, except that parameters are distributed all the same.

    Source: Shoeybi et al., Megatron-LM (2019), section 3: f and g, an all_reduce each, backward and forward;
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
    """A parameter's shape, its hidden features filled up to a multiple of t."""
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
    """The collectives of one micro-batch along the column, whose gradients are reduced, if any."""
    found = []
    for layer in LAYERS:
        held, reduced = (_part_bytes(case, layer, names, column) for names in (case.parameter_names(), graded))
        phases = ("forward", "backward") if case.reshards else ("forward",)
        found += [Collective("all_gather", held, phase, group) for phase in phases]
        if reduced:
            found.append(Collective("reduce_scatter", case.mesh[0] * reduced, "backward", group))
    return found


def _part_bytes(case: TwoAxisCase, layer: str, names: Iterable[str], column: int) -> int:
    """Bytes that one rank holds of the layer's parameters, padding included."""
    start, stop = shard_bounds(case.hidden_features, case.mesh[1], column)
    numel = 0
    for name in (name for name in names if name.startswith(layer)):
        shape = case.shapes()[f"param.{name}"]
        rows, *others = (stop - start if each == HIDDEN_DIM.get(name) else size for each, size in enumerate(shape))
        numel += -(-rows // case.mesh[0]) * math.prod(others)
    return numel * DTYPES[case.dtype].itemsize
