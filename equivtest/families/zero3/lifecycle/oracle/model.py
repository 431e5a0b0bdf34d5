"""Models parameters that are not partitioned. Each has a value, and a status that says whether it may be used.

Letters: w ranks, c and x a rank's cotangent and factor. In each use the gradient of a parameter is sum(c x) / w over
the ranks. A step subtracts LEARNING_RATE times the sum of gradients. The gradients and the step are exact if each of
these sums is an integer of at most 2**p units: see `equivtest.oracle.exact`.

Source: Rajbhandari et al., ZeRO (2020), section 5.3, for the times at which a parameter may be whole; ZeroParamStatus
and GatheredParameters in deepspeed/runtime/zero/partition_parameters.py (0.19.8) for statuses, refusals and the return
of a new value to the partitions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from equivtest.cases.values import draw
from equivtest.families.zero3.lifecycle.case import FETCHES, LEARNING_RATE, LifecycleCase, Operation
from equivtest.oracle.exact import find_integers, sum_terms
from equivtest.tensors import DTYPES

NEEDED = dict.fromkeys((*FETCHES, "load"), "not available") | dict.fromkeys(
    ("release", "use", "update", "save"), "available"
)
"""Verb -> status that the parameters it names must have."""

Given = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Parameter:
    """One parameter after some operation. Its tensors are float64 and have the parameter's shape.

    Attributes:
        fetched_by: Number of the operation that fetched the parameter last. If -1, no operation has fetched it.
    """

    value: torch.Tensor
    status: str = "not available"
    gradient: torch.Tensor | None = None
    saved: torch.Tensor | None = None
    fetched_by: int = -1


@dataclass
class Model:
    """Applies operations to unpartitioned parameters. A refused operation changes no parameter.

    Attributes:
        outputs: Outputs of the last operation, by parameter. Each is a float64 tensor with one slice per rank.
    """

    case: LifecycleCase
    given: Given
    parameters: dict[int, Parameter] = field(init=False)
    outputs: dict[int, torch.Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        numbers = range(self.case.num_parameters)
        self.parameters = {index: Parameter(self.given[f"param.{index}"].double()) for index in numbers}

    def run(self, number: int, operation: Operation) -> str:
        """Applies operation number `number`. Returns the reason of a refusal, one of REFUSALS."""
        self.outputs = {}
        refusal = self.refusal(operation)
        if refusal == "none":
            named = operation.parameters
            if operation.verb in ("step", "wait"):
                named = tuple(self.parameters)
            for index in named:
                self.parameters[index] = self._after(number, operation.verb, index)
        return refusal

    def refusal(self, operation: Operation) -> str:
        """Returns the first reason to refuse the operation, in the order of REFUSALS."""
        verb, named = operation.verb, [self.parameters[index] for index in operation.parameters]
        if verb == "step":
            trained = [parameter for parameter in self.parameters.values() if parameter.gradient is not None]
            return "none" if all(parameter.status == "not available" for parameter in trained) else "status"
        if any(parameter.status != NEEDED[verb] for parameter in named):
            return "status"
        if len(set(operation.parameters)) < len(named):
            return "status"
        if verb in FETCHES and len({self.case.dtype_of(index) for index in operation.parameters}) > 1:
            return "dtype"
        if verb == "load" and any(parameter.saved is None for parameter in named):
            return "never saved"
        return "out of memory" if verb == "fail" else "none"

    def _after(self, number: int, verb: str, index: int) -> Parameter:
        before = self.parameters[index]
        match verb:
            case "fetch":
                return replace(before, status="available", fetched_by=number)
            case "launch":
                return replace(before, status="in flight", fetched_by=number)
            case "wait":
                return replace(before, status="available") if before.status == "in flight" else before
            case "release":
                return replace(before, status="not available")
            case "update":
                return replace(before, value=self.given[f"op{number}.new.{index}"].double())
            case "save":
                return replace(before, saved=before.value)
            case "load":
                assert before.saved is not None
                return replace(before, value=before.saved)
            case "step":
                return self._stepped(index, before)
        assert verb == "use"
        return self._used(number, index, before)

    def _stepped(self, index: int, before: Parameter) -> Parameter:
        if before.gradient is None:
            return before
        change = LEARNING_RATE * before.gradient
        self._prove_exact(f"param.{index}", index, before.value, change)
        return replace(before, value=before.value - change, gradient=None)

    def _used(self, number: int, index: int, before: Parameter) -> Parameter:
        x, cotangent = (self.given[f"op{number}.{kind}.{index}"].double() for kind in ("x", "cotangent"))
        self.outputs[index] = before.value * x
        if not self.case.requires_grad[index]:
            return before
        self._prove_exact(f"grad.{index}", index, *(cotangent * x))
        gradient = (cotangent * x).sum(0) / self.case.world_size
        if before.gradient is not None:
            self._prove_exact(f"grad.{index}", index, before.gradient, gradient)
            gradient = before.gradient + gradient
        return replace(before, gradient=gradient)

    def _prove_exact(self, name: str, index: int, *terms: torch.Tensor) -> None:
        """Raises InexactData unless every partial sum of the terms is a value of the parameter's dtype."""
        stacked = torch.stack(terms).reshape(len(terms), -1)
        sum_terms(name, find_integers(name, stacked), DTYPES[self.case.dtype_of(index)])


@dataclass(frozen=True)
class Moment:
    number: int
    operation: Operation
    refusal: str
    parameters: Mapping[int, Parameter]
    outputs: Mapping[int, torch.Tensor]


def moments(case: LifecycleCase, index: int) -> Iterator[Moment]:
    model = Model(case, draw(case, index))
    for number, operation in enumerate(case.sequence()):
        refusal = model.run(number, operation)
        yield Moment(number, operation, refusal, dict(model.parameters), model.outputs)
