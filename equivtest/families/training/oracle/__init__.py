"""Computes the right answers of a perceptron of two layers in each step of its training.

Letters: T tokens, K in_features, H hidden_features, N out_features. With x (T, K), W1 (H, K), W2 (N, H) and a cotangent
G (T, N): a = x W1^T + b1, h = act(a), y = h W2^T + b2; grad h = G W2, grad a = act'(a) grad h, grad x = (grad a) W1,
grad W1 = (grad a)^T x, grad W2 = G^T h, and the gradient of a bias is the sum over tokens. Under sequence parallelism
the sums over H and T are divided among the ranks. Under data parallelism only the sums over T are divided, and the
ranks' sums are averaged.

If the ranks' values are known, each operation is judged alone, from the operands that the ranks really had. So the
allowed error of an earlier operation is not passed on, and nothing grows with depth or steps. If every operation is
right within its bound, the whole computation is right except for these roundings.

Source: torch.nn.Linear, torch.nn.functional.relu, gelu and silu (2.13.0) for the formulas; the
gradients are derived here, by the chain rule.  Exactness: see `equivtest.oracle.exact`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from equivtest.cases.case import at_step
from equivtest.cases.values import draw
from equivtest.families.training.case import EXACT_MODES, PerceptronCase
from equivtest.families.training.data_parallel.case import DataParallelCase
from equivtest.families.training.oracle.clipping import clipped, total_norm
from equivtest.families.training.oracle.tied import ONE_STORAGE, grad_of_tied, weight_of_out_proj
from equivtest.families.training.oracle.updates import (
    adamw,
    maximizing,
    nesterov_parameter,
    sgd_momentum,
    sgd_parameter,
)
from equivtest.oracle import expect, expect_held
from equivtest.oracle.averages import Averages
from equivtest.oracle.expected import Expected, ExpectedTensor
from equivtest.oracle.held import Held, whole
from equivtest.oracle.operations import Found, Operations
from equivtest.oracle.rounding import Operand


@expect.register
@expect_held.register
def expect_mlp(case: PerceptronCase, index: int, held: Held | None = None) -> Expected:
    return expect_by(Reference, case, index, held)


def expect_by(kind: type[Reference], case: PerceptronCase, index: int, held: Held | None) -> Expected:
    """Returns the answers of every step. Each step starts from the state after the step before.

    Args:
        held: Each rank's answers, from which each operation takes its operands. If None, an operation takes the float64
            result of the operation before, which equals the ranks' value only if everything is exact.

    Raises:
        InexactData: the drawn values break the conditions of exactness.
    """
    given = draw(case, index)
    reference = kind(case, given, held, is_real=case.values[index][0] not in EXACT_MODES)
    return written(case, reference.run())


@dataclass(frozen=True)
class TokenSums:
    """Computes sums over tokens that may be divided among the ranks in any way."""

    operations: Operations

    def product(self, left: torch.Tensor, right: torch.Tensor) -> Found:
        return self.operations.product(left, right, split="tokens")

    def total(self, terms: torch.Tensor) -> Found:
        return self.operations.total(terms)


@dataclass
class Reference:
    """Computes the unsharded module and its training step by step, and collects the expected answers.

    Leading dims are flattened into one dim of tokens.

    Attributes:
        given: The drawn global tensors, which have the case's dtype.
        held: Each rank's answers, if they are known.
        is_real: True if the values are real numbers, so that results are rounded.
    """

    case: PerceptronCase
    given: dict[str, torch.Tensor]
    held: Held | None
    is_real: bool
    found: dict[str, Found] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.shapes = self.case.shapes()

    def run(self) -> dict[str, Found]:
        case = self.case
        parameters = {name: self.given[name].double() for name in case.parameter_names()}
        for place in case.place_names():
            self.found[f"param.{place}"] = Found.copy_of(parameters[case.parameter_at(place)])
        if case.tied:
            self.found["storages"] = ONE_STORAGE
        state: dict[str, torch.Tensor] = {}
        for step in range(1, case.steps + 1):
            # Exact data make the first step exact; later ones only if the updates leave few enough bits.
            operations = Operations(
                case.dtype,
                case.num_hidden_parts,
                must_be_exact=step == 1 and not self.is_real,
                may_be_exact=not self.is_real,
            )
            gradients = self.run_step(step, operations, parameters)
            if case.trains:
                operations = replace(operations, must_be_exact=False)
                taken = self.clip(step, operations, gradients)
                for name in case.names_left("param"):
                    if name not in taken:
                        self.leave(step, name, parameters[name], state)
                        continue
                    parameters[name] = self.update(step, name, operations, parameters[name], state, taken[name])
                if case.tied:
                    self.found[f"step{step}.param.out_proj.weight"] = Found.copy_of(parameters["in_proj.weight"])
        return self.found

    def add(self, name: str, result: Found, *, is_exact: bool = False) -> torch.Tensor:
        """Records an expected answer, and returns the value that the next operation takes as its operand.

        This is the ranks' value, so that errors do not add up. It is the value of `result` if the ranks' value is
        unknown, or if `is_exact` is True and `result` allows no error.
        """
        self.found[name] = result
        if self.held is None or (is_exact and result.allowed is None):
            return result.value
        actual = whole(self.held, name, self.shapes[name], self.case.mesh_shape)
        return result.value if actual is None else actual.reshape(result.value.shape)

    @property
    def hidden_split(self) -> str:
        """'contraction' if the ranks divide a sum over the hidden features, otherwise ''."""
        return "contraction" if self.case.num_hidden_parts > 1 else ""

    def sums(self, operations: Operations) -> Averages | TokenSums:
        if isinstance(self.case, DataParallelCase):
            case = self.case
            return Averages(operations, case.num_averaged, case.micro_batches, scattered=case.num_scattered)
        return TokenSums(operations)

    def taken(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the operand of a layer whose input is `tensor`. Subclasses may round it."""
        return tensor

    def activation(self, operations: Operations, before: torch.Tensor) -> Found:
        return operations.activation(self.case.activation, before)

    def activation_grad(self, operations: Operations, before: torch.Tensor, cotangent: torch.Tensor) -> Found:
        """Returns the gradient of in_proj's output. `cotangent` is the gradient of the hidden activation."""
        return operations.activation_grad(self.case.activation, before, cotangent)

    def clip(self, step: int, operations: Operations, gradients: Mapping[str, Operand]) -> Mapping[str, Operand]:
        """Returns the clipped gradients, and records them and the norm as expected answers."""
        case = self.case
        if not case.clips:
            return gradients
        held = {name: gradient for name, gradient in gradients.items() if name != "x" and torch.is_tensor(gradient)}
        norm = self.add(
            f"step{step}.total_norm", total_norm(list(held.values()), case.norm_type, case.norm_axes, operations)
        )
        return {
            name: self.add(f"step{step}.clipped.{name}", clipped(value, norm, case.clip_norm, operations.arithmetic))
            for name, value in held.items()
        }

    def leave(self, step: int, name: str, parameter: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        """Records that this step's update changes neither a parameter without a gradient nor its optimizer state."""
        self.found[f"step{step}.param.{name}"] = Found.copy_of(parameter)
        for kind in self.case.state_names():
            if kind != "param" and name in self.case.names_left(kind):
                self.found[f"step{step}.{kind}.{name}"] = Found.copy_of(state[f"{kind}.{name}"])

    def update(
        self,
        step: int,
        name: str,
        operations: Operations,
        parameter: torch.Tensor,
        state: dict[str, torch.Tensor],
        gradient: Operand,
    ) -> torch.Tensor:
        """Returns the updated parameter, replaces its optimizer state, and records both as expected answers."""

        def add(kind: str, result: Found) -> torch.Tensor:
            state[f"{kind}.{name}"] = self.add(f"step{step}.{kind}.{name}", result)
            return state[f"{kind}.{name}"]

        case, lr = self.case, self.case.lr_at(step)
        gradient = maximizing(gradient) if case.variant == "maximize" else gradient
        if case.optimizer == "adamw":
            zeros = torch.zeros_like(parameter)
            moments = [state.get(f"{kind}.{name}", zeros) for kind in case.state_names()[1:]]
            after = adamw(case, operations, case.num_updates(name, step), parameter, moments, gradient, lr)
            return [add(kind, result) for kind, result in after.items()][-1]
        if case.momentum:
            momentum = state.get(f"momentum.{name}")
            buffer = add("momentum", sgd_momentum(case, operations, parameter, momentum, gradient))
            if case.variant == "nesterov":
                return add("param", nesterov_parameter(case, operations, parameter, buffer, gradient, lr))
            gradient = buffer
        return add("param", sgd_parameter(case, operations, parameter, gradient, lr, decays=not case.momentum))

    def run_step(self, step: int, operations: Operations, parameters: dict[str, torch.Tensor]) -> dict[str, Operand]:
        """Records the answers of one step's forward and backward. Returns the gradients by name."""
        case, product, sums = self.case, operations.product, self.sums(operations)
        x = self.taken(self.given[at_step(step, "x")].reshape(-1, case.in_features).double())
        cotangent = self.taken(self.given[at_step(step, "cotangent")].reshape(-1, case.out_features).double())
        in_weight, out_weight = parameters["in_proj.weight"], weight_of_out_proj(case, parameters)
        in_bias, out_bias = parameters.get("in_proj.bias"), parameters.get("out_proj.bias")

        def add(name: str, result: Found) -> torch.Tensor:
            return self.add(at_step(step, name), result, is_exact=operations.must_be_exact)

        add("capture.in_proj.input", Found.copy_of(x))
        before = add("capture.in_proj.output", product(x, in_weight.T, plus=in_bias))
        hidden = add("capture.out_proj.input", self.activation(operations, before))
        add("output", product(hidden, out_weight.T, plus=out_bias, split=self.hidden_split))
        before_grad = torch.empty(0)
        if case.hidden_requires_grad and not case.stops_at_hidden(step):
            hidden_grad = add("grad.out_proj.input", product(cotangent, out_weight))
            before_grad = self.taken(add("grad.in_proj.output", self.activation_grad(operations, before, hidden_grad)))
        gradients = {
            "x": lambda: product(before_grad, in_weight, split=self.hidden_split),
            "in_proj.weight": lambda: sums.product(before_grad.T, x),
            "in_proj.bias": lambda: sums.total(before_grad),
            "out_proj.weight": lambda: sums.product(cotangent.T, hidden),
            "out_proj.bias": lambda: sums.total(cotangent),
        }
        if case.tied:
            assert isinstance(sums, Averages)
            gradients["in_proj.weight"] = lambda: grad_of_tied(case, sums, (before_grad, x), (cotangent, hidden))
        return {name: add(f"grad.{name}", gradients[name]()) for name in case.graded_names(step)}


def written(case: PerceptronCase, found: dict[str, Found]) -> Expected:
    """Gives each expected answer its global shape and the layout that it must have."""
    shapes, layouts, flags = case.shapes(), case.layouts(), case.given_flags()
    outputs = {at_step(step, "output") for step in range(1, case.steps + 1)}
    tensors = {}
    for name in case.answer_names():
        result = found[name]
        tensors[name] = ExpectedTensor(
            value=result.value.reshape(shapes[name]),
            allowed=None if result.allowed is None else result.allowed.reshape(shapes[name]),
            layout=layouts[name],
            dtype=case.dtype_of(name),
            derivation=result.derivation,
            requires_grad=bool(case.requires_grad) if name in outputs else flags.get(name.removeprefix("param.")),
        )
    return Expected(tensors, {name: result.bits_used for name, result in found.items() if result.bits_used})
