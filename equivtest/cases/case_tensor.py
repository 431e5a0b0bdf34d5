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
        shape: Global shape.
        layout: How the ranks share the tensor.
        role: 'given': the harness passes it to the subject.  The subject answers all others:
            'kept': the harness passes it too, under the same name;
            'output': a result; claims judge its layout as well as its values;
            'state': other tensors of the ranks, such as parameters and captured tensors;
            'gradient': a gradient after a backward;
            'trained': a clipped gradient, an updated parameter, or any answer of a step after the first;
            'memory': the amount of memory of a rank.
        needs_grad: requires_grad of a tensor that the harness passes.
        is_contiguous: True if a tensor that the harness passes is contiguous in memory.
    """

    shape: tuple[int, ...]
    layout: Layout
    role: Role = "given"
    needs_grad: bool = False
    is_contiguous: bool = True

    @property
    def is_given(self) -> bool:
        """True if the harness passes the tensor to the subject."""
        return self.role in ("given", "kept")

    @property
    def is_answered(self) -> bool:
        """True if the subject answers the tensor."""
        return self.role != "given"
