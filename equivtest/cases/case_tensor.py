"""What a case says of each of its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from equivtest.layout import Layout

Role = Literal["given", "kept", "output", "state", "gradient", "trained", "memory"]


@dataclass(frozen=True)
class CaseTensor:
    """What the contract says of one tensor.

    Attributes:
        shape: Global shape.
        layout: How the ranks share it.
        role: 'given': the harness hands it to the subject.  The subject answers all others:
            'kept': the harness hands it over too, under the same name;
            'output': what is computed, whose layout is claimed with its values;
            'state': what the ranks hold beside it, such as parameters and what is captured;
            'gradient': what a backward leaves;
            'trained': what clipping and updates leave, and what the steps after the first compute;
            'memory': how much memory a rank holds.
        needs_grad: Of what is handed over: its requires_grad.
        is_contiguous: Of what is handed over: whether it is so in memory.
    """

    shape: tuple[int, ...]
    layout: Layout
    role: Role = "given"
    needs_grad: bool = False
    is_contiguous: bool = True

    @property
    def is_given(self) -> bool:
        """Whether the harness hands it over."""
        return self.role in ("given", "kept")

    @property
    def is_answered(self) -> bool:
        """Whether the subject answers it."""
        return self.role != "given"
