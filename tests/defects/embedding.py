"""Embeddings under tensor parallelism that are wrong in one way each."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional

from equivtest.cases.subject import Answers, Given
from equivtest.families.embedding.case import EmbeddingCase
from equivtest.families.embedding.subject import run_embedding
from equivtest.layout import shard_bounds
from tests.defects.defect import Replacing, run_with

wrong_colwise = Replacing("colwise_embedding")
wrong_rowwise = Replacing("rowwise_embedding")

# ------------------------------------------------------------------------------------------------
# rowwise


class Masked(nn.Embedding):
    """A right masked lookup on one rank's part of the vocabulary; defects change one step of it.

    Ids of other ranks look up a row of zeros behind the part.
    """

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        assert isinstance(ids, DTensor) and isinstance(self.weight, DTensor)
        mesh, own = ids.device_mesh, self.weight.to_local()
        start, stop = self.part(mesh.get_local_rank(), mesh.size())
        numbers = ids.to_local().long()
        local = (numbers - start).masked_fill(self.is_of_others(numbers, start, stop), len(own))
        padding = (
            self.padding_idx - start if self.padding_idx is not None and start <= self.padding_idx < stop else None
        )
        found = functional.embedding(
            self.to_rows(local, len(own)),
            torch.cat([own, own.new_zeros(1, own.shape[1])]),
            padding_idx=padding,
            scale_grad_by_freq=self.scale_grad_by_freq,
        )
        return DTensor.from_local(self.to_partial(found, mesh), mesh, [Partial()], run_check=False)

    def part(self, rank: int, num_ranks: int) -> tuple[int, int]:
        return shard_bounds(self.num_embeddings, num_ranks, rank)

    def is_of_others(self, ids: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return (ids < start) | (ids >= stop)

    def to_rows(self, local: torch.Tensor, num_rows: int) -> torch.Tensor:
        return local

    def to_partial(self, found: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return found


class MaskOffByOne(Masked):
    """Rowwise: every part except the first takes its first id for another rank's."""

    def is_of_others(self, ids: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return super().is_of_others(ids, start, stop) | ((ids == start) & (start > 0))


mask_off_by_one = wrong_rowwise(
    "ids at the edge of a shard",
    EmbeddingCase(world_size=2, style="rowwise", leading=(2,), num_embeddings=2, requires_grad=()),
    "one rank has no second part; of two ids in two tokens one begins it",
)(run_with(run_embedding, RowwiseParallel, MaskOffByOne))


class _MaskNotApplied(Masked):
    """Rowwise: ids of other ranks look up the first row of each part, which is added to the right one."""

    def to_rows(self, local: torch.Tensor, num_rows: int) -> torch.Tensor:
        return local.masked_fill(local == num_rows, 0)


mask_not_applied = wrong_rowwise(
    "a partial value taken for the whole",
    EmbeddingCase(world_size=2, style="rowwise", num_embeddings=2, requires_grad=()),
    "one rank masks nothing, and a rank without ids has no row to add",
)(run_with(run_embedding, RowwiseParallel, _MaskNotApplied))


class _PartOfAnotherRank(Masked):
    """Rowwise: each rank masks by the bounds of the rank opposite, as if ranks counted backwards."""

    def part(self, rank: int, num_ranks: int) -> tuple[int, int]:
        return super().part(num_ranks - 1 - rank, num_ranks)

    def to_rows(self, local: torch.Tensor, num_rows: int) -> torch.Tensor:
        return local.clamp(max=num_rows)  # the opposite part may be longer


part_of_another_rank = wrong_rowwise(
    "shard order",
    EmbeddingCase(world_size=2, style="rowwise", num_embeddings=2, requires_grad=()),
    "two ranks need one id each",
)(run_with(run_embedding, RowwiseParallel, _PartOfAnotherRank))


class _LookupsAveraged(Masked):
    """Rowwise: the ranks' lookups are averaged instead of added."""

    def to_partial(self, found: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return found / mesh.size()


lookups_averaged = wrong_rowwise(
    "wrong divisor or wrong group",
    EmbeddingCase(world_size=2, style="rowwise", requires_grad=()),
    "one rank's lookup is its average; the zero of a rank without ids halves the other's",
)(run_with(run_embedding, RowwiseParallel, _LookupsAveraged))


# ------------------------------------------------------------------------------------------------
# colwise


class PaddingRowLearns(nn.Embedding):
    """Colwise: the row of `padding_idx` gets a gradient like any other."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.weight, scale_grad_by_freq=self.scale_grad_by_freq)


padding_row_learns = wrong_colwise(
    "flags",
    EmbeddingCase(world_size=1, style="colwise", padding_idx=0),
    "one rank and one token, which holds the padding id, suffice",
    claim="gradients_equal_unsharded",
)(run_with(run_embedding, ColwiseParallel, PaddingRowLearns))


class Local(nn.Embedding):
    """A right lookup on one rank's features; defects change the lookup."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        assert isinstance(ids, DTensor) and isinstance(self.weight, DTensor)
        found = self.look_up(ids.to_local(), self.weight.to_local(), ids.device_mesh)
        shape = torch.Size((*ids.shape, self.embedding_dim))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(found, ids.device_mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride)

    def look_up(self, ids: torch.Tensor, own: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return functional.embedding(ids, own, padding_idx=self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq)


class _RepeatsCountedOnce(Local):
    """Colwise: of an id that occurs several times, one token alone reaches the gradient."""

    def look_up(self, ids: torch.Tensor, own: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        found = _PutNotAdded.apply(own, ids.long(), self.padding_idx)  # type: ignore[no-untyped-call]
        return cast(torch.Tensor, found)


repeats_counted_once = wrong_colwise(
    "a term missing",
    EmbeddingCase(world_size=1, style="colwise", leading=(2,)),
    "two tokens hold the only id",
    claim="gradients_equal_unsharded",
)(run_with(run_embedding, ColwiseParallel, _RepeatsCountedOnce))


class _PutNotAdded(torch.autograd.Function):
    """Rows of a table; its backward writes gradients into the table's, and should add them."""

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, ids: torch.Tensor, padding_idx: int | None) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.padding_idx = table.shape, padding_idx
        return table[ids]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (ids,), (gradient,) = ctx.saved_tensors, gradients
        learned = gradient.new_zeros(ctx.shape)
        learned[ids] = gradient
        if ctx.padding_idx is not None:
            learned[ctx.padding_idx] = 0
        return learned, None, None


class _FeaturesOfNextRank(Local):
    """Colwise: each rank looks up the features of the next one, if their parts have one size."""

    def look_up(self, ids: torch.Tensor, own: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        if self.embedding_dim % mesh.size() == 0:
            own = own + (_of_next_rank(own.detach(), mesh) - own.detach())  # the gradient stays one's own
        return super().look_up(ids, own, mesh)


features_of_next_rank = wrong_colwise(
    "shard order",
    EmbeddingCase(world_size=2, style="colwise", embedding_dim=2, requires_grad=()),
    "two ranks need one feature each",
)(run_with(run_embedding, ColwiseParallel, _FeaturesOfNextRank))


@wrong_colwise(
    "shard order",
    EmbeddingCase(
        world_size=2, style="colwise", leading=(2,), num_embeddings=2, input_layout="shard(0)", requires_grad=()
    ),
    "two ranks need one token each; two tokens hold both of two ids",
)
def ids_gathered_in_another_order(case: EmbeddingCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Colwise: sharded ids are gathered from the second rank on, if their parts have one size."""
    if case.input_layout != "replicate" and not case.input_is_uneven:
        given = {**given, "ids": _of_next_rank(given["ids"], mesh)}
    return run_embedding(case, mesh, given, ColwiseParallel)


def _of_next_rank(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Returns the next rank's tensor (the first rank's on the last rank); all have one shape."""
    found = [torch.empty(tensor.shape, dtype=tensor.dtype) for _ in range(mesh.size())]
    dist.all_gather(found, tensor.contiguous(), group=mesh.get_group())
    return found[(mesh.get_local_rank() + 1) % mesh.size()]
