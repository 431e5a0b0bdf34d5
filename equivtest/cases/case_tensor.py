"""The contract of each tensor of a case."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from equivtest.layout import Layout

Role = Literal["given", "kept", "output", "state", "gradient", "trained", "memory"]


@dataclass(frozen=True)
class CaseTensor:
    """The contract of one tensor.

    Attributes:
        role: The purpose of the tensor. If 'given', the harness passes the tensor to the subject. The subject returns
            the tensors of all other roles. If 'kept', the harness also passes the tensor, under the same name. If
            'output', the tensor is a result, and claims judge its layout as well as its values. If 'state', it is
            another tensor of the ranks, such as a parameter or a captured tensor. If 'gradient', it is a gradient after
            a backward. If 'trained', it is a clipped gradient, an updated parameter, or any tensor that a step after
            the first returns. If 'memory', it is the amount of memory of a rank.
        needs_grad: requires_grad of the tensor, if the harness passes it.
        is_contiguous: True if the tensor is contiguous in memory when the harness passes it.
    """

    shape: tuple[int, ...]
    layout: Layout
    role: Role = "given"
    needs_grad: bool = False
    is_contiguous: bool = True

    @property
    def is_given(self) -> bool:
        return self.role in ("given", "kept")

    @property
    def is_answered(self) -> bool:
        return self.role != "given"
