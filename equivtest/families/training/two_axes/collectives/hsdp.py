"""Derives the collectives of a perceptron that is sharded along one mesh axis and replicated along the other.

Letters: d x t ranks; the t ranks of a row divide the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from equivtest.base.collective import Collective
from equivtest.families.training.case import LAYERS
from equivtest.families.training.two_axes.case import TwoAxisCase
from equivtest.oracle.collectives import Collectives
from equivtest.tensors import DTYPES


def hsdp_collectives(case: TwoAxisCase, rank: int) -> Collectives:
    """Returns the collectives of one rank, which gather every layer along the row in each micro-batch.

    Layers that were released are gathered again in the backward. Tied layers are gathered and reduced together. If
    gradients are reduced, a layer's gradients take one reduce_scatter along the row and one all_reduce of the rank's
    shard along the column. Each of the t ranks of a mesh row has ceil(rows / t) rows of a parameter, padding included,
    or 1 / t of its columns. If `scatters_every` is True, every micro-batch takes the reduce_scatters, and only the last
    one takes the all_reduces. A mesh row of one rank gathers and scatters nothing. A mesh column of one rank still
    takes its all_reduce. The backward gathers the next layer ahead, whether or not gradients reach it.

    Source: Rajbhandari et al., ZeRO (2020), section 5.3, for the gathered and reduced tensors;
    FSDPParamGroup.unshard and post_backward, _prefetch_unshard, in
    torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, foreach_reduce in _fsdp_collectives.py (2.13.0).
    """
    num_shards = case.mesh[1]
    row, column = rank // num_shards, rank % num_shards
    along_row = name_group(case, range(row * num_shards, (row + 1) * num_shards))
    along_column = name_group(case, range(column, case.world_size, num_shards))
    groups = [LAYERS] if case.tied else [(layer,) for layer in LAYERS]
    found: list[Collective] = []
    for step in range(1, case.steps + 1):
        for micro_batch in range(1, case.micro_batches + 1):
            sizes = [_part_bytes(case, layers, case.parameter_names()) for layers in groups]
            phases = ("forward", "backward") if case.reshards else ("forward",)
            if num_shards > 1:
                found += [Collective("all_gather", size, phase, along_row) for phase in phases for size in sizes]
            reduces = micro_batch == case.micro_batches or case.syncs_every
            if not reduces and not case.scatters_every:
                continue
            for size in filter(None, (_part_bytes(case, layers, case.graded_names(step)) for layers in groups)):
                if num_shards > 1:
                    found.append(Collective("reduce_scatter", num_shards * size, "backward", along_row))
                if reduces:
                    found.append(Collective("all_reduce", size, "backward", along_column))
    return tuple(found)


def _part_bytes(case: TwoAxisCase, layers: tuple[str, ...], names: Iterable[str]) -> int:
    """Returns the bytes that one rank has of these parameters of the layers, padding included."""
    numel = sum(_part_numel(case, name) for name in names if name.startswith(layers))
    return numel * DTYPES[case.dtype].itemsize


def _part_numel(case: TwoAxisCase, name: str) -> int:
    rows, *columns = case.shapes()[f"param.{name}"]
    if name in case.by_columns:
        return rows * math.prod(columns) // case.num_shards
    return -(-rows // case.num_shards) * math.prod(columns)


def name_group(case: TwoAxisCase, ranks: range) -> str:
    """Returns the name by which a `Collective` names the group of these ranks."""
    return "mesh" if len(ranks) == case.world_size else f"processes {', '.join(map(str, ranks))}"
