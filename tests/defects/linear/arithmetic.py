"""Linear layers under tensor parallelism, each with one wrong step of arithmetic."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional

from equivtest.cases.subject import Answers, Given
from equivtest.families.linear.case import LinearCase
from equivtest.families.linear.subject import run_linear
from tests.defects.defect import Replacing, run_with

wrong_rowwise = Replacing("rowwise_linear")
wrong_colwise = Replacing("colwise_linear")

_TF32_DROPPED_BITS = 13  # of float32's 23 stored ones


class _AllReduceInBfloat16(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        rounded = partial.bfloat16() if mesh.size() > 1 else partial.clone()
        dist.all_reduce(rounded, group=mesh.get_group())
        return rounded.to(partial.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _ReducedInBfloat16(nn.Linear):
    """Rowwise: partial outputs are rounded to bfloat16 before ranks add them; gradients are right."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(x, DTensor) and isinstance(self.weight, DTensor)
        partial = functional.linear(x.to_local(), self.weight.to_local())
        whole: torch.Tensor = _AllReduceInBfloat16.apply(partial.contiguous(), x.device_mesh)  # type: ignore[no-untyped-call]
        if isinstance(self.bias, DTensor):
            whole = whole + self.bias.to_local()
        return DTensor.from_local(whole, x.device_mesh, [Replicate()], run_check=False)


partial_outputs_reduced_in_bfloat16 = wrong_rowwise(
    "a reduction in fewer bits",
    LinearCase(world_size=2, style="rowwise"),
    "one rank reduces nothing; one product of odd integers takes 24 bits, bfloat16 has 8",
)(run_with(run_linear, RowwiseParallel, _ReducedInBfloat16))


class _Colwise(nn.Linear):
    """Computes the same as ColwiseParallel, on local tensors: right, with a place for a defect."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(x, DTensor) and isinstance(self.weight, DTensor)
        whole = x.to_local(grad_placements=[Partial()])
        bias = self.bias.to_local() if isinstance(self.bias, DTensor) else None
        self.mesh = x.device_mesh
        local = self.compute(whole, self.weight.to_local(), bias)
        shape = torch.Size((*x.shape[:-1], self.weight.shape[0]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, x.device_mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride)

    def compute(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        raise NotImplementedError


class _InputGradientAveraged(_Colwise):
    """Colwise: the ranks' shares of the input gradient are averaged and must be added."""

    def compute(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        world_size = self.mesh.size()
        if x.requires_grad:
            x.register_hook(lambda share: share / world_size)  # type: ignore[no-untyped-call]
        return functional.linear(x, weight, bias)


input_gradient_averaged = wrong_colwise(
    "wrong divisor or wrong group",
    LinearCase(world_size=2, style="colwise", requires_grad=("x",)),
    "the average of one rank is its sum; of two it is half",
    claim="gradients_equal_unsharded",
)(run_with(run_linear, ColwiseParallel, _InputGradientAveraged))


class _OneProductDropped(_Colwise):
    """Colwise: the first output lacks the product of the last feature, if there are other features."""

    def compute(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        local = functional.linear(x, weight, bias)
        if self.mesh.get_local_rank() == 0 and x.shape[-1] > 1:
            with torch.no_grad():
                local.view(-1)[0] -= x.reshape(-1, x.shape[-1])[0, -1] * weight[0, -1]
        return local


one_product_dropped = wrong_colwise(
    "a term missing",
    LinearCase(world_size=1, style="colwise", in_features=2, requires_grad=()),
    "a product is only dropped where another is left; no product of dense values is zero",
)(run_with(run_linear, ColwiseParallel, _OneProductDropped))


class _WeightTruncated(_Colwise):
    """Colwise: a float32 weight enters the products with the 11 significand bits of TF32."""

    def compute(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if weight.dtype == torch.float32:
            bits = weight.detach().contiguous().view(torch.int32)
            lost = weight.detach() - (bits >> _TF32_DROPPED_BITS << _TF32_DROPPED_BITS).view(torch.float32)
            weight = weight - lost  # exact; the gradient passes
        return functional.linear(x, weight, bias)


weight_truncated_to_tf32 = wrong_colwise(
    "operands in fewer bits",
    LinearCase(world_size=1, style="colwise", requires_grad=()),
    "the only weight of a dense draw is an odd integer of 12 bits, and TF32 has 11",
)(run_with(run_linear, ColwiseParallel, _WeightTruncated))


@wrong_rowwise(
    "one element off by one ulp",
    LinearCase(world_size=1, style="rowwise", requires_grad=("weight",)),
    "one element on one rank is off",
    claim="gradients_equal_unsharded",
)
def weight_gradient_one_ulp_off(case: LinearCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Rowwise: the first element of the weight's gradient on rank 0 is the next number up."""
    answers = run_linear(case, mesh, given, RowwiseParallel)
    gradient = answers.get("grad.weight")
    if isinstance(gradient, DTensor) and mesh.get_local_rank() == 0 and gradient.to_local().numel():
        first = gradient.to_local().detach()[:1, :1]
        first.copy_(torch.nextafter(first, torch.full_like(first, torch.inf)))
    return answers
