"""Runs a perceptron and its training on one rank. This is the base of all subjects, for any parallel style.

Source: torch.nn.Linear, torch.optim.SGD and AdamW, torch.utils.checkpoint (2.13.0).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from equivtest.cases.subject import Answers, Given, copied
from equivtest.families.training.case import LAYERS, PerceptronCase
from equivtest.families.training.case_steps import DAMPENING
from equivtest.tensors import DTYPES, Placed

STATE_KEYS = {"momentum": "momentum_buffer"} | {name: name for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")}
"""Our name of an optimizer's state -> its key in torch (torch.optim.SGD, torch.optim.AdamW, 2.13.0)."""
Activation = Callable[[torch.Tensor], torch.Tensor]


class Mlp(nn.Module):
    """The unsharded module, replicated on every rank, as a user builds it before parallelizing it.

    Attributes:
        stops_at_hidden: Whether the backward ends at the hidden activation. The caller sets this before the forward.
    """

    stops_at_hidden = False
    ACTIVATIONS: ClassVar[dict[str, Activation]] = {
        "relu": functional.relu,
        "gelu": functional.gelu,
        "silu": functional.silu,
    }

    def __init__(self, case: PerceptronCase, given: Given) -> None:
        super().__init__()
        self.activation: Activation = self.ACTIVATIONS[case.activation]
        self.checkpointed = case.checkpointed
        biases = {layer: layer in case.biases for layer in LAYERS}
        self.in_proj = nn.Linear(case.in_features, case.hidden_features, bias=biases["in_proj"], device="meta")
        linear = TransposedLinear if case.tied == "transposed" else nn.Linear
        self.out_proj = linear(case.hidden_features, case.out_features, bias=biases["out_proj"], device="meta")
        for name in case.parameter_names():
            layer, _, kind = name.partition(".")
            # A copy: an optimizer's update must not reach the harness's own tensor.
            whole = nn.Parameter(given[name].detach().clone(), requires_grad=name in case.requires_grad)
            setattr(self.get_submodule(layer), kind, whole)
        if case.tied:
            self.out_proj.weight = self.in_proj.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.run("hidden", lambda x: self.activation(self.run("in_proj", self.in_proj, x)), x)
        return self.run("out_proj", self.out_proj, hidden.detach() if self.stops_at_hidden else hidden)

    def run(self, part: str, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Returns function(x). If the case checkpoints `part`, the backward computes function(x) again."""
        if part != self.checkpointed:
            return function(x)
        output: torch.Tensor = checkpoint(function, x, use_reentrant=False)
        return output

    def wrap(self) -> None:
        """Wraps each layer in torch's module that recomputes it in the backward, if `checkpointed` is 'wrapped'."""
        if self.checkpointed == "wrapped":
            apply_activation_checkpointing(self, check_fn=lambda module: isinstance(module, nn.Linear))


class TransposedLinear(nn.Linear):
    """A linear layer whose weight has the shape (in_features, out_features), like the tied weight of in_proj."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight.t(), self.bias)


class PerceptronRun:
    """Builds the parallel module on this rank, trains the module, and collects the answers of each step."""

    def __init__(self, case: PerceptronCase, mesh: DeviceMesh, given: Given) -> None:
        self.case, self.mesh, self.given = case, mesh, given
        self.layouts = case.layouts()
        self.captured: dict[str, torch.Tensor] = {}
        self.found: Answers = {}
        self.model = self.build()
        self._capture()

    def build(self) -> nn.Module:
        raise NotImplementedError

    def parameter(self, name: str) -> torch.Tensor:
        return self.model.get_parameter(name)

    def trained(self, name: str) -> torch.Tensor:
        """Returns the tensor that the optimizer updates for a parameter."""
        return self.model.get_parameter(name)

    def updated(self) -> list[torch.Tensor]:
        return [self.trained(name) for name in self.case.trained_names()]

    def make_optimizer(self) -> torch.optim.Optimizer:
        case, parameters, variant = self.case, self.updated(), self.case.variant
        options: dict[str, Any] = {name: getattr(case, name) for name in ("lr", "weight_decay", "foreach")}
        options["maximize"] = variant == "maximize"
        if case.optimizer == "sgd":
            dampening = DAMPENING if variant == "dampened" else 0.0
            options |= {"momentum": case.momentum, "dampening": dampening, "nesterov": variant == "nesterov"}
            return torch.optim.SGD(parameters, **options)
        return torch.optim.AdamW(parameters, amsgrad=variant == "amsgrad", **options)

    def answers(self) -> Answers:
        case = self.case
        optimizer = self.make_optimizer() if case.trains else None
        if optimizer is not None and case.between_steps in ("halve", "warm_up"):
            self.schedule = self.make_schedule(optimizer)
        for name in case.place_names():
            self.keep(f"param.{name}", self.parameter(name))
        for step in range(1, case.steps + 1):
            if optimizer is not None:
                optimizer.zero_grad()
            self.model.stops_at_hidden = case.stops_at_hidden(step)  # type: ignore[assignment]
            self.run_step(step)
            if optimizer is not None:
                self.update(optimizer, step)
                self.keep_state(optimizer, step)
                optimizer = self.go_on(optimizer, step)
        if case.tied:
            self.keep("storages", self.count_storages())
        return self.found

    def make_schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        halving = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        if self.case.between_steps == "halve":
            return halving
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.25, end_factor=0.5, total_iters=1)
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, halving], milestones=[2])

    def go_on(self, optimizer: torch.optim.Optimizer, step: int) -> torch.optim.Optimizer:
        """Runs the action `between_steps`, and returns the optimizer for the next step."""
        if self.case.between_steps in ("halve", "warm_up"):
            self.schedule.step()
        if self.case.between_steps != "reload":
            return optimizer
        loading = self.make_optimizer()
        for group in loading.param_groups:
            group["lr"] *= 2
        self.load_state(optimizer, loading)
        return loading

    def load_state(self, saved: torch.optim.Optimizer, loading: torch.optim.Optimizer) -> None:
        loading.load_state_dict(saved.state_dict())

    def count_storages(self) -> torch.Tensor:
        held = {self.memory(name).untyped_storage().data_ptr() for name in ("in_proj.weight", "out_proj.weight")}
        return torch.tensor(len(held), dtype=DTYPES[self.case.dtype], device=self.mesh.device_type)

    def memory(self, place: str) -> torch.Tensor:
        """Returns the local tensor of the parameter that the module has under the name `place`."""
        found = self.parameter(place)
        return found.to_local() if isinstance(found, DTensor) else found

    def run_step(self, step: int) -> None:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.model(x)
        return output

    def update(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        self.keep_clipped(step)
        optimizer.step()

    def keep_clipped(self, step: int) -> None:
        if self.case.clips:
            self.keep(f"step{step}.total_norm", self.clip())
            for name in self.case.graded_parameters(step):
                self.keep(f"step{step}.clipped.{name}", self.gradient(name))

    def clip(self) -> torch.Tensor:
        """Scales the gradients in place. Returns their norm before scaling, as a replicated 0-dim tensor."""
        case = self.case
        parameters = [self.trained(name) for name in case.trained_names()]
        norm = nn.utils.clip_grad_norm_(parameters, case.clip_norm, float(case.norm_type), foreach=case.foreach)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def gradient(self, name: str) -> torch.Tensor | None:
        return self.model.get_parameter(name).grad

    def keep_state(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        for state in self.case.state_names():
            for name in self.case.names_left(state):
                self.keep(f"step{step}.{state}.{name}", self.state_held(optimizer, state, name))
        if self.case.tied:
            self.keep(f"step{step}.param.out_proj.weight", self.parameter("out_proj.weight"))

    def state_held(self, optimizer: torch.optim.Optimizer, state: str, name: str) -> torch.Tensor | None:
        """Returns this rank's shard of the parameter, if `state` is 'param', or of its optimizer state."""
        if state == "param":
            return self.parameter(name)
        found: torch.Tensor | None = optimizer.state[self.trained(name)].get(STATE_KEYS[state])
        return found

    def keep(self, name: str, tensor: torch.Tensor | None) -> None:
        """Records a copy of the tensor. A plain tensor gets the layout that the case requires."""
        if tensor is None:
            self.found[name] = None
            return
        copy = copied(tensor).requires_grad_(tensor.requires_grad)
        self.found[name] = copy if isinstance(copy, DTensor) else Placed(copy, self.layouts[name])

    def _capture(self) -> None:
        """Registers hooks that record, but do not change, the layers' inputs and outputs and the gradients of both."""
        in_proj, out_proj = self.model.get_submodule("in_proj"), self.model.get_submodule("out_proj")
        in_proj.register_forward_pre_hook(lambda _, args: self._remember("in_proj.input", args[0], with_grad=False))
        in_proj.register_forward_hook(lambda _, args, output: self._remember("in_proj.output", output))
        out_proj.register_forward_pre_hook(lambda _, args: self._remember("out_proj.input", args[0]))

    def _remember(self, name: str, tensor: torch.Tensor, *, with_grad: bool = True) -> None:
        self.captured[f"capture.{name}"] = tensor
        if with_grad and tensor.requires_grad:
            tensor.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: self.captured.update({f"grad.{name}": gradient})
            )
