"""What a module of anybody's own gives: the unsharded one in float64, on data that nothing rounds or on real ones."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from equivtest import limits
from equivtest.cases.module import EXACT_MODE, REAL_MODE, ModuleCase, bounds_of, call_builder, with_parameters
from equivtest.cases.values import draw
from equivtest.errors import Misuse
from equivtest.oracle.certificate import Certificate
from equivtest.oracle.declared import arithmetic_of
from equivtest.oracle.exact import InexactData
from equivtest.oracle.expected import Expected, ExpectedTensor
from equivtest.oracle.operations import Found
from equivtest.tensors import DTYPES

EXACT = "equal: the unsharded module in float64, no operation of which can round these values"


def expect_module(case: ModuleCase, index: int) -> Expected:
    """Output, parameters and gradients of the unsharded module.

    Raises:
        Misuse: an operation of the module could round the integers of this case, or is one of which no bound is known.
    """
    drawn = draw(case, index)
    given = {name: tensor.double() for name, tensor in drawn.items()}
    if case.values[index][0] == REAL_MODE:
        expected = _expected(case, given, _within_bounds(case, drawn), {})
        return replace(expected, tensors=measured(expected.tensors))
    bits_used = prove_exact(case)
    module = make_unsharded(case, given)
    x, output = run_unsharded(module, given)
    answers = _answers(module, x, output)
    exact = {name: Found(tensor.detach(), None, EXACT) for name, tensor in answers.items()}
    return _expected(case, given, exact, {"all": bits_used})


def _expected(
    case: ModuleCase, given: Mapping[str, torch.Tensor], found: Mapping[str, Found], bits_used: Mapping[str, int]
) -> Expected:
    """Every answer of the case: what is not found is zero, as what no gradient reaches, and parameters are copies."""
    tensors, layouts, shapes = {}, case.layouts(), case.shapes()
    for name in case.answer_names():
        zeros = Found(torch.zeros(shapes[name], dtype=torch.float64), None, EXACT)
        right = found.get(name, zeros)
        if name.startswith("param."):
            right = Found.copy_of(given[name.removeprefix("param.")])
        tensors[name] = ExpectedTensor(
            value=right.value,
            allowed=right.allowed,
            layout=layouts[name],
            dtype=case.dtype,
            derivation=right.derivation,
            requires_grad=name == "output" or name.startswith("param.") or None,
        )
    return Expected(tensors, bits_used)


def _answers(module: nn.Module, x: torch.Tensor, output: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the module gave and its backward left, by name."""
    grads = {name: parameter.grad for name, parameter in module.named_parameters()} | {"x": x.grad}
    return {"output": output} | {f"grad.{name}": grad for name, grad in grads.items() if grad is not None}


def _within_bounds(case: ModuleCase, given: Mapping[str, torch.Tensor]) -> dict[str, Found]:
    """What the module gives on real numbers, and how far a correct parallel one may be off.

    It runs in the case's own dtype: what a module computes may hang on that, as the default eps of nn.RMSNorm does.

    Source: torch.nn.attention.sdpa_kernel (2.13.0), so that attention is taken apart into products and softmaxes.
    """
    from equivtest.oracle.running import RunningError  # torch's decompositions take a second to import

    module = call_builder(case.build).to(DTYPES[case.dtype])
    counted = RunningError(arithmetic_of(case.dtype), case.world_size)
    ranged = {name: counted.exactly(tensor) for name, tensor in given.items()}
    try:
        with counted, sdpa_kernel(SDPBackend.MATH):
            with_parameters(module, {name: ranged[name] for name in case.parameter_names()})
            x, output = run_module(module, ranged)
    except InexactData as error:
        raise Misuse(
            f"{case.build}, with x of shape {case.x_shape}: {error}: leave it out of the module that is judged, or "
            "write a case family with an oracle of its own"
        ) from error
    except Exception as error:  # an arbitrary module's, of a tensor that is not the usual one
        raise Misuse(
            f"{case.build}, with x of shape {case.x_shape}, cannot be followed operation by operation: "
            f"{type(error).__name__}: {error}"
        ) from error
    return {name: Found.within(counted.bounded(tensor)) for name, tensor in _answers(module, x, output).items()}


def measured(tensors: Mapping[str, ExpectedTensor]) -> dict[str, ExpectedTensor]:
    """The same, where gradients that are zero but for roundings are measured by a small part of the others.

    A softmax does not change with what is added to all its terms, such as a bias of the keys: of such a parameter the
    gradient is zero in exact arithmetic, and staying within its bound shows that nothing was added to it.
    """
    gradients = [tensor.value.flatten() for name, tensor in tensors.items() if name.startswith("grad.")]
    scale = limits.ZERO_BESIDE * float(torch.cat(gradients).square().mean().sqrt())
    return {name: replace(each, scale=scale) if _is_zero(name, each) else each for name, each in tensors.items()}


def _is_zero(name: str, tensor: ExpectedTensor) -> bool:
    """Whether a gradient is no further from zero than it may be off."""
    return (
        name.startswith("grad.") and tensor.allowed is not None and bool((tensor.value.abs() <= tensor.allowed).all())
    )


def make_unsharded(case: ModuleCase, given: Mapping[str, torch.Tensor]) -> nn.Module:
    """The unsharded module in float64, with copies of the given parameters."""
    module = call_builder(case.build).double()
    return with_parameters(module, {name: given[name].clone() for name in case.parameter_names()})


def run_unsharded(module: nn.Module, given: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """x, with its gradient, and the output, after one forward and backward."""
    return run_module(module, {**given, "x": given["x"].clone()})


def run_module(module: nn.Module, given: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, on the x that is given itself."""
    x = given["x"].requires_grad_()
    output: torch.Tensor = module(x)
    torch.autograd.backward(output, given["cotangent"])
    return x, output


def prove_exact(case: ModuleCase) -> int:
    """The bits that the sums of a case take at most, whatever its seeds.

    Raises:
        Misuse: an operation of the module could round the values of this case.
    """
    return _prove_exact(
        replace(case, values=((EXACT_MODE, 0),), poison="none", repeats=False, records=False, members=())
    )


@functools.lru_cache(maxsize=1024)
def _prove_exact(case: ModuleCase) -> int:
    certificate = Certificate(DTYPES[case.dtype])
    magnitudes = {
        name: torch.full(case.shapes()[name], float(math.prod(bounds_of(case, name))), dtype=torch.float64)
        for name in case.given_names()
    }
    module = make_unsharded(case, magnitudes)
    try:
        with certificate:
            run_unsharded(module, magnitudes)
    except InexactData as error:
        raise Misuse(
            f"{case.build}: on integers up to {case.largest} in {case.dtype}, on {case.world_size} ranks, with x of "
            f"shape {case.x_shape}, {error}: take smaller sizes or leave this dtype out; a module that rounds "
            "is judged on real values, ('real', 0)"
        ) from error
    return certificate.bits_used
