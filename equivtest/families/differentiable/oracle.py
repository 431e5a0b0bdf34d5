"""Computes the outputs and gradients of differentiable collectives from the operands of all ranks.

A collective is a linear map f from the operands x of all ranks to the outputs of all ranks. Let c be the ranks'
cotangents of its outputs. Then the gradient is the adjoint f*(c): the sum over ranks of <f(x), c> is the sum of <x,
f*(c)>. On integers, the outputs and the gradients are exact.

Source: torch.distributed.nn.functional and torch.distributed._functional_collectives, docstrings (2.13.0).
"""

from __future__ import annotations

import torch

from equivtest.cases.values import draw
from equivtest.families.differentiable.case import Call, DifferentiableCase
from equivtest.oracle import expect
from equivtest.oracle.expected import Expected, ExpectedTensor
from equivtest.oracle.operands import reduce_exactly


@expect.register
def expect_differentiable(case: DifferentiableCase, index: int) -> Expected:
    """Returns the outputs, and the gradients of the operands.

    An element of an output or a gradient is an element of some rank's tensor, or the sum of one element from each rank,
    all at the same position. An average divides that sum by the number of ranks.
    """
    given, tensors, layouts = draw(case, index), {}, case.layouts()
    bits_used = {
        name: reduce_exactly(name, tensor, "sum", (case.world_size,)).bits_used for name, tensor in given.items()
    }
    for call in case.calls:
        roots = range(case.world_size if call.is_rooted else 1)
        x, cotangent = (given[name].double()[:, : len(roots)] for name in ("x", "cotangent"))
        x = x.requires_grad_()
        output = torch.stack([forward_of(case, call, x[:, root], root) for root in roots], dim=1)
        (gradient,) = torch.autograd.grad(output, x, cotangent)
        for name, value in ((call.name, output.detach()), (f"grad.{call.name}", gradient)):
            tensors[name] = ExpectedTensor(
                value=value,
                allowed=None,
                layout=layouts[name],
                dtype=case.dtype,
                derivation="equal: a sum of integers over the ranks, exact in any order",
                bits=value.to(given["x"].dtype),
                is_sum=True,
            )
    return Expected(tensors, bits_used)


def forward_of(case: DifferentiableCase, call: Call, x: torch.Tensor, root: int) -> torch.Tensor:
    """Returns all ranks' outputs, padded with zeros. Operands and outputs have the dims (rank, part, element)."""
    ranks, first = case.world_size, x[:, :1]
    every, transposed = torch.ones(ranks, 1, 1, dtype=x.dtype), x.transpose(0, 1)
    is_root = (torch.arange(ranks) == root).to(x.dtype)[:, None, None]
    match call.result:
        case "reduced":
            output = first.sum(0) * (is_root if call.is_rooted else every)
        case "parts":
            output = x.sum(0)[:, None]
        case "copied":
            output = first[root] * every
        case "gathered":
            output = first[:, 0] * (is_root if call.is_rooted else every)
        case "scattered":
            output = x[root][:, None]
        case "exchanged":
            output = transposed
        case _:
            splits = torch.tensor([[case.split(source, target) for source in range(ranks)] for target in range(ranks)])
            output = transposed * (torch.arange(case.numel) < splits[..., None])
    padding = output.new_zeros(ranks, ranks - output.shape[1], case.numel)
    return torch.cat([output, padding], dim=1) / (ranks if call.op == "avg" else 1)
