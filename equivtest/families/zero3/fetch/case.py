"""Defines `FetchCase`: parameters that ZeRO-3 partitions, and fetches together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from equivtest.cases.case import Case, Refused, Shape, replicated, require
from equivtest.cases.case_tensor import CaseTensor
from equivtest.cases.rules import OneOf
from equivtest.layout import Flat, Layout

PADDINGS = ("nan", "large")
FETCH_MODES = ("dense", "index", "wide", "special", "every-bit-pattern")
FETCH_COLLECTIVES = ("", "all_gather", "all_reduce")


@dataclass(frozen=True, kw_only=True, repr=False)
class FetchCase(Case):
    """Describes some parameters that are partitioned over the ranks and made whole by one fetch.

    Attributes:
        parameters: Shape of each parameter. Parameters may be 0-dim and may have no elements.
        padding: Fill value of padding: 'nan', or 'large' for a large finite number. ZeRO leaves padding uninitialised,
            so no answer may depend on it.
        contiguous: Whether the harness passes parameters contiguous in memory.
        requires_grad: Whether each parameter requires a gradient, in order.
        collective: The documented collective of the fetch, one of FETCH_COLLECTIVES; '' if no collective is documented.
            A case that records collectives must name a collective.
    """

    VALUE_MODES: ClassVar[tuple[str, ...]] = FETCH_MODES

    parameters: tuple[Shape, ...] = ((1,),)
    padding: Annotated[str, OneOf(PADDINGS)] = "nan"
    contiguous: bool = True
    requires_grad: tuple[bool, ...] = (True,)
    collective: Annotated[str, OneOf(FETCH_COLLECTIVES)] = ""

    def check_fields(self) -> None:
        require(len(self.parameters) >= 1, "parameters must hold at least one shape")
        require(
            len(self.requires_grad) == len(self.parameters),
            f"requires_grad must have one flag per parameter: {len(self.parameters)}, got {len(self.requires_grad)}",
        )
        require(
            all(size >= 0 for shape in self.parameters for size in shape),
            f"sizes must be at least 0, got {self.parameters}",
        )
        require(
            self.dtype in ("float16", "bfloat16") or "every-bit-pattern" not in dict(self.values),
            f"mode every-bit-pattern is for float16 and bfloat16, got dtype {self.dtype!r}: use mode special",
        )
        require(
            bool(self.collective) or not self.records,
            "a recorded fetch needs its documented collective: set collective='all_gather' or collective='all_reduce'",
        )

    @property
    def num_parameters(self) -> int:
        return len(self.parameters)

    def padded_numel(self, shape: Shape) -> int:
        return -(-math.prod(shape) // self.world_size) * self.world_size

    def describe_tensors(self) -> dict[str, CaseTensor]:
        needs_grad, are_contiguous = self.requires_grad, self.contiguous
        wholes = {
            f"param.{index}": CaseTensor(shape, replicated(), "kept", needs_grad[index], are_contiguous)
            for index, shape in enumerate(self.parameters)
        }
        return wholes | {
            f"partition.{index}": CaseTensor(shape, Layout((Flat(self.padded_numel(shape)),)), "state")
            for index, shape in enumerate(self.parameters)
        }


@dataclass(frozen=True, kw_only=True, repr=False)
class RefusedFetchCase(Refused, FetchCase):
    """Describes a fetch outside the contract. Every rank must refuse it with the same error, before any collective.

    Attributes:
        misfit: The reason for the refusal. If 'dtype', the last parameter has another dtype than the flat buffer. If
            'in_flight', the parameters are fetched a second time before the first fetch ended.
    """

    misfit: Annotated[str, OneOf(("dtype", "in_flight"))] = "dtype"

    def check_fields(self) -> None:
        super().check_fields()
        require(self.misfit != "dtype" or len(self.parameters) > 1, "misfit dtype needs at least two parameters")

    @property
    def refusal(self) -> str:
        return f"parameters cannot be fetched together: {self.misfit}"
