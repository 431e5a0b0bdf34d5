"""torch's sequence parallelism of a multilayer perceptron, trained by torch's optimizers.

Source: torch/distributed/tensor/parallel/style.py, classes ColwiseParallel and RowwiseParallel
(2.13.0), put together as in torch's tensor parallel tutorial: the input arrives divided along the
sequence, is gathered for in_proj, and the output of out_proj is reduced and scattered along it.
A correct plan computes, and trains, what the unsharded module does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional

from equivtest.cases.mlp import LAYERS, MlpCase, at_step
from equivtest.subjects.tensor_parallel import Answers, Given, as_dtensor, torch_placement
from equivtest.tensors import Placed

STATE_KEYS = {"momentum": "momentum_buffer", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""Our name of an optimizer's state -> torch's (torch.optim.SGD, torch.optim.AdamW, 2.13.0)."""


def sequence_parallel_mlp(case: MlpCase, mesh: DeviceMesh, given: Given) -> Answers:
    """Linear, activation, Linear: x and output sharded along the sequence, the weights on the hidden features."""
    return Run(case, mesh, given).answers()


Activation = Callable[[torch.Tensor], torch.Tensor]


class Mlp(nn.Module):
    """The unsharded module, whole on every rank, as a user builds it before parallelizing."""

    ACTIVATIONS: ClassVar[dict[str, Activation]] = {
        "relu": functional.relu,
        "gelu": functional.gelu,
        "silu": functional.silu,
    }

    def __init__(self, case: MlpCase, given: Given) -> None:
        super().__init__()
        self.activation: Activation = self.ACTIVATIONS[case.activation]
        biases = {layer: layer in case.biases for layer in LAYERS}
        self.in_proj = nn.Linear(case.in_features, case.hidden_features, bias=biases["in_proj"], device="meta")
        self.out_proj = nn.Linear(case.hidden_features, case.out_features, bias=biases["out_proj"], device="meta")
        for name in case.parameter_names():
            layer, _, kind = name.partition(".")
            # A copy: an optimizer's update must not reach the harness's own tensor.
            whole = nn.Parameter(given[name].detach().clone(), requires_grad=name in case.requires_grad)
            setattr(self.get_submodule(layer), kind, whole)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (*leading, K) -> (*leading, N)."""
        output: torch.Tensor = self.out_proj(self.activation(self.in_proj(x)))
        return output


class Run:
    """One visit on this rank: the parallelized module, its optimizer, and what is answered of each step."""

    module: ClassVar[type[Mlp]] = Mlp

    def __init__(self, case: MlpCase, mesh: DeviceMesh, given: Given) -> None:
        self.case, self.mesh, self.given = case, mesh, given
        self.captured: dict[str, torch.Tensor] = {}
        self.found: Answers = {}
        self.model = parallelize_module(self.module(case, given), mesh, self.plan())
        self._capture()

    def plan(self) -> dict[str, ParallelStyle]:
        """How each layer is parallelized."""
        sequence = torch_placement(self.case, "x")
        return {
            "in_proj": ColwiseParallel(input_layouts=sequence, use_local_output=self.case.use_local_output),
            "out_proj": RowwiseParallel(output_layouts=sequence),
        }

    def make_optimizer(self) -> torch.optim.Optimizer:
        """torch's optimizer over the parameters that need a gradient."""
        case = self.case
        parameters = [self.model.get_parameter(name) for name in case.trained_names()]
        lr, weight_decay, foreach = case.lr, case.weight_decay, case.foreach
        if case.optimizer == "sgd":
            return torch.optim.SGD(
                parameters, lr=lr, momentum=case.momentum, weight_decay=weight_decay, foreach=foreach
            )
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay, foreach=foreach)

    def answers(self) -> Answers:
        """Every answer of every step."""
        case = self.case
        optimizer = self.make_optimizer() if case.trains else None
        for name in case.parameter_names():
            self.keep(f"param.{name}", self.model.get_parameter(name))
        for step in range(1, case.steps + 1):
            if optimizer is not None:
                optimizer.zero_grad()
            self.run_step(step)
            if optimizer is not None:
                self.update(optimizer, step)
                self.keep_state(optimizer, step)
        return self.found

    def run_step(self, step: int) -> None:
        """Forward and backward of one step, on its own x and cotangent."""
        case = self.case
        x = self.given[at_step(step, "x")].detach().requires_grad_("x" in case.requires_grad)  # the harness's memory
        output = self.forward(as_dtensor(x, case, at_step(step, "x"), self.mesh) if case.x_is_dtensor else x)
        if output.requires_grad:
            torch.autograd.backward(output, self.given[at_step(step, "cotangent")])
        self.keep(at_step(step, "output"), output)
        for name in case.captured_names():
            self.keep(at_step(step, name), self.captured.pop(name, None))
        for name in case.requires_grad:
            gradient = x.grad if name == "x" else self.model.get_parameter(name).grad
            self.keep(at_step(step, f"grad.{name}"), gradient)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The parallelized module's output on this rank's part of x."""
        output: torch.Tensor = self.model(x)
        return output

    def update(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """One update of the parameters from their gradients."""
        optimizer.step()

    def keep_state(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """The trained parameters and their optimizer's state after update number `step`."""
        for name in self.case.trained_names():
            parameter = self.model.get_parameter(name)
            for state in self.case.state_names():
                held = parameter if state == "param" else optimizer.state[parameter].get(STATE_KEYS[state])
                self.keep(f"step{step}.{state}.{name}", held)

    def keep(self, name: str, tensor: torch.Tensor | None) -> None:
        """Answers a copy of what this rank holds now; plain tensors are under the contract's layout."""
        if tensor is None:
            self.found[name] = None
        elif isinstance(tensor, DTensor):
            self.found[name] = copied(tensor)
        else:
            local = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            self.found[name] = Placed(local, self.case.layouts()[name])

    def _capture(self) -> None:
        """Remembers what the layers take and give, and the gradients of these, without touching them."""
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


def copied(tensor: DTensor) -> DTensor:
    """A copy that later steps do not change, made without a collective."""
    local = tensor.to_local().detach().clone()
    copy = DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    copy.requires_grad_(tensor.requires_grad)
    return copy
