"""Differentiable collectives without ranks: a list of tensors stands for the ranks."""

from __future__ import annotations

import torch

from equivtest.cases.values import draw
from equivtest.families.differentiable.case import Call, DifferentiableCase
from tests.unsharded import unsharded


@unsharded.register
def unsharded_differentiable(case: DifferentiableCase, index: int) -> dict[str, torch.Tensor]:
    """Torch's own backward through sums and copies in the case's dtype."""
    given = draw(case, index)
    answers = {}
    for call in case.calls:
        roots = range(case.world_size if call.is_rooted else 1)
        x = given["x"][:, : len(roots)].clone().requires_grad_()
        outputs = [_of_all_ranks(case, call, list(x[:, root]), root) for root in roots]
        whole = torch.stack([torch.stack(ranks) for ranks in outputs], dim=1)
        whole.backward(given["cotangent"][:, : len(roots)])
        answers |= {call.name: whole.detach(), f"grad.{call.name}": x.grad}
    return answers


def _of_all_ranks(case: DifferentiableCase, call: Call, ranks: list[torch.Tensor], root: int) -> list[torch.Tensor]:
    return [_of_rank(case, call, ranks, rank, root) for rank in range(len(ranks))]


def _of_rank(case: DifferentiableCase, call: Call, ranks: list[torch.Tensor], rank: int, root: int) -> torch.Tensor:
    output = torch.zeros_like(ranks[rank])
    if call.is_rooted and call.result in ("reduced", "gathered") and rank != root:
        return output
    share = case.world_size if call.op == "avg" else 1
    for source, x in enumerate(ranks):
        if call.result in ("reduced", "parts"):
            output[0] += x[rank if call.result == "parts" else 0] / share
        elif call.result == "gathered":
            output[source] += x[0]
        elif call.result in ("exchanged", "uneven"):
            numel = case.split(source, rank) if call.result == "uneven" else case.numel
            output[source, :numel] += x[rank, :numel]
        elif source == root:
            output[0] += x[rank if call.result == "scattered" else 0]
    return output
