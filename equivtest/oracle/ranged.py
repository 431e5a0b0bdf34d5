"""Defines `Ranged`: a tensor with a bound on the error of any correct program, and on the size of the program's sums.

A `Ranged` tensor consists of three tensors of one shape. The value is that of the unsharded module, in the module's own
dtype. The error is the largest error of a correct program, element by element. The magnitude is the sum of the
magnitudes of the value's shares: each rank may have one share, and a program may scale and move shares before it adds
them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch


@dataclass
class Origin:
    """Describes where the values of a tensor, and of all views of the tensor, come from.

    Attributes:
        is_constant: True if the values do not depend on the module's inputs or parameters, as in a mask that the module
            makes.
    """

    is_constant: bool = False


class Ranged(torch.Tensor):
    """A tensor with its error and magnitude. Autograd treats it like any other tensor: see `equivtest.oracle.running`.

    Attributes:
        value: The value, in the tensor's own dtype.
        error, magnitude: Two float64 tensors with the strides of `value`. The magnitude is at least |value| + error. If
            the value is complex, both tensors are complex128, with separate real and imaginary parts.
        origin: Origin of the values. All views of a tensor have the same origin.
    """

    value: torch.Tensor
    error: torch.Tensor
    magnitude: torch.Tensor
    origin: Origin

    @staticmethod
    def __new__(
        cls, value: torch.Tensor, error: torch.Tensor, magnitude: torch.Tensor, origin: Origin | None = None
    ) -> Ranged:
        made: Ranged = torch.Tensor._make_wrapper_subclass(
            cls, value.size(), strides=value.stride(), storage_offset=value.storage_offset(), dtype=value.dtype
        )
        made.value, made.error, made.magnitude = value, error, magnitude
        made.origin = Origin() if origin is None else origin
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"{func} on a ranged tensor outside of its mode")

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranged:
        """Returns a copy, as of each parameter of a module that a program copies to average its parameters.

        Source: torch/optim/swa_utils.py, AveragedModel (2.13.0).
        """
        if id(self) not in memo:
            parts = [each.detach().clone() for each in (self.value, self.error, self.magnitude)]
            copied = Ranged(*parts, replace(self.origin))  # type: ignore[call-arg, arg-type]
            copied.requires_grad_(self.requires_grad)
            copied._is_param = getattr(self, "_is_param", False)  # torch.nn.Parameter
            memo[id(self)] = copied
        found: Ranged = memo[id(self)]
        return found

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Ranged({self.value}, error {self.error})"


class Parts(NamedTuple):
    """Value, error and magnitude of a tensor or of a number, as three plain tensors: see `Ranged`."""

    value: torch.Tensor
    error: torch.Tensor
    magnitude: torch.Tensor

    @classmethod
    def of(cls, operand: Any) -> Parts:
        """Returns the three tensors of an operand. A plain tensor or number has an error of 0."""
        if isinstance(operand, Ranged):
            return cls(operand.value, operand.error, operand.magnitude)
        value = operand if isinstance(operand, torch.Tensor) else torch.tensor(operand, dtype=torch.float64)
        if value.is_complex():
            wide = value.to(torch.complex128)
            return cls(value, torch.zeros_like(wide), torch.complex(wide.real.abs(), wide.imag.abs()))
        return cls(value, torch.zeros_like(value, dtype=torch.float64), value.double().abs())

    def wrapped(self) -> Ranged:
        """Returns a `Ranged` tensor. Its parts have equal strides, so that a view selects the same elements of each."""
        value = self.value.contiguous() if 0 in self.value.stride() else self.value
        return Ranged(value, _like(self.error, value), _like(self.magnitude, value))

    @property
    def size(self) -> torch.Tensor:
        return self.value.double().abs()

    @property
    def reach(self) -> torch.Tensor:
        """Largest absolute value that the sum of all shares may have in a correct program."""
        return self.size + self.error


def constant(parts: Parts) -> Ranged:
    found = parts.wrapped()
    found.origin.is_constant = True
    return found


def _like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if tensor.shape == value.shape and tensor.stride() == value.stride():
        return tensor
    return torch.empty_strided(value.size(), value.stride(), dtype=tensor.dtype).copy_(tensor)
