"""Defines `MixedCase`: a perceptron under FSDP2 with separate dtypes for storage, computation and reduction."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated

from equivtest.cases.case import require
from equivtest.cases.rules import OneOf
from equivtest.families.training.case import base_of
from equivtest.families.training.data_parallel.case import DataParallelCase
from equivtest.tensors import SIGNIFICAND_BITS

NARROW = ("bfloat16", "float16")


@dataclass(frozen=True, kw_only=True, repr=False)
class MixedCase(DataParallelCase):
    """Describes a data-parallel case of style fsdp2. Parameters are float32, and computations have narrower dtypes.

    Sharded, clipped and updated tensors are float32. A layer takes and multiplies tensors of `param_dtype`. The
    activation gets its input, and gives its gradient, in `output_dtype`. Gradients of parameters are added up over
    micro-batches and reduced over ranks in `reduce_dtype`.

    Attributes:
        param_dtype: 'bfloat16' or 'float16' (NARROW).
        reduce_dtype: 'float32', 'bfloat16' or 'float16'. If '', this is param_dtype.
        output_dtype: 'float32' or param_dtype. If '', this is param_dtype.
        casts_inputs: Whether FSDP2 casts inputs to param_dtype. If not, x and the outputs have param_dtype already.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_api.py, MixedPrecisionPolicy (2.13.0).
    """

    style: str = "fsdp2"
    param_dtype: Annotated[str, OneOf(NARROW)] = "bfloat16"
    reduce_dtype: Annotated[str, OneOf(("", "float32", *NARROW))] = ""
    output_dtype: Annotated[str, OneOf(("", "float32", *NARROW))] = ""
    casts_inputs: bool = True

    def check_fields(self) -> None:
        super().check_fields()
        require(self.style == "fsdp2", f"mixed precision requires style fsdp2, got {self.style!r}")
        require(self.dtype == "float32", f"parameters of mixed precision must be float32, got {self.dtype!r}")
        require(
            not self.tied,
            f"torch documents no dtype for the sum of a tied weight's two gradients: omit tied, got {self.tied!r}",
        )
        require(
            self.output_dtype in ("", "float32", self.param_dtype),
            f"output_dtype must be float32 or param_dtype, {self.param_dtype}, got {self.output_dtype!r}",
        )
        require(
            self.casts_inputs or self.activation_dtype == self.param_dtype,
            f"casts_inputs=False passes {self.output_dtype} to a layer of {self.param_dtype}: omit output_dtype",
        )

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.dtype, self.param_dtype, self.reduced_dtype, self.activation_dtype)))

    def is_within(self, dtypes: Collection[str]) -> bool:
        """A run without a dtype of NARROW may draw cases with any dtype of NARROW."""
        others = () if set(NARROW) & set(dtypes) else NARROW
        return super().is_within((*dtypes, *others))

    @property
    def reduced_dtype(self) -> str:
        return self.reduce_dtype or self.param_dtype

    @property
    def dtypes_sent(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.dtype, self.param_dtype, self.reduced_dtype)))

    @property
    def activation_dtype(self) -> str:
        return self.output_dtype or self.param_dtype

    @property
    def narrowest(self) -> str:
        return min(self.param_dtype, self.reduced_dtype, key=SIGNIFICAND_BITS.__getitem__)

    @property
    def num_sums(self) -> int:
        return self.num_averaged * self.micro_batches if self.reduced_dtype == "float32" else 1

    def dtype_of(self, name: str) -> str:
        base = base_of(name)
        if base in ("x", "grad.x"):
            return self.dtype if self.casts_inputs else self.param_dtype
        if base in ("capture.in_proj.input", "capture.out_proj.input", "grad.out_proj.input"):
            return self.param_dtype
        if base in ("capture.in_proj.output", "grad.in_proj.output", "output", "cotangent"):
            return self.activation_dtype
        return self.dtype
