"""Embeddings by rows and by columns that differ from each other, in one way each."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from equivtest.cases.subject import Answers, Given
from equivtest.families.embedding.subject import PLANS, run_both_ways, run_embedding
from equivtest.families.embedding.ways.case import EmbeddingWaysCase, of_style
from tests.defects.defect import defect
from tests.defects.embedding import Local, Masked, MaskOffByOne, PaddingRowLearns

_REAL = (("real", 12),)  # numbers whose sums in other orders, and rounded once, are others, three of them and four


@defect(
    replaces="embedding_both_ways",
    family="a sum in another order",
    claim="both_ways_agree",
    kind="ways",
    smallest=EmbeddingWaysCase(world_size=1, leading=(3,), values=_REAL),
    why="two numbers have one sum in any order; three tokens hold the only id",
)
def gradient_added_backwards(case: EmbeddingWaysCase, mesh: DeviceMesh, given: Given) -> Answers:
    """By rows the gradient is added up beginning with the last token: right, but in another order."""
    return run_both_ways(case, mesh, given, {"rowwise": _AddedBackwards})


class _AddedBackwards(Masked):
    def to_rows(self, local: torch.Tensor, num_rows: int) -> torch.Tensor:
        return local.flip(tuple(range(local.dim())))

    def to_partial(self, found: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return found.flip(tuple(range(found.dim() - 1)))


@defect(
    replaces="embedding_both_ways",
    family="a sum in other bits",
    claim="both_ways_agree",
    kind="ways",
    smallest=EmbeddingWaysCase(world_size=1, leading=(4,), values=_REAL),
    why="the sum of two is rounded once in either; of three to five tokens of one id some values show it",
)
def gradient_added_in_float64(case: EmbeddingWaysCase, mesh: DeviceMesh, given: Given) -> Answers:
    """By columns the gradient is added up in float64 and rounded once: right, but to other bits."""
    return run_both_ways(case, mesh, given, {"colwise": _AddedInFloat64})


class _AddedInFloat64(Local):
    def look_up(self, ids: torch.Tensor, own: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        padding_idx = -1 if self.padding_idx is None else self.padding_idx
        found = _SummedInFloat64.apply(own, ids, padding_idx, self.scale_grad_by_freq)  # type: ignore[no-untyped-call]
        return cast(torch.Tensor, found)


class _SummedInFloat64(torch.autograd.Function):
    """Rows of a table, bit by bit; their gradients are cast before they are added."""

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, ids: torch.Tensor, padding_idx: int, *scale: bool) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.num_rows, ctx.options = len(table), (padding_idx, *scale)
        return table[ids.long()]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (ids,), (gradient,) = ctx.saved_tensors, gradients
        learned = torch.ops.aten.embedding_dense_backward(gradient.double(), ids, ctx.num_rows, *ctx.options)
        return learned.to(gradient.dtype), None, None, None


@defect(
    replaces="embedding_both_ways",
    family="ids at the edge of a shard",
    claim="both_ways_agree",
    kind="ways",
    smallest=EmbeddingWaysCase(world_size=2, leading=(2,), num_embeddings=2, requires_grad=()),
    why="one rank has no second part; of two ids in two tokens one begins it",
)
def first_id_of_a_part_missing(case: EmbeddingWaysCase, mesh: DeviceMesh, given: Given) -> Answers:
    """By rows the first id of every part but the first is taken for another rank's; by columns there are no parts."""
    return run_both_ways(case, mesh, given, {"rowwise": MaskOffByOne})


@defect(
    replaces="embedding_both_ways",
    family="flags",
    claim="both_ways_agree",
    kind="ways",
    smallest=EmbeddingWaysCase(world_size=1, padding_idx=0),
    why="one rank and one token, which holds the padding id, suffice",
)
def padding_learns_by_columns(case: EmbeddingWaysCase, mesh: DeviceMesh, given: Given) -> Answers:
    """By columns the row of `padding_idx` gets a gradient like any other."""
    return run_both_ways(case, mesh, given, {"colwise": PaddingRowLearns})


@defect(
    replaces="embedding_both_ways",
    family="other collectives than documented",
    claim="uses_only_collectives",
    kind="collectives",
    smallest=EmbeddingWaysCase(world_size=2, num_embeddings=2, embedding_dim=2, requires_grad=(), records=True),
    why="one rank redistributes nothing; of fewer than two ids or features torch gathers the weight",
)
def columns_answered_for_rows(case: EmbeddingWaysCase, mesh: DeviceMesh, given: Given) -> Answers:
    """The embedding by columns runs twice, once under the name of the one by rows: nothing was compared."""
    answers: Answers = {}
    for style in case.styles:
        found = run_embedding(case.of_style("colwise"), mesh, given, PLANS["colwise"])
        answers |= {of_style(name, style): tensor for name, tensor in found.items()}
    return answers
