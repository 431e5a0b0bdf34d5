"""Embeddings by rows and by columns that differ from each other, in one way each."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from equivtest.families.embedding.defects import Local, Masked, MaskOffByOne, PaddingRowLearns
from equivtest.families.embedding.subject import PLANS, run_both_ways, run_embedding
from equivtest.families.embedding.ways.case import EmbeddingWaysCase, of_style
from equivtest.kit.subject import Answers, Given


def gradient_added_backwards(case: EmbeddingWaysCase, mesh: DeviceMesh, given: Given) -> Answers:
    """By rows the gradient is added up beginning with the last token: right, but in another order."""
    return run_both_ways(case, mesh, given, {"rowwise": _AddedBackwards})


class _AddedBackwards(Masked):
    def to_rows(self, local: torch.Tensor, num_rows: int) -> torch.Tensor:
        return local.flip(tuple(range(local.dim())))

    def to_partial(self, found: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return found.flip(tuple(range(found.dim() - 1)))


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


def first_id_of_a_part_missing(case: EmbeddingWaysCase, mesh: DeviceMesh, given: Given) -> Answers:
    """By rows the first id of every part but the first is taken for another rank's; by columns there are no parts."""
    return run_both_ways(case, mesh, given, {"rowwise": MaskOffByOne})


def padding_learns_by_columns(case: EmbeddingWaysCase, mesh: DeviceMesh, given: Given) -> Answers:
    """By columns the row of `padding_idx` gets a gradient like any other."""
    return run_both_ways(case, mesh, given, {"colwise": PaddingRowLearns})


def columns_answered_for_rows(case: EmbeddingWaysCase, mesh: DeviceMesh, given: Given) -> Answers:
    """The embedding by columns runs twice, once under the name of the one by rows: nothing was compared."""
    answers: Answers = {}
    for style in case.styles:
        found = run_embedding(case.of_style("colwise"), mesh, given, PLANS["colwise"])
        answers |= {of_style(name, style): tensor for name, tensor in found.items()}
    return answers
