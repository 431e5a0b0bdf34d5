"""Defines operands that show how a backend sums, and how its device multiplies, sums and computes functions.

Letters: w is the number of ranks, N is NUMEL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from equivtest.cases.case import Case, replicated
from equivtest.cases.case_tensor import CaseTensor
from equivtest.cases.rules import Within
from equivtest.cases.values import draw
from equivtest.cases.values.integers import generator
from equivtest.layout import Layout, Shard
from equivtest.tensors import DTYPES

NUMEL = 2**12
"""Number of elements of a sum over the ranks.  So many roundings show a larger unit, or a lean to one side."""

CONTRACTED, SIDE = 256, 16
NUM_TOKENS, NUM_ROWS, WIDTHS = 512, 4, (3, 64)
"""Sizes of the embedding: NUM_TOKENS rows are added into a table of NUM_ROWS rows, once for each of WIDTHS."""

FUNCTIONS = ("exp", "erf", "tanh", "sigmoid", "sqrt", "rsqrt", "log")
NUM_TINY = 4


@dataclass(frozen=True, kw_only=True, repr=False)
class FingerprintCase(Case):
    """The case of a fingerprint: one all_reduce is called several times, and some local operations are computed.

    Attributes:
        num_calls: Number of times that the ranks call the all_reduce on the same operands.
    """

    VALUE_MODES: ClassVar[tuple[str, ...]] = ("real",)

    values: tuple[tuple[str, int], ...] = (("real", 0),)
    num_calls: Annotated[int, Within(1, 64)] = 8

    def describe_tensors(self) -> dict[str, CaseTensor]:
        """Each rank has its own row of `terms` and `tiny`.  The other operands are replicated."""
        own, whole = Layout((Shard(0),)), replicated()
        tensors = {
            "terms": CaseTensor((self.world_size, NUMEL), own),
            "tiny": CaseTensor((self.world_size, NUM_TINY), own),
            "left": CaseTensor((SIDE, CONTRACTED), whole),
            "right": CaseTensor((CONTRACTED, SIDE), whole),
            "points": CaseTensor((NUMEL,), whole),
            "ids": CaseTensor((NUM_TOKENS,), whole),
        }
        tensors |= {f"rows.{width}": CaseTensor((NUM_TOKENS, width), whole) for width in WIDTHS}
        tensors |= {
            "sums": CaseTensor((self.num_calls, NUMEL), whole, "state"),
            "tiny_sum": CaseTensor((NUM_TINY,), whole, "state"),
            "tiny_product": CaseTensor((NUM_TINY,), whole, "state"),
            "product": CaseTensor((SIDE, SIDE), whole, "state"),
            "elements": CaseTensor((2, NUMEL), whole, "state"),
        }
        tensors |= {name: CaseTensor((NUMEL,), whole, "state") for name in FUNCTIONS}
        return tensors | {f"table.{width}": CaseTensor((NUM_ROWS, width), whole, "state") for width in WIDTHS}


@draw.register
def draw_fingerprint(case: FingerprintCase, index: int) -> dict[str, torch.Tensor]:
    """Draws the operands of the fingerprint, all in the mode of values `real`.

    The elements of `terms` and `rows` lie between 1/2 and 2, so that nothing cancels in a sum.  The elements of `left`
    and `right` have both signs.  On rank 0, `tiny` has the smallest and the largest subnormal number with each sign.
    On all other ranks, `tiny` has zeros.  The elements of `points` lie between 2**-6 and 2**3, so that none of the
    fingerprint's functions has a subnormal value.
    """
    dtype, (mode, seed) = DTYPES[case.dtype], case.values[index]
    given = {}
    for name, tensor in case.tensors.items():
        if not tensor.is_given:
            continue
        source, shape = generator(mode, seed, name), tensor.shape
        if name == "ids":
            given[name] = torch.randint(NUM_ROWS, shape, generator=source, device="cpu")
        elif name == "tiny":
            given[name] = _tiny(shape, dtype)
        elif name in ("left", "right"):
            given[name] = torch.randn(shape, generator=source, dtype=torch.float64, device="cpu").to(dtype)
        else:
            least, most = (-6.0, 3.0) if name == "points" else (-1.0, 1.0)
            places = torch.rand(shape, generator=source, dtype=torch.float64, device="cpu")
            given[name] = torch.exp2(least + (most - least) * places).to(dtype)
    return given


def _tiny(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    finfo = torch.finfo(dtype)
    smallest = finfo.smallest_normal * finfo.eps
    largest = finfo.smallest_normal - smallest
    tiny = torch.zeros(shape, dtype=torch.float64, device="cpu")
    tiny[0] = torch.tensor([smallest, -smallest, largest, -largest], dtype=torch.float64)
    return tiny.to(dtype)
