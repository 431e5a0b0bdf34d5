"""Defines `DifferentiableCase`: calls of collectives that have a backward.

The operand of each rank consists of one part for each rank. A part is a tensor, and all parts have the same number of
elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from equivtest.base import limits
from equivtest.cases.case import Case, require
from equivtest.cases.case_tensor import CaseTensor
from equivtest.cases.rules import Within
from equivtest.layout import Layout, Shard


@dataclass(frozen=True)
class Call:
    """One collective that a case calls.

    Some collectives take all parts of a rank's operand, and others take only the first part.

    Attributes:
        function: Name of the called function. 'nn_NAME' is the function NAME in torch.distributed.nn.functional. Any
            other name is a functional collective.
        result: Kind of the result. 'reduced' is the sum of the first parts. 'parts' is the sum of all parts, one part
            for each rank. 'copied' is the root's first part, on every rank. 'gathered' has the first parts of all
            ranks. 'scattered' is one part of the root for each rank. 'exchanged' has one part from each rank. 'uneven'
            has the first elements of a part from each rank. `DifferentiableCase.split` says how many elements.
        is_rooted: Whether one rank is the root. If so, the collective is called once with each rank as the root.
        op: 'sum' or 'avg', for collectives that reduce.
    """

    function: str
    result: str
    is_rooted: bool = False
    op: str = "sum"

    @property
    def name(self) -> str:
        return self.function if self.op == "sum" else f"{self.function}_{self.op}"


OF_WORLD = {
    call.name: call
    for call in (
        Call("nn_broadcast", "copied", is_rooted=True),
        Call("nn_gather", "gathered", is_rooted=True),
        Call("nn_scatter", "scattered", is_rooted=True),
        Call("nn_all_gather", "gathered"),
        Call("nn_all_to_all", "exchanged"),
    )
}
"""Calls that torch 2.13.0 gets wrong if a rank's number in its group differs from its number in the world."""

OF_AVERAGES = {
    call.name: call
    for call in (
        Call("nn_reduce", "reduced", is_rooted=True, op="avg"),
        Call("nn_reduce_scatter", "parts", op="avg"),
    )
}
"""Calls whose backward torch 2.13.0 gets wrong."""

EVERYWHERE = {
    call.name: call
    for call in (
        Call("nn_reduce", "reduced", is_rooted=True),
        Call("nn_all_reduce", "reduced"),
        Call("nn_all_reduce", "reduced", op="avg"),
        Call("nn_reduce_scatter", "parts"),
        Call("nn_all_to_all_single", "exchanged"),
        Call("nn_all_to_all_single_uneven", "uneven"),
        Call("all_gather_single_autograd", "gathered"),
        Call("reduce_scatter_single_autograd", "parts"),
        Call("all_to_all_single_autograd", "uneven"),
        Call("all_reduce", "reduced"),
        Call("all_gather_single", "gathered"),
        Call("all_gather_tensor_autograd", "gathered"),
        Call("reduce_scatter_single", "parts"),
        Call("reduce_scatter_tensor_autograd", "parts"),
        Call("all_to_all_single", "exchanged"),
        Call("all_to_all_single_uneven", "uneven"),
        Call("all_reduce_coalesced", "reduced"),
        Call("all_gather_single_coalesced", "gathered"),
        Call("reduce_scatter_single_coalesced", "parts"),
    )
}

CALLS = {**EVERYWHERE, **OF_WORLD, **OF_AVERAGES}
"""Every collective by the name of its output."""


@dataclass(frozen=True, kw_only=True, repr=False)
class DifferentiableCase(Case):
    """Describes some collectives, called one after the other, forward and backward.

    Attributes:
        collectives: Names of collectives, keys of CALLS, such as 'nn_all_reduce'.
        numel: Number of elements of each part of an operand.
    """

    collectives: tuple[str, ...] = ("nn_all_reduce",)
    numel: Annotated[int, Within(0, limits.MAX_NUMEL)] = 1

    def check_fields(self) -> None:
        unknown = [name for name in self.collectives if name not in CALLS]
        require(not unknown, f"collectives must be some of {', '.join(CALLS)}, got {', '.join(map(repr, unknown))}")
        num = len(self.collectives)
        require(num == len(set(self.collectives)) > 0, f"collectives must be different ones, got {self.collectives}")
        averages = [call.name for call in self.calls if call.op == "avg"]
        is_exact = self.world_size & (self.world_size - 1) == 0
        require(is_exact or not averages, f"{', '.join(averages)} rounds unless world_size is a power of two")

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(CALLS[name] for name in self.collectives)

    def split(self, source: int, target: int) -> int:
        """Returns how many elements `source` sends to `target` in an uneven exchange: all of a part, half or none."""
        return (self.numel, 0, -(-self.numel // 2))[(2 * source + target + self.numel) % 3]

    def describe_tensors(self) -> dict[str, CaseTensor]:
        """Describes each tensor. Each has the dims (rank, root, part, element), with other values for each root."""
        ranks, own = self.world_size, Layout((Shard(0),))
        shapes = {call.name: (ranks, ranks if call.is_rooted else 1, ranks, self.numel) for call in self.calls}
        tensors = {name: CaseTensor((ranks, ranks, ranks, self.numel), own) for name in ("x", "cotangent")}
        tensors |= {name: CaseTensor(shape, own, "output") for name, shape in shapes.items()}
        return tensors | {f"grad.{name}": CaseTensor(shape, own, "gradient") for name, shape in shapes.items()}
