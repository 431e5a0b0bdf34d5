"""Holds the partitions of one layer's parameters under ZeRO-3, and the whole parameters while they are fetched.

While the parameters are not fetched, the module's parameters have no elements. For the backward, autograd saves a
reference to a whole parameter instead of the parameter itself. So the backward uses the whole parameter that is fetched
at that time.

Source: DeepSpeed's statuses, ZeroParamStatus in deepspeed/runtime/zero/partition_parameters.py
(0.19.8); torch.autograd.graph.saved_tensors_hooks (2.13.0).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from equivtest.families.zero3.fetch.subject import Fetcher, PartitionedParameter, Status, partition, release


@dataclass(frozen=True)
class SavedView:
    """Stands for a tensor that autograd saves and that is a view of the whole parameter `kind`, such as its transpose.

    Autograd then keeps no reference to the whole parameter, which can be released before the backward. `size` and
    `stride` describe the view.
    """

    kind: str
    size: torch.Size
    stride: tuple[int, ...]


class Layer:
    """Partitions a module's parameters, and fetches and releases them together.

    A kind is a parameter's name, such as 'weight'. A parameter that an earlier or a later layer shares is partitioned
    once. The first of these layers to run fetches the parameter, and the last layer releases it.

    Args:
        module: The module. Its parameters are whole at first. The constructor takes their elements away.
        fetcher: Function that makes all parameters whole again with one collective.
        padding: Fill value of the partitions' padding.
        partitions: Partitions of the layers before this layer. The constructor adds the partitions of this layer's
            parameters.

    Attributes:
        earlier, later: Kinds whose parameter an earlier or a later layer shares.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        fetcher: Fetcher,
        *,
        padding: float,
        partitions: dict[nn.Parameter, PartitionedParameter] | None = None,
    ) -> None:
        self.mesh, self.fetcher = mesh, fetcher
        self.parameters = dict(module.named_parameters())
        self.earlier: frozenset[str] = frozenset()
        self.later: frozenset[str] = frozenset()
        partitions = {} if partitions is None else partitions
        for whole in self.parameters.values():
            if whole not in partitions:
                partitions[whole] = partition(whole, mesh, padding=padding)
        self.partitioned = {kind: partitions[whole] for kind, whole in self.parameters.items()}
        self._empty(self.parameters)

    @property
    def is_available(self) -> bool:
        """True if all parameters are whole, except parameters that another layer shares and has released."""
        present = {kind for kind, parameter in self.partitioned.items() if parameter.status is Status.AVAILABLE}
        return bool(present) and self.partitioned.keys() - self.earlier - self.later <= present

    def fetch(self) -> None:
        """Makes the parameters whole: NOT_AVAILABLE -> IN_FLIGHT -> AVAILABLE."""
        tied = self.earlier | self.later
        absent = [
            parameter
            for kind, parameter in self.partitioned.items()
            if kind not in tied or parameter.status is not Status.AVAILABLE
        ]
        if absent:
            self.fetcher(absent, self.mesh).wait()
        for kind, parameter in self.parameters.items():
            parameter.data = self._whole(kind)

    def release(self, keeping: Collection[str] = ()) -> None:
        """Drops the whole parameters of all kinds except `keeping`: AVAILABLE -> NOT_AVAILABLE.

        Raises:
            RuntimeError: a parameter that no other layer shares is not AVAILABLE.
        """
        tied = self.earlier | self.later
        for kind, parameter in self.partitioned.items():
            if parameter.status is not Status.AVAILABLE and kind not in tied:
                raise RuntimeError(f"{kind} is {parameter.status.name}; only an AVAILABLE parameter can be released")
        dropped = [kind for kind in self.partitioned if kind not in keeping]
        release([self.partitioned[kind] for kind in dropped])
        self._empty(dropped)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | SavedView:
        """Returns what autograd saves: a `SavedView` for a view of a whole parameter, or the tensor itself."""
        for kind, parameter in self.partitioned.items():
            if parameter.whole is not None and _begins_with(tensor, parameter.whole):
                return SavedView(kind, tensor.size(), tensor.stride())
        return tensor

    def unpack(self, saved: torch.Tensor | SavedView) -> torch.Tensor:
        """Returns the saved tensor, or for a `SavedView` the same view of the parameter that is fetched now."""
        if isinstance(saved, torch.Tensor):
            return saved
        return self._whole(saved.kind).as_strided(saved.size, saved.stride)

    def _whole(self, kind: str) -> torch.Tensor:
        parameter: PartitionedParameter = self.partitioned[kind]
        if parameter.whole is None or parameter.status is not Status.AVAILABLE:
            raise RuntimeError(f"{kind} is {parameter.status.name}; only an AVAILABLE parameter can be used")
        return parameter.whole

    def _empty(self, kinds: Collection[str]) -> None:
        for kind in kinds:
            self.parameters[kind].data = self.parameters[kind].data.new_empty(0)


def _begins_with(tensor: torch.Tensor, whole: torch.Tensor) -> bool:
    return tensor.data_ptr() == whole.data_ptr() and tensor.numel() == whole.numel() > 0
