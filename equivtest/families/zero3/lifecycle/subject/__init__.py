"""Subjects that run a sequence of operations on parameters under the project's own ZeRO-3."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from equivtest.families.zero3.fetch.subject import (
    DtypeError,
    Fetcher,
    PartitionedParameter,
    Status,
    StatusError,
    fetch_by_all_gather,
    fetch_by_all_reduce,
)
from equivtest.families.zero3.lifecycle.case import LEARNING_RATE, MEMORY, REFUSALS, LifecycleCase, Operation
from equivtest.families.zero3.lifecycle.subject.memory import Meter, storages
from equivtest.families.zero3.lifecycle.subject.store import NeverSavedError, Store
from equivtest.tensors import DTYPES, Placed

Answers = dict[str, Placed]
Given = Mapping[str, torch.Tensor]

REFUSED_FOR: dict[type[Exception], str] = {
    StatusError: "status",
    DtypeError: "dtype",
    NeverSavedError: "never saved",
    MemoryError: "out of memory",
}
COUNTED = (Status.NOT_AVAILABLE, Status.IN_FLIGHT, Status.AVAILABLE)


def zero3_lifecycle_all_gather(case: LifecycleCase, mesh: DeviceMesh, given: Given) -> Answers:
    return Life(case, mesh, given, fetch_by_all_gather).answers()


def zero3_lifecycle_all_reduce(case: LifecycleCase, mesh: DeviceMesh, given: Given) -> Answers:
    return Life(case, mesh, given, fetch_by_all_reduce).answers()


class NoMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes every torch operator raise MemoryError, as if there were no memory for its result."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise MemoryError(f"no memory for {func}")


class Life:
    """Applies each operation of a case to a `Store` of parameters on this rank, and returns the state after each.

    Each rank lists the parameters of an operation in an order that differs between ranks, and waits for their fetches
    in that order.
    """

    def __init__(
        self, case: LifecycleCase, mesh: DeviceMesh, given: Given, fetcher: Fetcher, store_class: type[Store] = Store
    ) -> None:
        self.case, self.rank, self.given = case, mesh.get_local_rank(), given
        self.meter = Meter(given.values()) if case.measures else None
        self.outputs: dict[int, torch.Tensor] = {}
        with self.meter or nullcontext():
            wholes = [given[f"param.{index}"] for index in range(case.num_parameters)]
            self.store = store_class(wholes, mesh, fetcher, padding=padding_of(case))

    def answers(self) -> Answers:
        layouts, answers = self.case.layouts(), {}
        for number, operation in enumerate(self.case.sequence()):
            refusal = self.attempt(number, operation)
            for name, tensor in self.look(number, refusal):
                answers[name] = Placed(tensor, layouts[name])
        self.wait()
        return answers

    def attempt(self, number: int, operation: Operation) -> str:
        """Runs an operation. Returns the reason of its refusal, one of REFUSALS."""
        self.outputs = {}
        try:
            with self.meter or nullcontext():
                self.perform(number, operation)
        except tuple(REFUSED_FOR) as error:
            return REFUSED_FOR[type(error)]
        return "none"

    def perform(self, number: int, operation: Operation) -> None:
        named = self.in_own_order(operation.parameters)
        match operation.verb:
            case "wait":
                self.wait()
            case "step":
                self.store.step(LEARNING_RATE)
            case "fail":
                with NoMemory():  # type: ignore[no-untyped-call]
                    self.store.fetch(named)
            case "use":
                self.outputs = self.store.use(named, *(self.rows(number, kind, named) for kind in ("x", "cotangent")))
            case "update":
                self.store.update(named, {index: self.given[f"op{number}.new.{index}"] for index in named})
            case verb:
                getattr(self.store, verb)(named)

    def wait(self) -> None:
        flying = tuple(index for index, parameter in self.parameters() if parameter.status is Status.IN_FLIGHT)
        for index in self.in_own_order(flying):
            self.store.wait(index)

    def in_own_order(self, indices: tuple[int, ...]) -> tuple[int, ...]:
        """Rotates the numbers, so that each rank begins with a different number."""
        start = self.rank % max(len(indices), 1)
        return indices[start:] + indices[:start]

    def rows(self, number: int, kind: str, indices: Sequence[int]) -> dict[int, torch.Tensor]:
        """This rank's slices of the tensors `kind`, 'x' or 'cotangent', of one operation, by parameter."""
        return {index: self.given[f"op{number}.{kind}.{index}"][0] for index in indices}

    def look(self, number: int, refusal: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, copy) of each tensor that exists after operation `number`, and of the code of its refusal."""
        here, store = f"after{number}", self.store
        yield f"{here}.refusal", torch.tensor(REFUSALS.index(refusal))
        yield f"{here}.status", torch.tensor([COUNTED.index(parameter.status) for _, parameter in self.parameters()])
        gradients = {index: store.gradient(index) for index, _ in self.parameters()}
        yield f"{here}.has_gradient", torch.tensor([int(gradient is not None) for gradient in gradients.values()])
        for index, parameter in self.parameters():
            yield f"{here}.partition.{index}", parameter.partition.clone()
            if parameter.status is Status.AVAILABLE and parameter.whole is not None:
                whole = parameter.whole.detach().clone()
                yield f"{here}.param.{index}", whole.requires_grad_(parameter.whole.requires_grad)
            if (gradient := gradients[index]) is not None:
                yield f"grad.{index}.{here}", gradient.clone()
        for index, output in self.outputs.items():
            yield f"{here}.output.{index}", output[None].clone()
        if self.meter is not None:
            yield f"memory.{here}", self.memory(self.meter)

    def memory(self, meter: Meter) -> torch.Tensor:
        """Returns the bytes in use, for each kind of memory in MEMORY.

        Outputs do not count, because they belong to the caller. A fetch in flight may use memory besides the whole
        parameters.
        """
        store = self.store
        held = {
            "partitions": [parameter.partition for parameter in store.parameters],
            "wholes": [parameter.whole for parameter in store.parameters if parameter.whole is not None],
            "gradients": list(store.gradients.partitions.values()),
            "saved": list(store.saved.values()),
        }
        sizes = {kind: sum(storages(tensors).values()) for kind, tensors in held.items()}
        everything = [*self.outputs.values(), *(tensor for tensors in held.values() for tensor in tensors)]
        sizes["others"] = 0 if store.fetching else meter.unaccounted(everything)
        return torch.tensor([sizes[kind] for kind in MEMORY])

    def parameters(self) -> Iterator[tuple[int, PartitionedParameter]]:
        return enumerate(self.store.parameters)


def padding_of(case: LifecycleCase) -> float:
    """Returns the fill value of padding: NaN, or a finite number that every dtype of the case can represent."""
    if case.padding == "nan":
        return float("nan")
    return min(torch.finfo(DTYPES[case.dtype_of(index)]).max for index in range(case.num_parameters)) / 4
