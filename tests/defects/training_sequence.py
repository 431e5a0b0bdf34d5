"""Sequence-parallel perceptrons, and their training, that are wrong in one way each."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional

from equivtest.cases.case import at_step
from equivtest.cases.subject import Given
from equivtest.families.training.case import PerceptronCase
from equivtest.families.training.sequence.case import MlpCase
from equivtest.families.training.sequence.subject import Run
from equivtest.families.training.subject import Activation, Mlp
from tests.defects.defect import Replacing, answers_of
from tests.defects.linear.layers import swap_between_first_two

wrong = Replacing("sequence_parallel_mlp")


class _Stale(Run):
    """Forward and backward go on using copies of the parameters that were taken before the first update."""

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


stale_parameters = wrong(
    "state across steps",
    MlpCase(world_size=1, requires_grad=("in_proj.weight",), optimizer="sgd", steps=2),
    "one weight, updated once, tells from the second step on",
    claim="trains_like_unsharded",
)(answers_of(_Stale))


class _Forgetful(Run):
    """The optimizer's state is lost after the first update, so that the second begins anew."""

    def update(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.state.clear()
        super().update(optimizer, step)


momentum_not_carried = wrong(
    "state across steps",
    MlpCase(world_size=1, requires_grad=("in_proj.weight",), optimizer="sgd", steps=2, momentum=0.5),
    "the first update needs no momentum, so that two are needed",
    claim="trains_like_unsharded",
)(answers_of(_Forgetful))


class _WarmsUpLonger(Run):
    """The schedule after the warm-up begins one step late."""

    def make_schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        schedule = super().make_schedule(optimizer)
        if isinstance(schedule, torch.optim.lr_scheduler.SequentialLR):
            schedule._milestones = [3]
        return schedule


next_schedule_begins_late = wrong(
    "state across steps",
    MlpCase(world_size=1, requires_grad=("in_proj.weight",), optimizer="sgd", steps=3, between_steps="warm_up"),
    "the warm-up takes two steps, and the next schedule begins with the third",
    claim="trains_like_unsharded",
)(answers_of(_WarmsUpLonger))


class _Undecayed(Run):
    """The weight decay does not reach the bias of out_proj."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = super().make_optimizer()
        (group,) = optimizer.param_groups
        bias = self.model.get_submodule("out_proj").bias
        apart = [parameter for parameter in group["params"] if parameter is bias]
        group["params"] = [parameter for parameter in group["params"] if parameter is not bias]
        if apart:
            optimizer.add_param_group({"params": apart, "weight_decay": 0.0})
        return optimizer


bias_without_weight_decay = wrong(
    "flags",
    MlpCase(
        world_size=1,
        biases=("out_proj",),
        requires_grad=("out_proj.bias",),
        optimizer="sgd",
        steps=2,
        weight_decay=0.25,
    ),
    "one rank, one feature and one decayed bias suffice; training takes two steps at least",
    claim="trains_like_unsharded",
)(answers_of(_Undecayed))


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
    """The activation is applied to each rank's partial sum of out_proj, instead of its input."""

    module = _ActivationMisplaced


activation_on_partial_sum = wrong(
    "a partial value taken for the whole",
    MlpCase(world_size=1, leading=(2,), requires_grad=()),
    "of two tokens of opposite sign one is not activated, whatever the sign of out_proj's weight",
)(answers_of(_Misplaced))


class _Unreduced(Run):
    """The gradient of out_proj's replicated bias is each rank's sum over its own part of the sequence."""

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


bias_gradient_of_own_tokens = wrong(
    "a reduction missing in the backward",
    MlpCase(
        world_size=2, biases=("out_proj",), x_is_dtensor=True, use_local_output=False, requires_grad=("out_proj.bias",)
    ),
    "the second rank holds no token, so that its share of the gradient is zero",
    claim="gradients_equal_unsharded",
)(answers_of(_Unreduced))


class _Swapped(Run):
    """Ranks 0 and 1 swap their parts of the output's sequence, if their parts have one size."""

    def keep(self, name: str, tensor: torch.Tensor | None) -> None:
        length, world_size = self.case.leading[self.case.sequence_dim], self.case.world_size
        is_output = name in {at_step(step, "output") for step in range(1, self.case.steps + 1)}
        if tensor is not None and is_output and world_size > 1 and 2 * -(-length // world_size) <= length:
            swapped = tensor.detach().clone()
            swap_between_first_two(swapped, self.mesh)
            tensor = swapped.requires_grad_(tensor.requires_grad)
        super().keep(name, tensor)


output_shards_swapped = wrong(
    "shard order",
    MlpCase(world_size=2, leading=(2,), use_local_output=False, requires_grad=()),
    "two ranks need one token each",
)(answers_of(_Swapped))
