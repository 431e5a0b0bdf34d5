"""Branches on one x, one for each option of a parallel module."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.nn import functional

NAMES = (
    "together",
    "kept",
    "resharded",
    "resharded_to_two",
    "by_columns",
    "by_columns_of_a_mesh",
    "in_float64",
    "inputs_not_cast",
    "offloaded",
    "ignored",
    "unsharded_before",
    "resharded_by_hand",
    "told_to_reshard",
    "prefetched",
    "by_own_collectives",
    "divided_by_a_hook",
    "divided_by_the_old_name",
    "unused_on_some_ranks",
    "two_buffers",
    "in_a_group_of_its_own",
    "not_unsharded_in_backward",
    "in_memory_of_the_group",
    "last_backward",
    "synchronized_again",
    "after_a_failure",
    "by_another_method",
    "with_one_context",
)


class Branch(nn.Module):
    """y = W2 relu(W1 x) + b.  1, 2, 3 and 4 ranks divide W1's rows and W2's columns."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(2, 12, bias=False)
        self.down = nn.Linear(12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.computed(x)

    def computed(self, x: torch.Tensor) -> torch.Tensor:
        """The same by another name."""
        output: torch.Tensor = self.down(functional.relu(self.up(x)))
        return output


class Sometimes(Branch):
    """Uses W1 only for an odd number of rows."""

    def computed(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x) if x.shape[0] % 2 else x.repeat(1, 6)
        output: torch.Tensor = self.down(hidden)
        return output


class Shift(nn.Module):
    """y = x + b, whose backward needs no b."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


class Shifted(Branch):
    """Computes x + b."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = Shift()

    def computed(self, x: torch.Tensor) -> torch.Tensor:
        return super().computed(self.shift(x))


OF_ANOTHER_KIND = {"unused_on_some_ranks": Sometimes, "not_unsharded_in_backward": Shifted}


class Branches(nn.Module):
    """Every branch on the same x."""

    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            self.add_module(name, OF_ANOTHER_KIND.get(name, Branch)())
        cast("Branch", self.ignored).down.bias.requires_grad = False

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: branch(x) for name, branch in self.named_children()}


def branches() -> nn.Module:
    return Branches()
