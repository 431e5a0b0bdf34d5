"""Hooks ZeRO-3 into a module. The hooks fetch and release the module's layers, and reduce the layers' gradients.

In the forward, a layer is whole while it runs. In the backward, a layer becomes whole when the gradient of its output
is known. The layer is released when the gradient of an earlier layer's output is known, or at the end of the backward,
because the layer has been used by then. A parameter that several layers share is whole from the first of these layers
until the last. So it is fetched once in the forward and once in the backward. Autograd adds up the gradients of all
uses of a parameter before they are reduced.

Source: deepspeed/runtime/zero/parameter_offload.py (0.19.8), its pre and post hooks of modules.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh

from equivtest.families.training.zero3.subject.layer import Layer
from equivtest.families.zero3.fetch.subject import Fetcher, PartitionedParameter
from equivtest.families.zero3.subject.gradients import Gradients


class Engine:
    """Runs a module with partitioned layers. A layer is a child of the module, with the child's submodules.

    Attributes:
        layers: Layers by name.
        gradients: This rank's partitions of the gradients, added up since they were last cleared.
    """

    layer_class: ClassVar[type[Layer]] = Layer
    gradients_class: ClassVar[type[Gradients]] = Gradients

    def __init__(self, module: nn.Module, mesh: DeviceMesh, fetcher: Fetcher, *, padding: float) -> None:
        self.gradients = self.gradients_class(mesh, padding=padding)
        self.layers: dict[str, Layer] = {}
        partitions: dict[nn.Parameter, PartitionedParameter] = {}
        for name, child in module.named_children():
            self._hook_gradients(name, child, partitions)
            self.layers[name] = self.layer_class(child, mesh, fetcher, padding=padding, partitions=partitions)
            self._hook_layer(child, self.layers[name])
        tell_shared(list(self.layers.values()))

    def partitioned(self, name: str) -> PartitionedParameter:
        layer, _, kind = name.partition(".")
        return self.layers[layer].partitioned[kind]

    def backward(self, output: torch.Tensor, cotangent: torch.Tensor) -> None:
        torch.autograd.backward(output, cotangent)
        self.release_all()

    def release_all(self) -> None:
        for layer in self.layers.values():
            if layer.is_available:
                layer.release()

    def before_backward_of(self, layer: Layer) -> None:
        """Releases every later layer, which has been used by then, and fetches this layer."""
        layers = list(self.layers.values())
        for used in layers[layers.index(layer) + 1 :]:
            if used.is_available:
                used.release(keeping=used.earlier)
        layer.fetch()

    def _hook_gradients(self, name: str, module: nn.Module, hooked: Collection[nn.Parameter]) -> None:
        """Hooks each parameter that is not in `hooked`, so that its gradient is reduced when it is complete.

        Call this method while the parameters are whole, because autograd records their shapes during the call.
        """
        for kind, parameter in module.named_parameters():
            if parameter.requires_grad and parameter not in hooked:

                def reduce(held: torch.Tensor, full_name: str = f"{name}.{kind}") -> None:
                    assert held.grad is not None
                    self.gradients.add(full_name, held.grad)
                    held.grad = None

                parameter.register_post_accumulate_grad_hook(reduce)  # type: ignore[no-untyped-call]

    def _hook_layer(self, module: nn.Module, layer: Layer) -> None:
        saving: list[Any] = []

        def before(_module: nn.Module, _args: Any) -> None:
            layer.fetch()
            saving.append(saved_tensors_hooks(layer.pack, layer.unpack))
            saving[-1].__enter__()

        def after(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
            saving.pop().__exit__(None, None, None)
            layer.release(keeping=layer.later)
            if output.requires_grad:
                output.register_hook(lambda _: self.before_backward_of(layer))  # type: ignore[no-untyped-call]

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)


def tell_shared(layers: Sequence[Layer]) -> None:
    """Sets `earlier` and `later`, the kinds that each layer shares. `layers` are in the forward's order."""
    for index, layer in enumerate(layers):
        for kind, parameter in layer.parameters.items():
            if any(parameter is other for before in layers[:index] for other in before.parameters.values()):
                layer.earlier |= {kind}
            if any(parameter is other for after in layers[index + 1 :] for other in after.parameters.values()):
                layer.later |= {kind}
