"""A tensor that knows how far any correct program's may be from it, and how large what such a program adds up may be.

Three tensors of one shape: the value that the unsharded module gives, in the module's own dtype; the largest distance
of a correct program's, element by element; and the sum of the magnitudes of the shares that ranks may hold of it, which
a program may scale and move before it adds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


@dataclass
class Origin:
    """Where values are from.

    Attributes:
        is_constant: Whether they hang on nothing that was given, as a mask does that the module makes.
    """

    is_constant: bool = False


class Ranged(torch.Tensor):
    """A tensor of these, which autograd takes for any other; see `equivtest.oracle.running` for what it computes.

    Attributes:
        value: Of the tensor's own dtype.
        error, magnitude: float64, of the same strides; magnitude is at least |value| + error.  Of a complex value they
            are complex128, of its real and of its imaginary part.
        origin: Where its values are from; views share it with what they are views of.
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

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Ranged({self.value}, error {self.error})"


class Parts(NamedTuple):
    """The three of a tensor or of a number, for arithmetic."""

    value: torch.Tensor
    error: torch.Tensor
    magnitude: torch.Tensor

    @classmethod
    def of(cls, operand: Any) -> Parts:
        """Wraps an operand; a plain tensor or a number, which every program has alike, has no error."""
        if isinstance(operand, Ranged):
            return cls(operand.value, operand.error, operand.magnitude)
        value = operand if isinstance(operand, torch.Tensor) else torch.tensor(operand, dtype=torch.float64)
        if value.is_complex():
            wide = value.to(torch.complex128)
            return cls(value, torch.zeros_like(wide), torch.complex(wide.real.abs(), wide.imag.abs()))
        return cls(value, torch.zeros_like(value, dtype=torch.float64), value.double().abs())

    def wrapped(self) -> Ranged:
        """As a tensor; all three in the strides of the value, so that they can be viewed alike."""
        value = self.value.contiguous() if 0 in self.value.stride() else self.value
        return Ranged(value, _like(self.error, value), _like(self.magnitude, value))

    @property
    def size(self) -> torch.Tensor:
        """The magnitude of the value, float64."""
        return self.value.double().abs()

    @property
    def reach(self) -> torch.Tensor:
        """The largest magnitude of a correct program's value, its shares added; float64."""
        return self.size + self.error


def constant(parts: Parts) -> Ranged:
    """As `Parts.wrapped`, of what hangs on nothing that was given."""
    found = parts.wrapped()
    found.origin.is_constant = True
    return found


def _like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if tensor.shape == value.shape and tensor.stride() == value.stride():
        return tensor
    return torch.empty_strided(value.size(), value.stride(), dtype=tensor.dtype).copy_(tensor)
