"""Computes the right answers of DeepSpeed's engine, if the engine scales or clips its gradients.

Letters: w ranks, N elements and P parameters of the whole model, u unit roundoff of float32.

    norm = sqrt(sum g^2) over all parameters      c = max(1, (norm + 1e-6) / limit)      g becomes g (1 / c)

A factor f divides gradients before they are reduced and multiplies them afterwards. The factor changes only roundings.
The two scalings and their reciprocals have up to four roundings. If f is a power of two, they have none.

Clipping starts from the averaged gradients g that the ranks really had. Each parameter's norm is taken in float64.
After that, each operation counts as one rounding of float32, although some operations are in float64. The sum of
squares is stored and reduced by w - 1 additions, and its root is taken. The norms of at most P groups of parameters are
squared and summed, and the root is taken again. Then 1e-6 is added, and the sum is divided by the limit. Within these
roundings c lies between two numbers. If both are 1, gradients stay unchanged to the last bit. Otherwise the reciprocal,
its storage and the product round once more each.

Source: get_grad_norm_direct and unscale_and_clip_grads in deepspeed/runtime/zero/stage3.py and
stage_1_and_2.py, combine_grad_norm_groups in runtime/utils.py, get_norm_dtype in
runtime/zero/utils.py (0.19.8); Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed.,
section 3.1.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from equivtest.families.training.deepspeed.case import EngineCase
from equivtest.families.training.oracle import Reference, expect_by
from equivtest.oracle import expect, expect_held
from equivtest.oracle.averages import Averages
from equivtest.oracle.expected import Expected
from equivtest.oracle.held import Held
from equivtest.oracle.operations import Operations
from equivtest.oracle.rounding import U_REFERENCE, Arithmetic, Bounded, Operand, bounded, growth

ADDED_TO_NORM = 1e-6
SCALING_ROUNDINGS = 4
"""Number of roundings if gradients are multiplied by a rounded reciprocal before the reduction and once after it."""


@expect.register
@expect_held.register
def expect_engine(case: EngineCase, index: int, held: Held | None = None) -> Expected:
    return expect_by(EngineReference, case, index, held)


class EngineReference(Reference):
    """Computes the unsharded module and its training, with gradients that the engine scales and clips."""

    case: EngineCase

    def sums(self, operations: Operations) -> Averages:
        """Returns the operations that average gradients. They count the roundings of `predivide_factor`."""
        case = self.case
        if not case.predivides:
            return Averages(operations, case.num_averaged, case.micro_batches)
        if math.frexp(case.predivide_factor)[0] != 0.5:
            operations = replace(operations, must_be_exact=False, may_be_exact=False)
        return Averages(operations, case.num_averaged, case.micro_batches, scalings=SCALING_ROUNDINGS)

    def run_step(self, step: int, operations: Operations, parameters: dict[str, torch.Tensor]) -> dict[str, Operand]:
        gradients = super().run_step(step, operations, parameters)
        if not self.case.gradient_clipping:
            return gradients
        trained = {name: gradients[name] for name in self.case.trained_names()}
        return gradients | clipped(trained, self.case.gradient_clipping, self.case.world_size, operations.arithmetic)


def clipped(gradients: dict[str, Operand], limit: float, num_ranks: int, arithmetic: Arithmetic) -> dict[str, Operand]:
    """Returns the clipped gradients with their bounds, or the same gradients if clipping certainly does nothing."""
    held = {name: gradient for name, gradient in gradients.items() if isinstance(gradient, torch.Tensor)}
    num_terms = sum(gradient.numel() for gradient in held.values())
    norm = float(torch.stack([gradient.double().square().sum() for gradient in held.values()]).sum().sqrt())
    ratio = (norm + ADDED_TO_NORM) / limit
    off = growth((roundings(len(held), num_ranks, arithmetic), arithmetic.u_o), (num_terms + 16, U_REFERENCE))
    smallest, largest = max(1.0, ratio / (1 + off)), max(1.0, ratio * (1 + off))
    if largest == 1:
        return gradients
    factor = 1 / max(1.0, ratio)
    beyond = max(factor - 1 / largest, 1 / smallest - factor)
    why = f"norm {norm:.6e} clipped to {limit}: 1 / c in {1 / largest:.9e}..{1 / smallest:.9e}, rounded 3 times"
    return {name: _scaled(gradient, factor, beyond, why, arithmetic) for name, gradient in held.items()}


def roundings(num_parameters: int, num_ranks: int, arithmetic: Arithmetic) -> int:
    """Returns the number of roundings in the quotient of norm and limit.

    First the terms of the norm are stored and reduced, and a root is taken. Then each group of parameters is squared
    and summed, and a root is taken again. The quotient has four more roundings. Squaring doubles the errors, and the
    second root halves them again; the first root is assumed to halve no error.
    """
    of_root = int(2 * arithmetic.libm_ulp)
    return num_ranks + of_root + (num_parameters + 1 + of_root) + 4


def _scaled(gradient: torch.Tensor, factor: float, beyond: float, why: str, arithmetic: Arithmetic) -> Bounded:
    """Returns gradient * factor with its bound. The exact factor differs from `factor` by at most `beyond`."""
    magnitude = gradient.double().abs()
    error = beyond * magnitude + growth((3, arithmetic.u_o)) * (factor + beyond) * magnitude + arithmetic.eta
    return bounded(gradient.double() * factor, error, magnitude * factor, 2, why)
