"""The collectives that a case is documented to take, derived from its layouts.

Letters: w ranks, N out_features, K in_features, s_i and A_i elements of one partition of parameter
i and of all of them.

On one mesh axis, a tensor that goes from one placement to another is documented to take

    Shard(d) -> Replicate    an all_gather of its shard
    Partial  -> Replicate    an all_reduce of the whole
    Partial  -> Shard(d)     a reduce_scatter of the whole
    Shard(d) -> Shard(e)     an all_to_all of its shard; on the CPU, whose gloo has none, an
                             all_gather of its shard and a chunk
    Replicate -> Shard(d)    nothing; nor does a placement that stays

and collectives take parts of one size: a dim of n elements that is sharded counts as w shards of
ceil(n / w).  A mesh of one rank redistributes nothing.

Source: torch.distributed.tensor.DTensor.redistribute, its docstring; Shard._to_replicate_tensor,
_reduce_shard_tensor and _to_new_shard_dim in placement_types.py for the padding, shard_dim_alltoall
in _collective_utils.py for the CPU (2.13.0).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

from equivtest.cases.base import Case, Shape
from equivtest.cases.fetch import FetchCase
from equivtest.cases.linear import LinearCase
from equivtest.collective import Collective
from equivtest.errors import Misuse
from equivtest.layout import Partial, Placement, Replicate, Shard
from equivtest.tensors import DTYPES

Collectives = tuple[Collective, ...]


@functools.singledispatch
def document(case: Case, rank: int) -> Collectives:
    """What `rank` of the mesh is documented to call for one draw, in order.

    A package with a case class of its own registers its documentation with `document.register`.

    Raises:
        Misuse: nobody registered it for this class.
    """
    raise Misuse(
        f"no collectives are documented for {type(case).__name__}: decorate the function that lists them with "
        "equivtest.oracle.collectives.document.register, in the module that defines the class"
    )


def without_all_to_all(collectives: Collectives) -> Collectives:
    """The same on a backend that has no all_to_all: an all_gather of as many bytes in its place."""
    return tuple(
        Collective("all_gather", call.size_bytes, call.phase) if call.kind == "all_to_all" else call
        for call in collectives
    )


@document.register
def document_fetch(case: FetchCase, rank: int) -> Collectives:
    """One all_gather of sum(s_i) elements, or one all_reduce of sum(A_i); none of no elements.

    Source: DeepSpeed PR 5420; deepspeed/runtime/zero/partition_parameters.py (0.19.8),
    _all_gather_dtype and _allgather_params_coalesced: one collective for all parameters.
    """
    padded = sum(case.padded_numel(shape) for shape in case.parameters)
    numel = padded if case.collective == "all_reduce" else padded // case.world_size
    return (Collective(case.collective, numel * DTYPES[case.dtype].itemsize),) if numel else ()


@document.register
def document_linear(case: LinearCase, rank: int) -> Collectives:
    """Parameters handed out, x and the output redistributed, and in the backward their gradients.

    Source: ColwiseParallel and RowwiseParallel in torch/distributed/tensor/parallel/style.py;
    distribute_tensor in torch/distributed/tensor/_api.py, `src_data_rank`: rank 0 scatters a
    sharded parameter and broadcasts a replicated one (2.13.0).  The backward is derived by the
    chain rule: the gradient of what was redistributed goes back the same way, where a partial
    sum came from, the gradient is replicated; the gradient of a replicated input is a partial sum.
    Gradients of parameters take no collective: each rank has what its shard needs.
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


def distribute_parameters(case: Case, rank: int, names: Iterable[str]) -> list[Collective]:
    """One collective per parameter; see `distribute`."""
    parameters, shapes, layouts = [f"param.{name}" for name in names], case.shapes(), case.layouts()
    return [distribute(case, rank, shapes[name], layouts[name].placements[0]) for name in parameters]


def distribute(case: Case, rank: int, shape: Shape, placement: Placement) -> Collective:
    """A scatter, of which only rank 0 hands in anything, or a broadcast of the whole tensor."""
    if isinstance(placement, Shard):
        return Collective("scatter", case.world_size * _shard_bytes(case, shape, placement) if rank == 0 else 0)
    return Collective("broadcast", _bytes(case, shape))


def redistribute(case: Case, shape: Shape, source: Placement, target: Placement, phase: str) -> list[Collective]:
    """What a tensor of `shape` takes from one placement to another: one collective or none."""
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
    """The shape with `dim` filled up to a multiple of the number of shards."""
    return tuple(-(-size // num_shards) * num_shards if axis == dim else size for axis, size in enumerate(shape))


def _shard_bytes(case: Case, shape: Shape, placement: Shard) -> int:
    """Of the largest shard, which is what each rank hands in."""
    return _bytes(case, _padded(shape, placement.dim, case.world_size)) // case.world_size


def _bytes(case: Case, shape: Shape) -> int:
    return math.prod(shape) * DTYPES[case.dtype].itemsize
