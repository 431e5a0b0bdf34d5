"""Computes the right answers of a perceptron under FSDP2 with mixed precision, which has casts.

Letters: P is param_dtype, R the dtype of reductions, O the dtype of the layers' outputs. Parameters are float32.

A cast has one right value, because it rounds to nearest, or widens. So the operands of a layer follow from the ranks'
values: x, the cotangent, the parameters and the gradient of in_proj's output, each rounded to P. A layer's product is
stored in P and then widened to O. The activation is computed and stored in O, and then rounded to P. Gradients are
stored in P, per micro-batch. After a cast to R they are added, divided and reduced in R; the final cast to float32
rounds nothing. Clipping and the updates use float32.

Source: torch/distributed/fsdp/_fully_shard: _fsdp_state.py, _pre_forward and _post_forward, for inputs and
outputs; _fsdp_param.py, init_dtype_attrs and to_accumulated_grad_if_needed; _fsdp_collectives.py,
foreach_reduce (2.13.0).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from equivtest.families.training.mixed.case import MixedCase
from equivtest.families.training.oracle import Reference, expect_by
from equivtest.oracle import expect, expect_held
from equivtest.oracle.averages import Averages
from equivtest.oracle.expected import Expected
from equivtest.oracle.held import Held
from equivtest.oracle.operations import Found, Operations
from equivtest.oracle.rounding import Operand, store
from equivtest.tensors import DTYPES


@expect.register
@expect_held.register
def expect_mixed(case: MixedCase, index: int, held: Held | None = None) -> Expected:
    return expect_by(MixedReference, case, index, held)


@dataclass(frozen=True)
class PartedOperations(Operations):
    """Computes operations on a batch of equal parts. Each part may be exact in a different unit, a power of two."""

    num_parts: int = 1

    def product(
        self, left: torch.Tensor, right: torch.Tensor, *, plus: torch.Tensor | None = None, split: str = ""
    ) -> Found:
        """Returns left @ right + plus, and proves each of `num_parts` blocks of rows of `left` exact separately."""
        multiply = super().product
        found = [multiply(part, right, plus=plus, split=split) for part in left.chunk(self.num_parts)]
        inexact = [each for each in found if each.allowed is not None]
        errors = [torch.zeros_like(each.value) if each.allowed is None else each.allowed for each in found]
        return Found(
            torch.cat([each.value for each in found]),
            torch.cat(errors) if inexact else None,
            (inexact or found)[0].derivation,
            max(each.bits_used for each in found),
        )


class MixedReference(Reference):
    """Computes the unsharded module with the casts that FSDP2's policy prescribes."""

    case: MixedCase

    def run_step(self, step: int, operations: Operations, parameters: dict[str, torch.Tensor]) -> dict[str, Operand]:
        taken = {name: self.taken(parameter) for name, parameter in parameters.items()}
        parted = PartedOperations(
            self.case.param_dtype,
            operations.ranks,
            operations.must_be_exact,
            operations.may_be_exact,
            num_parts=self.case.num_sums,
        )
        return super().run_step(step, parted, taken)

    def taken(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(DTYPES[self.case.param_dtype]).double()

    def sums(self, operations: Operations) -> Averages:
        return Averages(operations, self.case.num_averaged, self.case.micro_batches, self.case.reduced_dtype)

    def activation(self, operations: Operations, before: torch.Tensor) -> Found:
        """Computes the activation in the dtype of the layers' outputs, and rounds it to `param_dtype`."""
        found = super().activation(replace(operations, dtype=self.case.activation_dtype), before)
        if self.case.activation_dtype == operations.dtype:
            return found
        if found.allowed is None:
            return replace(found, value=self.taken(found.value))
        allowed = store(found.value, found.allowed, operations.arithmetic)
        return replace(found, allowed=allowed, derivation=f"{found.derivation}, and 1 of {operations.dtype}")

    def activation_grad(self, operations: Operations, before: torch.Tensor, cotangent: torch.Tensor) -> Found:
        return super().activation_grad(replace(operations, dtype=self.case.activation_dtype), before, cotangent)
