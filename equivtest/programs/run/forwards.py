"""Records the tensors within a module in a step that runs the module once for each micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from equivtest.cases.subject import copied
from equivtest.programs.boundaries import Capture, answers_of


class CapturedForwards(Capture):
    """Keeps this rank's tensors of several forwards and their backwards.

    Each forward runs on different rows of the batch.

    A forward without gradients, such as one that warms up, belongs to no micro-batch.
    """

    def __init__(self, module: nn.Module, num_forwards: int) -> None:
        super().__init__(module, _local_copy)
        self._num_forwards = num_forwards
        self._forwards: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._hooks.append(module.register_forward_pre_hook(self._begin))

    def named(self) -> dict[str, Any]:
        """Returns name -> tensor that joins the rows of all forwards. Tensors without rows are left out.

        If the module did not run exactly once for each micro-batch, the result is empty.
        """
        if len(self._forwards) != self._num_forwards:
            return {}
        forwards = [answers_of(*each) for each in self._forwards]
        stacks = {name: [each[name] for each in forwards if name in each] for name in forwards[0]}
        return {name: torch.cat(stack) for name, stack in stacks.items() if self._are_rows(stack)}

    def _are_rows(self, stack: Sequence[torch.Tensor]) -> bool:
        shapes = {each.shape[1:] if each.dim() else None for each in stack}
        return len(stack) == self._num_forwards and len(shapes) == 1 and None not in shapes

    def _begin(self, *_: object) -> None:
        if not self.is_again:
            self.begin_again()
            self.values, self.gradients = {}, {}
            if torch.is_grad_enabled():
                self._forwards.append((self.values, self.gradients))


def _local_copy(tensor: torch.Tensor) -> torch.Tensor:
    return copied(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
