"""Subjects that run nn.Embedding under torch's RowwiseParallel and ColwiseParallel.

Source: torch/distributed/tensor/parallel/style.py, classes ColwiseParallel and RowwiseParallel, and
torch/distributed/tensor/_ops/_embedding_ops.py (2.13.0). Both classes compute what the unsharded nn.Embedding computes,
forward and backward. They differ in the tensors that a rank holds and sends.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from equivtest.cases.subject import (
    Answers,
    Given,
    as_dtensor,
    require_form,
    run_backward,
    torch_placement,
    under_contract,
)
from equivtest.families.embedding.case import NO_PADDING, EmbeddingCase, RefusedEmbeddingCase


def colwise_embedding(case: EmbeddingCase, mesh: DeviceMesh, given: Given) -> Answers:
    return run_embedding(case, mesh, given, ColwiseParallel)


def rowwise_embedding(case: EmbeddingCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Shards the weight on the vocabulary. A rank masks the ids of other ranks, and the ranks' outputs are added."""
    return run_embedding(case, mesh, given, RowwiseParallel)


def run_embedding(
    case: EmbeddingCase,
    mesh: DeviceMesh,
    given: Given,
    style: type[ColwiseParallel] | type[RowwiseParallel],
    module: type[nn.Embedding] = nn.Embedding,
) -> Answers:
    plan = style(
        input_layouts=torch_placement(case, "ids"),
        output_layouts=torch_placement(case, "output"),
        use_local_output=case.use_local_output,
    )
    layer = parallelize_module(make_embedding(case, given, module), mesh, plan)
    ids = given["ids"]
    output = layer(as_dtensor(ids, case, "ids", mesh) if case.ids_is_dtensor else ids)
    require_form(output, is_plain=case.use_local_output)
    run_backward(output, case, mesh, given["cotangent"])
    return embedding_answers(case, layer, output)


def make_embedding(case: EmbeddingCase, given: Given, module: type[nn.Embedding]) -> nn.Embedding:
    max_norm = 1.0 if isinstance(case, RefusedEmbeddingCase) and case.misfit == "max_norm" else None
    layer = module(
        case.num_embeddings,
        case.embedding_dim,
        padding_idx=None if case.padding_idx == NO_PADDING else case.padding_idx,
        max_norm=max_norm,
        scale_grad_by_freq=case.scale_grad_by_freq,
        device="meta",
    )
    layer.weight = nn.Parameter(given["weight"].detach(), requires_grad=bool(case.requires_grad))
    return layer


def embedding_answers(case: EmbeddingCase, layer: nn.Module, output: torch.Tensor) -> Answers:
    weight = layer.get_parameter("weight")
    found: dict[str, torch.Tensor | None] = {"output": output, "param.weight": weight}
    if case.requires_grad:
        found["grad.weight"] = weight.grad
    return under_contract(case, found)
