"""Sequence-parallel perceptrons, and their training, that are wrong in one way each."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional

from equivtest.families.linear.defects.layers import swap_between_first_two
from equivtest.families.training.case import PerceptronCase, at_step
from equivtest.families.training.sequence.case import MlpCase
from equivtest.families.training.sequence.subject import Run
from equivtest.families.training.subject import Activation, Mlp
from equivtest.kit.subject import Answers, Given


def stale_parameters(case: MlpCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Forward and backward go on using copies of the parameters that were taken before the first update."""
    return _Stale(case, mesh, given).answers()


class _Stale(Run):
    def run_step(self, step: int) -> None:
        parameters = [parameter.detach() for parameter in self.model.parameters()]
        locals_ = [parameter.to_local() for parameter in parameters if isinstance(parameter, DTensor)]
        current = [local.clone() for local in locals_]
        if step == 1:
            self.stale = current
        for local, stale in zip(locals_, self.stale, strict=True):
            local.copy_(stale)
        super().run_step(step)
        for local, right in zip(locals_, current, strict=True):
            local.copy_(right)


def momentum_not_carried(case: MlpCase, mesh: DeviceMesh, given: Given) -> Answers:
    """The optimizer's state is lost after the first update, so that the second begins anew."""
    return _Forgetful(case, mesh, given).answers()


class _Forgetful(Run):
    def update(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.state.clear()
        super().update(optimizer, step)


def bias_without_weight_decay(case: MlpCase, mesh: DeviceMesh, given: Given) -> Answers:
    """The weight decay does not reach the bias of out_proj."""
    return _Undecayed(case, mesh, given).answers()


class _Undecayed(Run):
    def make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = super().make_optimizer()
        (group,) = optimizer.param_groups
        bias = self.model.get_submodule("out_proj").bias
        apart = [parameter for parameter in group["params"] if parameter is bias]
        group["params"] = [parameter for parameter in group["params"] if parameter is not bias]
        if apart:
            optimizer.add_param_group({"params": apart, "weight_decay": 0.0})
        return optimizer


def activation_on_partial_sum(case: MlpCase, mesh: DeviceMesh, given: Given) -> Answers:
    """The activation is applied to each rank's partial sum of out_proj, instead of to what goes into it."""
    return _Misplaced(case, mesh, given).answers()


class _LinearBeforeActivation(nn.Linear):
    activation: Activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(x, DTensor) and isinstance(self.weight, DTensor)
        partial = self.activation(functional.linear(x.to_local(), self.weight.to_local()))
        shape = torch.Size((*x.shape[:-1], self.weight.shape[0]))
        stride = torch.empty(shape, device="meta").stride()
        summed = DTensor.from_local(partial, x.device_mesh, [Partial()], run_check=False, shape=shape, stride=stride)
        return summed if self.bias is None else summed.redistribute(placements=[Replicate()]) + self.bias


class _ActivationMisplaced(Mlp):
    def __init__(self, case: PerceptronCase, given: Given) -> None:
        super().__init__(case, given)
        right, wrong = self.out_proj, _LinearBeforeActivation(1, 1, device="meta")
        wrong.weight, wrong.bias = right.weight, right.bias
        wrong.activation = self.activation
        self.out_proj = wrong

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.out_proj(self.in_proj(x))
        return output


class _Misplaced(Run):
    module = _ActivationMisplaced


def bias_gradient_of_own_tokens(case: MlpCase, mesh: DeviceMesh, given: Given) -> Answers:
    """The gradient of out_proj's replicated bias is each rank's sum over its own part of the sequence."""
    return _Unreduced(case, mesh, given).answers()


class _Unreduced(Run):
    def run_step(self, step: int) -> None:
        hook = None
        if "out_proj.bias" in self.case.requires_grad:
            own = self.given[at_step(step, "cotangent")].reshape(-1, self.case.out_features).sum(0)

            def keep_own(held: torch.Tensor) -> None:
                assert isinstance(held.grad, DTensor)
                held.grad.to_local().copy_(own)

            bias = self.model.get_parameter("out_proj.bias")
            hook = bias.register_post_accumulate_grad_hook(keep_own)  # type: ignore[no-untyped-call]
        super().run_step(step)
        if hook is not None:
            hook.remove()


def output_shards_swapped(case: MlpCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Ranks 0 and 1 hold each other's part of the output's sequence, where their parts are of one size."""
    return _Swapped(case, mesh, given).answers()


class _Swapped(Run):
    def keep(self, name: str, tensor: torch.Tensor | None) -> None:
        length, world_size = self.case.leading[self.case.sequence_dim], self.case.world_size
        is_output = name in {at_step(step, "output") for step in range(1, self.case.steps + 1)}
        if tensor is not None and is_output and world_size > 1 and 2 * -(-length // world_size) <= length:
            swapped = tensor.detach().clone()
            swap_between_first_two(swapped, self.mesh)
            tensor = swapped.requires_grad_(tensor.requires_grad)
        super().keep(name, tensor)
