"""Records the tensors of a module in your own job, in forwards and backwards.

This module passes the tensors on and does not keep them.

Each output is replaced by an alias, so that the alias's gradient covers all uses outside of the module and no use
within it. Each input is replaced by an alias too, whose gradient covers the uses within the module. Each forward is a
micro-batch. The micro-batch's name becomes a part of the names of its tensors, and of the gradients that its backward
gives later.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from equivtest.errors import Misuse
from equivtest.programs.boundaries import BOUNDARY, Boundaries, Choice, Known, is_given, is_in_backward
from equivtest.programs.case import cotangent_of
from equivtest.programs.micro_batches import at_micro_batch
from equivtest.programs.names import own_names
from equivtest.programs.outputs import named_outputs

Keep = Callable[[str, torch.Tensor], None]
"""Function that records a tensor under the name of an answer."""


class PartsMet(Boundaries):
    """Calls `keep` with the inputs, outputs and gradients of the parts whose names match `patterns`.

    If several parts return or take the same tensor, the tensor has the name that the first of these parts gives it.
    This is so even if `patterns` does not match the first part, so that `patterns` changes no name.

    Args:
        patterns: Patterns (`fnmatch`) of names of submodules.
        whole: Recorder of the whole module. The recorder knows the number of the current forward, and the inputs of the
            whole module. These inputs are not recorded as inputs of a part.
    """

    def __init__(self, module: nn.Module, patterns: tuple[str, ...], keep: Keep, whole: WholeMet) -> None:
        self._patterns = patterns
        self._keep = keep
        self._whole = whole
        self._kept: set[str] = set()
        super().__init__(module)

    def begin_again(self) -> None:
        super().begin_again()
        self._kept.clear()

    def refer_to(self, tensor: torch.Tensor) -> weakref.ref[torch.Tensor]:
        return weakref.ref(tensor)

    def is_given(self, tensor: torch.Tensor, what: str) -> bool:
        return bool(what) and (is_given(tensor, what) or self._whole.is_given(tensor))

    def choose(self, name: str, operand: torch.Tensor, dim: int, choice: Choice) -> Any:
        found, known = choice(operand), self._known_as(operand)
        if known is not None and f"{BOUNDARY}{known.value}" in self._kept and not self.is_again:
            self._keep(self._whole.at(f"{BOUNDARY}{name}"), found[1])
        return found

    def meet(self, name: str, tensor: torch.Tensor) -> None:
        self._keep(self._whole.at(f"{BOUNDARY}{name}"), tensor)

    def meet_gradient(self, name: str, tensor: torch.Tensor) -> None:
        tensor.register_hook(functools.partial(self._keep, self._whole.at(f"grad.{BOUNDARY}{name}")))  # type: ignore[no-untyped-call]

    def _take_all(self, path: str, number: int, leaves: list[Any]) -> dict[int, torch.Tensor]:
        return {} if self.is_again else super()._take_all(path, number, leaves)

    def _meet_all(self, path: str, number: int, given: object, what: str) -> None:
        if not self.is_again:
            super()._meet_all(path, number, given, what)

    def _see(self, path: str, tensor: torch.Tensor, known: Known) -> None:
        self._known[id(tensor)] = known
        if not any(fnmatchcase(path, pattern) for pattern in self._patterns):
            return
        if self._is_new(f"{BOUNDARY}{known.value}"):
            self.meet(known.value, tensor)
        if known.gradient and tensor.requires_grad and self._is_new(f"grad.{BOUNDARY}{known.gradient}"):
            self.meet_gradient(known.gradient, tensor)

    def _is_new(self, name: str) -> bool:
        is_new = name not in self._kept
        self._kept.add(name)
        return is_new


class WholeMet:
    """Calls `keep` with the inputs and outputs of a module, and with the gradients of these tensors.

    Attributes:
        num_calls: Number of calls of the module, without the recomputations of checkpointing.
        inputs: (names of all inputs in order, names of the inputs passed by position) for each call.

    Args:
        name_inputs: Function (args, kwargs) -> (inputs by name, names of the inputs passed by position).
        outputs: Same as in `ModuleCase`.
        look_again: Function that is called with each input again, as (name, tensor), when the forward has ended.
    """

    def __init__(
        self,
        module: nn.Module,
        name_inputs: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Mapping[str, torch.Tensor], tuple[str, ...]]],
        outputs: tuple[str, ...],
        keep: Keep,
        look_again: Keep,
    ) -> None:
        self.num_calls = 0
        self.inputs: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
        self._name_inputs, self._outputs, self._keep, self._look_again = name_inputs, outputs, keep, look_again
        self._handed: Mapping[str, torch.Tensor] = {}
        self._given: dict[int, weakref.ref[torch.Tensor]] = {}
        self._hooks = [
            module.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True),
            module.register_forward_hook(self._after),
        ]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def is_given(self, tensor: torch.Tensor) -> bool:
        reference = self._given.get(id(tensor))
        return reference is not None and reference() is tensor

    def at(self, name: str) -> str:
        return at_micro_batch(self.num_calls, name)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if is_in_backward():
            return args, kwargs
        self.num_calls += 1
        inputs, positional = self._name_inputs(args, kwargs)
        self.inputs.append((tuple(inputs), positional))
        self._handed = inputs
        aliases = {}
        for name, tensor in inputs.items():
            self._keep(self.at(f"given.{name}"), tensor)
            if tensor.requires_grad:
                aliases[id(tensor)] = self._alias(tensor, f"grad.{name}")
        self._given = {id(each): weakref.ref(each) for each in aliases.values()}
        return replaced(args, aliases), replaced(kwargs, aliases)

    def _after(self, module: nn.Module, args: object, given: object) -> object:
        if is_in_backward():
            return given
        for name, tensor in self._handed.items():
            self._look_again(self.at(f"given.{name}"), tensor)
        self._handed = {}
        aliases = {}
        for name, tensor in named_outputs(given, self._outputs, type(module).__name__).items():
            self._keep(self.at(name), tensor)
            if tensor.requires_grad:
                aliases[id(tensor)] = self._alias(tensor, cotangent_of(name))
        return replaced(given, aliases)

    def _alias(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        alias: torch.Tensor = _Same.apply(tensor)  # type: ignore[no-untyped-call]
        alias.register_hook(functools.partial(self._keep, self.at(name)))  # type: ignore[no-untyped-call]
        return alias


class _Same(torch.autograd.Function):
    """Returns the tensor itself, and neither a copy nor a view.

    FSDP2 warns of views, and some operations in place refuse views.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def replaced(given: Any, aliases: Mapping[int, torch.Tensor]) -> Any:
    """Replaces tensors in nested tuples, mappings and dataclasses, by `aliases` (id -> new tensor)."""
    if isinstance(given, torch.Tensor):
        return aliases.get(id(given), given)
    if dataclasses.is_dataclass(given) and not isinstance(given, type) and not isinstance(given, Mapping):
        made = {field.name: replaced(getattr(given, field.name), aliases) for field in dataclasses.fields(given)}
        return dataclasses.replace(given, **made)
    return tree_map_only(torch.Tensor, lambda tensor: aliases.get(id(tensor), tensor), given)


def unwrapped(module: nn.Module) -> nn.Module:
    own_name = own_names(module)
    found: nn.Module = [part for name, part in module.named_modules() if own_name(name) == ""][-1]
    return found


def named_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
    """Returns the inputs of a call by name, and the names of the inputs passed by position.

    The names are the parameters of the module's forward. An input that is None or has its default value is left out.

    Raises:
        Misuse: any other input is not a tensor.
    """
    signature = inspect.signature(unwrapped(module).forward)
    by_place = [
        each.name
        for each in signature.parameters.values()
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    named = {(by_place[place] if place < len(by_place) else str(place)): value for place, value in enumerate(args)}
    positional = tuple(named)
    tensors = {}
    for name, value in {**named, **kwargs}.items():
        default = signature.parameters[name].default if name in signature.parameters else None
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        elif value is not None and not (isinstance(value, bool | int | float | str) and value == default):
            raise Misuse(
                f"the module was called with {name}={str(value)[:40]!r}, which is neither a tensor nor the argument's "
                "default: pass only tensors, and set all other values within the module"
            )
    return tensors, tuple(name for name in positional if name in tensors)
