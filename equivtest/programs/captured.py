"""Cases of a module that ran in your own job, in the forwards and backwards of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from equivtest.cases.case import Shape
from equivtest.cases.case_tensor import CaseTensor
from equivtest.programs.case import ModuleCase
from equivtest.programs.fields import Judge
from equivtest.programs.micro_batches import at_micro_batch
from equivtest.programs.reference import Facts
from equivtest.programs.state import OWN_ROWS

OWN = ("arguments", "started", "with_gradient")
"""Fields that may differ between micro-batches."""


@dataclass(frozen=True)
class StartedFacts(Facts):
    """Facts of a module whose backward started from the gradients of its outputs.

    Attributes:
        started: Outputs that got a gradient from outside of the module.
    """

    started: tuple[str, ...] = ()

    @property
    def roots(self) -> tuple[str, ...]:
        return self.started


@dataclass(frozen=True, kw_only=True, repr=False, init=False)
class CapturedCase(ModuleCase):
    """A case whose values come from the ranks. No value is drawn, and `parallelize` is never called.

    Attributes:
        started: Outputs that got a gradient from outside of the module. The case has this gradient as a cotangent.
        with_gradient: Inputs that have a gradient.
        further: For each micro-batch after the first, its values of the fields in `OWN`, which replace the values of
            this case. The gradients of parameters are sums over all micro-batches.
    """

    started: tuple[str, ...] = ()
    with_gradient: tuple[str, ...] = ()
    further: tuple[tuple[Any, ...], ...] = ()
    judge: Judge = Judge(state=OWN_ROWS)

    @property
    def facts(self) -> Facts:
        facts = super().facts
        return StartedFacts(facts.outputs, facts.parameters, facts.buffers, "", self.started)

    @property
    def past_open(self) -> bool:
        return True

    def real_names(self) -> tuple[str, ...]:
        return self.with_gradient

    def with_further(self, others: Sequence[CapturedCase]) -> CapturedCase:
        return replace(self, further=tuple(tuple(getattr(each, name) for name in OWN) for each in others))

    def is_of_all(self, name: str) -> bool:
        return name.removeprefix("param.").removeprefix("grad.") in self.parameter_names()

    def describe_tensors(self) -> dict[str, CaseTensor]:
        """Describes the tensors of each micro-batch, and the shared parameters and their gradients once."""
        tensors = super().describe_tensors()
        for number, own in enumerate(self.further, 2):
            one = replace(self, further=(), **dict(zip(OWN, own, strict=True)))
            tensors |= {
                at_micro_batch(number, name): tensor for name, tensor in one.tensors.items() if not self.is_of_all(name)
            }
        return tensors


@dataclass(frozen=True, kw_only=True, repr=False, init=False)
class UpdateCase(ModuleCase):
    """One update of the optimizer in your own job. No forward runs.

    Attributes:
        left: (name, shape) of each tensor that is judged after the update, such as a parameter.
    """

    left: tuple[tuple[str, Shape], ...] = ()

    def _check_that_outputs_train(self) -> None:
        """Accepts every module, since a captured update runs no forward."""

    def describe_tensors(self) -> dict[str, CaseTensor]:
        return {name: CaseTensor(shape, self.whole_layout, "trained") for name, shape in self.left}
