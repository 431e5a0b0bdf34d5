"""A perceptron of two layers and its training, each step from what the ranks really held before it.

Letters: T tokens, K in_features, H hidden_features, N out_features.  With x (T, K), W1 (H, K),
W2 (N, H) and a cotangent G (T, N): a = x W1^T + b1, h = act(a), y = h W2^T + b2; grad h = G W2,
grad a = act'(a) grad h, grad x = (grad a) W1, grad W1 = (grad a)^T x, grad W2 = G^T h, and the
gradient of a bias is the sum over tokens.

Source: torch.nn.Linear, torch.nn.ReLU (2.13.0) for the formulas; the gradients are derived here,
by the chain rule.  Exactness: see `equivtest.oracle.exact`.
"""

from __future__ import annotations

import torch

from equivtest.cases.mlp import MlpCase, at_step
from equivtest.cases.values import draw
from equivtest.oracle.expected import Expected, ExpectedTensor
from equivtest.oracle.operations import Found, Operations


def expect_mlp(case: MlpCase, index: int) -> Expected:
    """Output, parameters, gradients and captures of one unsharded step, to be met exactly.

    Raises:
        InexactData: the drawn values break the conditions of exactness.
    """
    given = draw(case, index)
    operations = Operations(case.dtype, must_be_exact=True)
    parameters = {name: given[name].double() for name in case.parameter_names()}
    found = {f"param.{name}": operations.copy(value) for name, value in parameters.items()}
    found |= run_step(case, 1, operations, given, parameters)
    return written(case, found)


def run_step(
    case: MlpCase,
    step: int,
    operations: Operations,
    given: dict[str, torch.Tensor],
    parameters: dict[str, torch.Tensor],
) -> dict[str, Found]:
    """Forward and backward of one step: its answers by name, leading dims flattened.

    Args:
        given: Global tensors of the case's dtype.
        parameters: W1 (H, K), b1 (H,), W2 (N, H), b2 (N,), float64, global, as of before the step.
    """
    x = given[at_step(step, "x")].reshape(-1, case.in_features).double()
    cotangent = given[at_step(step, "cotangent")].reshape(-1, case.out_features).double()
    found: dict[str, Found] = {}

    def add(name: str, result: Found) -> torch.Tensor:
        """Puts down an answer and gives what the next operation takes."""
        found[at_step(step, name)] = result
        return result.value

    in_weight, out_weight = parameters["in_proj.weight"], parameters["out_proj.weight"]
    add("capture.in_proj.input", operations.copy(x))
    before = add("capture.in_proj.output",
                 operations.product("in_proj", x, in_weight.T, plus=parameters.get("in_proj.bias")))
    hidden = add("capture.out_proj.input", operations.activation(case.activation, before))
    add("output", operations.product("output", hidden, out_weight.T, plus=parameters.get("out_proj.bias"),
                                     divided_by=case.world_size))
    needed = case.requires_grad
    if case.hidden_requires_grad:
        hidden_grad = add("grad.out_proj.input", operations.product("grad.out_proj.input", cotangent, out_weight))
        before_grad = add("grad.in_proj.output", operations.activation_grad(case.activation, before, hidden_grad))
        if "x" in needed:
            add("grad.x", operations.product("grad.x", before_grad, in_weight))
        if "in_proj.weight" in needed:
            add("grad.in_proj.weight", operations.product("grad.in_proj.weight", before_grad.T, x))
        if "in_proj.bias" in needed:
            add("grad.in_proj.bias", operations.total("grad.in_proj.bias", before_grad))
    if "out_proj.weight" in needed:
        add("grad.out_proj.weight", operations.product("grad.out_proj.weight", cotangent.T, hidden))
    if "out_proj.bias" in needed:
        add("grad.out_proj.bias", operations.total("grad.out_proj.bias", cotangent))
    return found


def written(case: MlpCase, found: dict[str, Found]) -> Expected:
    """The answers in the case's order, in their global shapes, under the contract's layouts."""
    shapes, layouts, flags = case.shapes(), case.layouts(), case.given_flags()
    tensors = {}
    for name in case.answer_names():
        result = found[name]
        is_output = name.rpartition(".")[2] == "output" and "capture" not in name and "grad" not in name
        tensors[name] = ExpectedTensor(
            value=result.value.reshape(shapes[name]),
            allowed=None if result.allowed is None else result.allowed.reshape(shapes[name]),
            layout=layouts[name],
            dtype=case.dtype,
            derivation=result.derivation,
            requires_grad=bool(case.requires_grad) if is_output else flags.get(name.removeprefix("param.")),
        )
    return Expected(tensors, {name: result.bits_used for name, result in found.items() if result.bits_used})
