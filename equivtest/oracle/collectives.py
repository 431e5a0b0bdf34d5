"""Derives from the layouts of a case's tensors which collectives torch documents for the case.

If a tensor changes its placement on one mesh axis, torch is documented to call

    Shard(d) -> Replicate    an all_gather of its shard
    Partial  -> Replicate    an all_reduce of the whole
    Partial  -> Shard(d)     a reduce_scatter of the whole
    Shard(d) -> Shard(e)     an all_to_all of its shard; on the CPU, because gloo has no all_to_all, an
                             all_gather of its shard, followed by a chunk without a collective
    Replicate -> Shard(d)    no collective; an unchanged placement needs none either

Collectives need parts of one size: a sharded dim of n elements counts as w shards of ceil(n / w).  A mesh of one rank
redistributes nothing.

Source: torch.distributed.tensor.DTensor.redistribute, its docstring; Shard._to_replicate_tensor,
_reduce_shard_tensor and _to_new_shard_dim in placement_types.py for the padding, shard_dim_alltoall
in _collective_utils.py for the CPU (2.13.0).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from equivtest.base.collective import Collective
from equivtest.cases.case import Case, Shape
from equivtest.cases.parts import by_case
from equivtest.errors import Misuse
from equivtest.layout import Partial, Placement, Replicate, Shard
from equivtest.tensors import DTYPES

Collectives = tuple[Collective, ...]


@by_case("collectives", "oracle")
def expected_collectives(case: Case, rank: int) -> Collectives:
    """Returns the collectives that torch documents for one rank in one draw, in the order of the calls.

    If a package has its own case class, it registers a function for that class with `expected_collectives.register`.

    Raises:
        Misuse: no function is registered for this class.
    """
    raise Misuse(
        f"no collectives are documented for {type(case).__name__}: decorate the function that lists them with "
        "equivtest.oracle.collectives.expected_collectives.register, in the module that defines the class"
    )


def without_all_to_all(collectives: Collectives) -> Collectives:
    """Replaces each all_to_all by an all_gather of as many bytes, for a backend without all_to_all."""
    return tuple(
        Collective("all_gather", call.size_bytes, call.phase) if call.kind == "all_to_all" else call
        for call in collectives
    )


def distribute_parameters(case: Case, rank: int, names: Iterable[str]) -> list[Collective]:
    """Lists, for each named parameter, the scatter or broadcast by which rank 0 distributes the parameter."""
    parameters, shapes, layouts = [f"param.{name}" for name in names], case.shapes(), case.layouts()
    return [distribute(case, rank, shapes[name], layouts[name].placements[0]) for name in parameters]


def distribute(case: Case, rank: int, shape: Shape, placement: Placement) -> Collective:
    if isinstance(placement, Shard):
        return Collective("scatter", case.world_size * _shard_bytes(case, shape, placement) if rank == 0 else 0)
    return Collective("broadcast", _bytes(case, shape))


def redistribute(case: Case, shape: Shape, source: Placement, target: Placement, phase: str) -> list[Collective]:
    if source == target or case.world_size == 1:
        return []
    match source, target:
        case Shard(), Replicate():
            return [Collective("all_gather", _shard_bytes(case, shape, source), phase)]
        case Shard(), Shard():
            size = _shard_bytes(case, _padded(shape, target.dim, case.world_size), source)
            return [Collective("all_to_all", size, phase)]
        case Partial(), Replicate():
            return [Collective("all_reduce", _bytes(case, shape), phase)]
        case Partial(), Shard():
            return [Collective("reduce_scatter", case.world_size * _shard_bytes(case, shape, target), phase)]
    return []


def _padded(shape: Shape, dim: int, num_shards: int) -> Shape:
    return tuple(-(-size // num_shards) * num_shards if axis == dim else size for axis, size in enumerate(shape))


def _shard_bytes(case: Case, shape: Shape, placement: Shard) -> int:
    return _bytes(case, _padded(shape, placement.dim, case.world_size)) // case.world_size


def _bytes(case: Case, shape: Shape) -> int:
    return math.prod(shape) * DTYPES[case.dtype].itemsize
