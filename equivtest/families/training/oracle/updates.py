"""Computes one optimizer update of one parameter, from the gradient and the state that the ranks really had.

Source: torch/optim/sgd.py and torch/optim/adam.py (2.13.0): the momentum buffer begins as the first gradient, and both
moments of AdamW begin as zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from equivtest.families.training.case import PerceptronCase
from equivtest.families.training.case_steps import DAMPENING
from equivtest.families.training.oracle.optimizers import (
    AdamOptions,
    SgdOptions,
    adamw_step,
    nesterov_step,
    sgd_step,
)
from equivtest.oracle.operations import Found, Operations
from equivtest.oracle.rounding import Bounded, Operand


def maximizing(gradient: Operand) -> Operand:
    """Returns the gradient that the option `maximize` subtracts. Changing the sign rounds nothing."""
    return replace(gradient, value=-gradient.value) if isinstance(gradient, Bounded) else -gradient


def sgd_momentum(
    case: PerceptronCase,
    operations: Operations,
    parameter: torch.Tensor,
    momentum: torch.Tensor | None,
    gradient: Operand,
) -> Found:
    """Returns the buffer momentum * buffer + (1 - dampening) * (gradient + weight_decay * parameter).

    At the first update there is no buffer to add, and nothing is dampened.
    """
    dampening = DAMPENING if case.variant == "dampened" and momentum is not None else 0.0
    terms = [(1.0 - dampening, gradient)]
    if case.weight_decay:
        terms.append(((1.0 - dampening) * case.weight_decay, parameter))
    if momentum is not None:
        terms.append((case.momentum, momentum))
    if len(terms) == 1:
        return Found.within(gradient) if isinstance(gradient, Bounded) else Found.copy_of(gradient)

    def bounded() -> Bounded:
        options = SgdOptions(case.lr, case.momentum, dampening, case.weight_decay)
        return sgd_step(parameter, momentum, gradient, options, operations.arithmetic)["momentum_buffer"]

    return _weighted_sum(operations, terms, bounded)


def sgd_parameter(
    case: PerceptronCase, operations: Operations, parameter: torch.Tensor, step: Operand, lr: float, *, decays: bool
) -> Found:
    """Returns parameter - lr * step, where `step` is the buffer, or if `decays` the gradient before weight decay."""
    weight_decay = case.weight_decay if decays else 0.0
    terms = [(1.0, parameter), (-lr, step), (-lr * weight_decay, parameter)]

    def bounded() -> Bounded:
        options = SgdOptions(lr, weight_decay=weight_decay)
        return sgd_step(parameter, None, step, options, operations.arithmetic)["param"]

    return _weighted_sum(operations, terms if weight_decay else terms[:2], bounded)


def nesterov_parameter(
    case: PerceptronCase,
    operations: Operations,
    parameter: torch.Tensor,
    momentum: torch.Tensor,
    gradient: Operand,
    lr: float,
) -> Found:
    """Returns parameter - lr * (gradient + weight_decay * parameter + case.momentum * buffer after the update)."""
    terms = [(1.0, parameter), (-lr, gradient), (-lr * case.momentum, momentum)]
    terms += [(-lr * case.weight_decay, parameter)] if case.weight_decay else []

    def bounded() -> Bounded:
        options = SgdOptions(lr, case.momentum, weight_decay=case.weight_decay, nesterov=True)
        return nesterov_step(parameter, momentum, gradient, options, operations.arithmetic)

    return _weighted_sum(operations, terms, bounded)


def _weighted_sum(
    operations: Operations, terms: Sequence[tuple[float, Operand]], bounded: Callable[[], Bounded]
) -> Found:
    """Returns the sum of factor * term, exact if every term is known exactly and nothing rounds, else `bounded()`."""
    known = [(factor, term) for factor, term in terms if isinstance(term, torch.Tensor)]
    return operations.weighted_sum(known, bounded) if len(known) == len(terms) else Found.within(bounded())


def adamw(
    case: PerceptronCase,
    operations: Operations,
    number: int,
    parameter: torch.Tensor,
    moments: Sequence[torch.Tensor],
    gradient: Operand,
    lr: float,
) -> dict[str, Found]:
    """Returns 'param' and the optimizer's states after update number `number`, counted from 1."""
    options = AdamOptions(lr, weight_decay=case.weight_decay)
    after = adamw_step(parameter, moments, gradient, number, options, operations.arithmetic)
    return {name: Found.within(after[name]) for name in (*case.state_names()[1:], "param")}
