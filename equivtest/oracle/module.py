"""What a module of anybody's own gives: the unsharded one, run in float64 on data that nothing rounds."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from equivtest.cases.module import ModuleCase, bounds_of, call_builder, with_parameters
from equivtest.cases.values import draw
from equivtest.errors import Misuse
from equivtest.oracle.certificate import Certificate
from equivtest.oracle.exact import InexactData
from equivtest.oracle.expected import COPIED, Expected, ExpectedTensor
from equivtest.tensors import DTYPES

EXACT = "equal: the unsharded module in float64, no operation of which can round these values"


def expect_module(case: ModuleCase, index: int) -> Expected:
    """Output, parameters and gradients of the unsharded module.

    Raises:
        Misuse: an operation of the module could round the values of this case.
    """
    given = {name: tensor.double() for name, tensor in draw(case, index).items()}
    bits_used = prove_exact(case)
    module = make_unsharded(case, given)
    x, output = run_unsharded(module, given)
    values = {"output": output, "grad.x": x.grad}
    for name, parameter in module.named_parameters():
        values |= {f"param.{name}": parameter, f"grad.{name}": parameter.grad}
    layouts = case.layouts()
    tensors = {
        name: ExpectedTensor(
            value=torch.zeros(case.shapes()[name], dtype=torch.float64) if value is None else value.detach(),
            allowed=None,
            layout=layouts[name],
            dtype=case.dtype,
            derivation=COPIED if name.startswith("param.") else EXACT,
            requires_grad=name == "output" or name.startswith("param.") or None,
        )
        for name, value in values.items()
    }
    return Expected(tensors, {"all": bits_used})


def make_unsharded(case: ModuleCase, given: Mapping[str, torch.Tensor]) -> nn.Module:
    """The unsharded module in float64, with copies of the given parameters."""
    module = call_builder(case.build).double()
    return with_parameters(module, {name: given[name].clone() for name in case.parameter_names()})


def run_unsharded(module: nn.Module, given: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """x, with its gradient, and the output, after one forward and backward."""
    x = given["x"].clone().requires_grad_()
    output: torch.Tensor = module(x)
    torch.autograd.backward(output, given["cotangent"])
    return x, output


def prove_exact(case: ModuleCase) -> int:
    """The bits that the sums of a case take at most, whatever its seeds.

    Raises:
        Misuse: an operation of the module could round the values of this case.
    """
    return _prove_exact(replace(case, values=(("dense", 0),), poison="none", repeats=False, records=False, members=()))


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
            f"shape {case.x_shape}, {error}: take smaller sizes or leave this dtype out; a module that rounds needs a "
            "case family with an oracle of its own"
        ) from error
    return certificate.bits_used
