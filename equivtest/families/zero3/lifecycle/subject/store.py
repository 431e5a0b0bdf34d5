"""Stores parameters under ZeRO-3, which can be fetched, used, updated, saved and released in any order.

An operation that is not possible is refused before anything has changed. All ranks make the same calls in the same
order. In one call each rank may name the parameters in a different order, and may wait for them in a different order.

Source: GatheredParameters and ZeroParamStatus in deepspeed/runtime/zero/partition_parameters.py (0.19.8).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from equivtest.families.zero3.fetch.subject import (
    Fetch,
    Fetcher,
    PartitionedParameter,
    Status,
    StatusError,
    partition,
    release,
)
from equivtest.families.zero3.subject.gradients import Gradients


class NeverSavedError(LookupError):
    """Raised if a parameter that was never saved is loaded."""


class Store:
    """Stores parameters by number. Each parameter is partitioned, and is whole only while it is fetched.

    Args:
        wholes: The parameters before they are partitioned. They may have any shape.
        fetcher: Function that makes several parameters whole with one collective.
        padding: Fill value of the partitions' padding.

    Attributes:
        saved: Whole values of the saved parameters.
        fetching: Fetches for which the store has not waited, and the parameters of each fetch.
    """

    gradients_class: ClassVar[type[Gradients]] = Gradients

    def __init__(self, wholes: Sequence[torch.Tensor], mesh: DeviceMesh, fetcher: Fetcher, *, padding: float) -> None:
        self.mesh, self.fetcher, self.padding = mesh, fetcher, padding
        self.parameters = [partition(whole, mesh, padding=padding) for whole in wholes]
        self.gradients = self.gradients_class(mesh, padding=padding)
        self.saved: dict[int, torch.Tensor] = {}
        self.fetching: list[tuple[tuple[int, ...], Fetch]] = []

    def gradient(self, index: int) -> torch.Tensor | None:
        """Returns this rank's partition of the sum of all gradients since the last step."""
        return self.gradients.partitions.get(str(index))

    def launch(self, indices: Sequence[int]) -> None:
        """Starts one collective that makes the parameters whole: NOT_AVAILABLE -> IN_FLIGHT."""
        ordered = tuple(sorted(indices))
        self.fetching.append((ordered, self.fetcher([self.parameters[index] for index in ordered], self.mesh)))

    def wait(self, index: int) -> None:
        """Waits for the running fetch of this parameter, if there is one: IN_FLIGHT -> AVAILABLE."""
        for entry in self.fetching:
            if index in entry[0]:
                self.fetching.remove(entry)
                entry[1].wait()
                for parameter in entry[1].parameters:
                    whole_of(parameter).requires_grad_(parameter.requires_grad)
                return

    def fetch(self, indices: Sequence[int]) -> None:
        self.launch(indices)
        self.wait(indices[0])

    def release(self, indices: Sequence[int]) -> None:
        """Drops the whole parameters: AVAILABLE -> NOT_AVAILABLE."""
        self.need(indices, Status.AVAILABLE, "released")
        release([self.parameters[index] for index in indices])

    def use(
        self, indices: Sequence[int], x: Mapping[int, torch.Tensor], cotangent: Mapping[int, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """Runs forward and backward of parameter * x. Adds the average of the ranks' gradients to earlier gradients."""
        self.need(indices, Status.AVAILABLE, "used")
        outputs = {}
        for index in sorted(indices):  # the same order of collectives on every rank
            whole = whole_of(self.parameters[index])
            output = whole * x[index]
            if output.requires_grad:
                torch.autograd.backward(output, cotangent[index])
                assert whole.grad is not None
                self.gradients.add(str(index), whole.grad)
                whole.grad = None
            outputs[index] = output.detach()
        return outputs

    def step(self, lr: float) -> None:
        """Runs one step of SGD on the partitions of all parameters with a gradient, and deletes the gradients.

        A parameter with a gradient must be NOT_AVAILABLE, because its whole tensor would keep the old value.
        """
        trained = [index for index in range(len(self.parameters)) if self.gradient(index) is not None]
        self.need(trained, Status.NOT_AVAILABLE, "updated")
        for index in trained:
            self.descend(index, lr)
        self.gradients.clear()

    def descend(self, index: int, lr: float) -> None:
        gradient = self.gradient(index)
        assert gradient is not None
        self.parameters[index].partition.sub_(gradient, alpha=lr)

    def update(self, indices: Sequence[int], new: Mapping[int, torch.Tensor]) -> None:
        """Writes new values to whole parameters and to their partitions. Every rank passes the same values."""
        self.need(indices, Status.AVAILABLE, "updated from outside")
        for index in indices:
            self.write_whole(index, new[index])
            self.write_partition(index, new[index])

    def write_whole(self, index: int, new: torch.Tensor) -> None:
        with torch.no_grad():
            whole_of(self.parameters[index]).copy_(new)

    def write_partition(self, index: int, new: torch.Tensor) -> None:
        """Writes this rank's part of `new`, the whole parameter's new value, to the partition."""
        self.parameters[index].partition.copy_(partition(new, self.mesh, padding=self.padding).partition)

    def save(self, indices: Sequence[int]) -> None:
        self.need(indices, Status.AVAILABLE, "saved")
        self.saved |= {index: whole_of(self.parameters[index]).detach().clone() for index in indices}

    def load(self, indices: Sequence[int]) -> None:
        """Writes the saved values to the partitions.

        The parameters must be NOT_AVAILABLE, because their whole tensors would keep the old value.

        Raises:
            NeverSavedError: a parameter was never saved.
        """
        self.need(indices, Status.NOT_AVAILABLE, "loaded")
        for index in indices:
            if index not in self.saved:
                raise NeverSavedError(f"parameter {index} was never saved; save it while it is AVAILABLE")
        for index in indices:
            self.write_partition(index, self.saved[index])

    def need(self, indices: Sequence[int], status: Status, done: str) -> None:
        """Raises StatusError unless every parameter has this status. The message names what cannot be `done`."""
        for index in indices:
            found = self.parameters[index].status
            if found is not status:
                raise StatusError(f"parameter {index} is {found.name}; it must be {status.name} to be {done}")


def whole_of(parameter: PartitionedParameter) -> torch.Tensor:
    assert parameter.whole is not None
    return parameter.whole
