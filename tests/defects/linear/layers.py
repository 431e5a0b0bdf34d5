"""Linear layers under tensor parallelism that are wrong in one way each."""

from __future__ import annotations

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
from equivtest.layout import local_shape
from equivtest.tensors import Placed
from tests.defects.defect import Replacing, run_with

wrong_colwise = Replacing("colwise_linear")
wrong_rowwise = Replacing("rowwise_linear")


class _BiasOnEveryRank(nn.Linear):
    """Rowwise: each rank adds the whole bias to its partial output, so the sum holds it w times."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(x, DTensor) and isinstance(self.weight, DTensor)
        bias = self.bias.to_local() if isinstance(self.bias, DTensor) else None
        partial = functional.linear(x.to_local(), self.weight.to_local(), bias)
        return DTensor.from_local(partial, x.device_mesh, [Partial()], run_check=False)


bias_on_every_rank = wrong_rowwise(
    "a partial value taken for the whole",
    LinearCase(world_size=2, style="rowwise", bias=True),
    "one rank adds it once; two add it twice",
)(run_with(run_linear, RowwiseParallel, _BiasOnEveryRank))


class _InputGradientNotReduced(nn.Linear):
    """Colwise: each rank's share of the input gradient counts as the whole."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(x, DTensor) and isinstance(self.weight, DTensor)
        bias = self.bias.to_local() if isinstance(self.bias, DTensor) else None
        whole = x.to_local(grad_placements=[Replicate()])  # right: [Partial()]
        local = functional.linear(whole, self.weight.to_local(), bias)
        shape = torch.Size((*x.shape[:-1], self.weight.shape[0]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, x.device_mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride)


input_gradient_not_reduced = wrong_colwise(
    "a reduction missing in the backward",
    LinearCase(world_size=2, style="colwise", requires_grad=("x",)),
    "the second rank holds no out feature, so its share of the gradient is zero",
    claim="gradients_equal_unsharded",
)(run_with(run_linear, ColwiseParallel, _InputGradientNotReduced))


@wrong_colwise(
    "shard order",
    LinearCase(world_size=2, style="colwise", out_features=2, requires_grad=("weight",)),
    "two ranks need one out feature each",
    claim="gradients_equal_unsharded",
)
def weight_gradient_shards_swapped(case: LinearCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Colwise: ranks 0 and 1 swap their weight gradients, if their shards have one size."""
    answers = run_linear(case, mesh, given, ColwiseParallel)
    gradient = answers.get("grad.weight")
    shapes = [local_shape(case.shapes()["weight"], case.layouts()["param.weight"], case.mesh_shape, rank)
              for rank in range(min(2, case.world_size))]  # fmt: skip
    if isinstance(gradient, DTensor) and len(shapes) == 2 and shapes[0] == shapes[1]:
        swap_between_first_two(gradient.to_local(), mesh)
    return answers


def swap_between_first_two(tensor: torch.Tensor, mesh: DeviceMesh) -> None:
    """Swaps `tensor` between ranks 0 and 1 of the mesh; it has one shape on both. Other ranks do nothing."""
    rank, group, processes = mesh.get_local_rank(), mesh.get_group(), mesh.mesh.flatten().tolist()
    if rank > 1:
        return
    other = torch.empty_like(tensor)
    for sender in (0, 1):
        if rank == sender:
            dist.send(tensor.contiguous(), processes[1 - sender], group=group)
        else:
            dist.recv(other, processes[sender], group=group)
    tensor.copy_(other)


@wrong_rowwise(
    "layout of gradients",
    LinearCase(world_size=1, style="rowwise", requires_grad=("weight",)),
    "the layout is wrong on a mesh of one rank too",
    claim="keeps_layout_of_parameter",
)
def weight_gradient_replicated(case: LinearCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Rowwise: the weight gradient, right in value, is whole on every rank instead of sharded."""
    answers = run_linear(case, mesh, given, RowwiseParallel)
    gradient = answers.get("grad.weight")
    if isinstance(gradient, DTensor):
        answers["grad.weight"] = gradient.redistribute(placements=[Replicate()])
    return answers


@wrong_rowwise(
    "inputs modified",
    LinearCase(world_size=1, style="rowwise", requires_grad=()),
    "one rank and one element suffice",
    claim="does_not_touch_its_inputs",
)
def cotangent_scaled_in_place(case: LinearCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Rowwise: the cotangent is scaled in place once the backward is done with it."""
    answers = run_linear(case, mesh, given, RowwiseParallel)
    given["cotangent"].mul_(2)
    return answers


@wrong_rowwise(
    "replicas that differ",
    LinearCase(world_size=2, style="rowwise"),
    "two ranks are needed to differ",
    claim="agrees_on_all_ranks",
)
def output_differs_on_last_rank(case: LinearCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Rowwise: the last rank's first output element is one ulp off."""
    answers = run_linear(case, mesh, given, RowwiseParallel)
    output = answers["output"]
    assert output is not None
    local = output.local if isinstance(output, Placed) else output.to_local()
    if case.world_size > 1 and mesh.get_local_rank() == case.world_size - 1 and local.numel():
        first = local.detach().view(-1)[:1]
        first.copy_(torch.nextafter(first, torch.full_like(first, torch.inf)))
    return answers


@wrong_rowwise(
    "a special path for one rank",
    LinearCase(world_size=1, style="rowwise", requires_grad=()),
    "one product of two factors that share the 24 bits of float32 has more than the 8 of bfloat16",
    claim="is_the_identity_for_one_rank",
)
def rounds_on_one_rank(case: LinearCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Rowwise: a shortcut for one rank alone rounds the output to bfloat16."""
    answers = run_linear(case, mesh, given, RowwiseParallel)
    output = answers["output"]
    assert output is not None
    local = (output.local if isinstance(output, Placed) else output.to_local()).detach()
    if case.world_size == 1:
        local.copy_(local.to(torch.bfloat16))
    return answers
