"""Computes one optimizer update of one parameter, from the gradient and the state that the ranks really had.

Source: torch/optim/sgd.py and torch/optim/adam.py (2.13.0): the momentum buffer begins as the first
gradient, both moments of AdamW as zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from equivtest.families.training.case import PerceptronCase
from equivtest.families.training.oracle.optimizers import AdamOptions, SgdOptions, adamw_step, sgd_step
from equivtest.oracle.operations import Found, Operations
from equivtest.oracle.rounding import Bounded, Operand


def sgd_momentum(
    case: PerceptronCase,
    operations: Operations,
    parameter: torch.Tensor,
    momentum: torch.Tensor | None,
    gradient: Operand,
) -> Found:
    """Returns SGD's momentum buffer after an update: momentum * buffer + gradient + weight_decay * parameter.

    Before the first update there is no buffer, and the buffer becomes the gradient with its weight decay.
    """
    terms = [(1.0, gradient)]
    if case.weight_decay:
        terms.append((case.weight_decay, parameter))
    if momentum is not None:
        terms.append((case.momentum, momentum))
    if len(terms) == 1:
        return Found.within(gradient) if isinstance(gradient, Bounded) else Found.copy_of(gradient)

    def bounded() -> Bounded:
        options = SgdOptions(case.lr, case.momentum, weight_decay=case.weight_decay)
        return sgd_step(parameter, momentum, gradient, options, operations.arithmetic)["momentum_buffer"]

    return _weighted_sum(operations, terms, bounded)


def sgd_parameter(
    case: PerceptronCase, operations: Operations, parameter: torch.Tensor, step: Operand, *, decays: bool
) -> Found:
    """Returns parameter - lr * step.

    If `decays`, the weight decay is added here, because `step` does not contain it.
    """
    weight_decay = case.weight_decay if decays else 0.0
    terms = [(1.0, parameter), (-case.lr, step), (-case.lr * weight_decay, parameter)]

    def bounded() -> Bounded:
        options = SgdOptions(case.lr, weight_decay=weight_decay)
        return sgd_step(parameter, None, step, options, operations.arithmetic)["param"]

    return _weighted_sum(operations, terms if weight_decay else terms[:2], bounded)


def _weighted_sum(
    operations: Operations, terms: Sequence[tuple[float, Operand]], bounded: Callable[[], Bounded]
) -> Found:
    """Returns the weighted sum of `terms`.

    It is exact if every term is known exactly and nothing rounds; otherwise it is `bounded()`.
    """
    known = [(factor, term) for factor, term in terms if isinstance(term, torch.Tensor)]
    return operations.weighted_sum(known, bounded) if len(known) == len(terms) else Found.within(bounded())


def adamw(
    case: PerceptronCase,
    operations: Operations,
    number: int,
    parameter: torch.Tensor,
    moments: tuple[torch.Tensor, torch.Tensor] | None,
    gradient: Operand,
) -> dict[str, Found]:
    """Returns 'exp_avg', 'exp_avg_sq' and 'param' after update `number`, counted from 1, always with bounds."""
    first, second = moments or (torch.zeros_like(parameter), torch.zeros_like(parameter))
    options = AdamOptions(case.lr, weight_decay=case.weight_decay)
    after = adamw_step(parameter, first, second, gradient, number, options, operations.arithmetic)
    return {name: Found.within(after[name]) for name in ("exp_avg", "exp_avg_sq", "param")}
