"""Parameters partitioned by ZeRO-3 and fetched together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from equivtest.kit.case import Case, Refused, Shape, replicated, require
from equivtest.layout import Flat, Layout

PADDINGS = ("nan", "large")
FETCH_MODES = ("dense", "index", "wide", "special", "every-bit-pattern")
FETCH_COLLECTIVES = ("", "all_gather", "all_reduce")


@dataclass(frozen=True, kw_only=True, repr=False)
class FetchCase(Case):
    """Some parameters, each partitioned over the ranks, all made whole by one fetch.

    Attributes:
        parameters: Shape of each parameter; 0-dim and zero-numel ones count too.
        padding: What padding holds: 'nan' or a 'large' finite number.  ZeRO leaves it
            uninitialised, so no answer may depend on it.
        contiguous: Whether the harness hands parameters over contiguous in memory.
        requires_grad: requires_grad of each parameter.
        collective: What the fetch is documented to use, one of FETCH_COLLECTIVES; '' where nobody
            says, which a recorded case must.
    """

    VALUE_MODES: ClassVar[tuple[str, ...]] = FETCH_MODES

    parameters: tuple[Shape, ...] = ((1,),)
    padding: str = "nan"
    contiguous: bool = True
    requires_grad: tuple[bool, ...] = (True,)
    collective: str = ""

    def __post_init__(self) -> None:
        require(self.padding in PADDINGS, f"padding must be one of {', '.join(PADDINGS)}, got {self.padding!r}")
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
            self.collective in FETCH_COLLECTIVES,
            f"collective must be one of {', '.join(map(repr, FETCH_COLLECTIVES))}, got {self.collective!r}",
        )
        require(
            bool(self.collective) or not self.records,
            "a recorded fetch is judged by its collective: say collective='all_gather' or collective='all_reduce'",
        )
        super().__post_init__()

    @property
    def num_parameters(self) -> int:
        """How many parameters are fetched together."""
        return len(self.parameters)

    @property
    def smallest_numel(self) -> int:
        """Elements of the smallest parameter."""
        return min(math.prod(shape) for shape in self.parameters)

    @property
    def fewest_dims(self) -> int:
        """Dims of the parameter with the fewest."""
        return min(len(shape) for shape in self.parameters)

    @property
    def has_strided_rows(self) -> bool:
        """Whether some parameter is handed over with gaps between the elements of its last dim."""
        return not self.contiguous and any(
            len(shape) == 1 or (math.prod(shape) > 0 and min(shape[-2:], default=0) > 1) for shape in self.parameters
        )

    def padded_numel(self, shape: Shape) -> int:
        """Elements of a parameter of `shape` once padded to a multiple of the world size."""
        return -(-math.prod(shape) // self.world_size) * self.world_size

    def shapes(self) -> dict[str, Shape]:
        return {
            f"{prefix}.{index}": shape
            for prefix in ("param", "partition")
            for index, shape in enumerate(self.parameters)
        }

    def layouts(self) -> dict[str, Layout]:
        layouts = {f"param.{index}": replicated() for index in range(len(self.parameters))}
        for index, shape in enumerate(self.parameters):
            layouts[f"partition.{index}"] = Layout((Flat(self.padded_numel(shape)),))
        return layouts

    def given_names(self) -> tuple[str, ...]:
        return tuple(f"param.{index}" for index in range(len(self.parameters)))

    def answer_names(self) -> tuple[str, ...]:
        return tuple(self.shapes())

    def given_flags(self) -> dict[str, bool]:
        return dict(zip(self.given_names(), self.requires_grad, strict=True))

    def is_contiguous(self, name: str) -> bool:
        return self.contiguous


@dataclass(frozen=True, kw_only=True, repr=False)
class RefusedFetchCase(Refused, FetchCase):
    """A fetch outside the contract: every rank must refuse alike, before any collective.

    Attributes:
        misfit: 'dtype': the last parameter has another dtype than the flat buffer;
            'in_flight': the parameters are fetched a second time before the first fetch ended.
    """

    misfit: str = "dtype"

    def __post_init__(self) -> None:
        require(self.misfit in ("dtype", "in_flight"), f"misfit must be dtype or in_flight, got {self.misfit!r}")
        require(self.misfit != "dtype" or len(self.parameters) > 1, "misfit dtype needs at least two parameters")
        super().__post_init__()

    @property
    def refusal(self) -> str:
        return f"parameters cannot be fetched together: {self.misfit}"
