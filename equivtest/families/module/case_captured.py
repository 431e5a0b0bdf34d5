"""A module that ran elsewhere, in one forward and backward of somebody's own job."""

from __future__ import annotations

from dataclasses import dataclass

from equivtest.families.module.case import ModuleCase
from equivtest.families.module.case_facts import Facts
from equivtest.kit.case import Shape
from equivtest.kit.case_tensor import CaseTensor


@dataclass(frozen=True)
class StartedFacts(Facts):
    """Facts of a module whose backward was started by what came to its outputs.

    Attributes:
        started: The outputs to which a gradient came from outside of the module.
    """

    started: tuple[str, ...] = ()

    @property
    def roots(self) -> tuple[str, ...]:
        return self.started


@dataclass(frozen=True, kw_only=True, repr=False)
class CapturedCase(ModuleCase):
    """The values are those that the ranks held, so that none are drawn, and `parallelize` is never called.

    Attributes:
        started: The outputs to which a gradient came from outside of the module; it is given as a cotangent.
        with_gradient: The inputs of which there is a gradient.
    """

    started: tuple[str, ...] = ()
    with_gradient: tuple[str, ...] = ()

    @property
    def facts(self) -> Facts:
        facts = super().facts
        return StartedFacts(facts.outputs, facts.parameters, facts.buffers, "", self.started)

    @property
    def past_open(self) -> bool:
        return True

    def real_names(self) -> tuple[str, ...]:
        return self.with_gradient


@dataclass(frozen=True, kw_only=True, repr=False)
class UpdateCase(ModuleCase):
    """One update of somebody's own optimizer, in which nothing runs forward.

    Attributes:
        left: Name and shape of each tensor that the update leaves.
    """

    left: tuple[tuple[str, Shape], ...] = ()

    def describe_tensors(self) -> dict[str, CaseTensor]:
        return {name: CaseTensor(shape, self.whole_layout, "trained") for name, shape in self.left}
