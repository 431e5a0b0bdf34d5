"""Lists calls that combine operators: gradients of gradients, complex numbers, sums of norms, results into tensors.

Each is one entry of the table, so that all its operands' placements are enumerated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from equivtest.cases.case import Shape
from equivtest.families.operators.case_forms import (
    Form,
    Signature,
    Signatures,
    alike,
    along,
    each,
    pairs,
    products,
    reduced,
)
from equivtest.families.operators.case_operator import (
    BOOLS,
    POSITIVE,
    Call,
    Operator,
    chooses,
    module_of_dtensor,
    rounded,
)


def _gradient_of(call: Call) -> Call:
    """Returns the gradients of half the sum of squares of the call's result, which have gradients themselves."""

    def gradients(*operands: torch.Tensor, **arguments: Any) -> tuple[torch.Tensor, ...]:
        leaves = [operand if operand.requires_grad else operand.detach().requires_grad_() for operand in operands]
        with torch.enable_grad():
            result = call(*leaves, **arguments)
            found = torch.autograd.grad((result * result).sum() / 2, leaves, create_graph=True)
        has_gradients = any(operand.requires_grad for operand in operands)
        return found if has_gradients else tuple(each.detach() for each in found)

    return gradients


def _second(name: str, call: Call, form: Form, **how: Any) -> Operator:
    return rounded(f"gradient of {name}", _gradient_of(call), form, **how)


def _elsewhere(x: torch.Tensor) -> torch.Tensor:
    """Returns x in other placements: sharded along dim 0, or replicated if it is so already or has no dims."""
    if (of_dtensors := module_of_dtensor(x)) is None:
        return x.clone()
    placed: Any = x
    rows = of_dtensors.Shard(0)
    placement = of_dtensors.Replicate() if rows in placed.placements or not x.dim() else rows
    moved: torch.Tensor = placed.redistribute(placements=[placement] * placed.device_mesh.ndim)
    return moved


def _complex_pairs(shape: Shape) -> Signatures:
    """The last dim of the operands has real and imaginary parts. One operand may broadcast to the other."""
    signatures = pairs()(shape)
    return tuple(Signature(tuple((*one, 2) for one in signature.shapes)) for signature in signatures)


def _product_of_complex(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(other))


def _product_with_conjugate(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    conjugate = _elsewhere(torch.view_as_complex(x).conj())  # a view that is not computed yet
    return torch.view_as_real(conjugate * torch.view_as_complex(other))


def _transform(name: str, *, of_pairs: bool, to_pairs: bool) -> Call:
    """Returns a Fourier transform of torch. The last dim of an operand or a result has real and imaginary parts."""
    call = getattr(torch.fft, name)

    def transformed(x: torch.Tensor, **arguments: Any) -> torch.Tensor:
        found: torch.Tensor = call(torch.view_as_complex(x) if of_pairs else x, **arguments)
        return torch.view_as_real(found) if to_pairs else found

    return transformed


def _dims_and_norms(*, of_pairs: bool, to_pairs: bool, several: bool) -> Form:
    """Returns a form with signatures of each dim and each normalization, and of more and fewer elements."""

    def form(shape: Shape) -> Signatures:
        operand = (*shape, 2) if of_pairs else shape
        last = len(shape) - 1
        dims: list[Any] = [(0, last), (last,)] if several else list(range(len(shape)))
        arguments = [(("dim", dim), ("norm", norm)) for dim in dims for norm in ("ortho", "forward", "backward")]
        if not several:  # a transform to real numbers has twice the elements that it is given, less two
            usual = {dim: shape[dim] if to_pairs else 2 * shape[dim] - 2 for dim in dims}
            arguments += [(("n", usual[dim] + step), ("dim", dim)) for dim in dims for step in (2, -1)]
        return tuple(Signature((operand,), each) for each in arguments)

    return form


def _sum_of_norms(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = torch.linalg.vector_norm(x) + torch.linalg.vector_norm(other)
    return total


def _into(call: Call) -> Call:
    """Returns the call with a copy of the last operand as `out=`, which may lie otherwise than the result."""

    def written(*operands: torch.Tensor, **arguments: Any) -> torch.Tensor:
        *given, out = (operand.detach() for operand in operands)
        copied = out.mul(1)
        call(*given, **arguments, out=copied)
        if copied.shape != out.shape:
            raise ValueError(f"out= had the shape {tuple(out.shape)} and was resized to {tuple(copied.shape)}")
        return copied

    return written


def _rows_and_result(shape: Shape) -> Signatures:
    """Returns signatures that reduce one dim, with a tensor of the result's shape as the last operand."""
    return tuple(Signature((shape, (*shape[:dim], *shape[dim + 1 :])), (("dim", dim),)) for dim in range(len(shape)))


def _operands_and_result(shape: Shape) -> Signatures:
    """Returns one signature of three operands of the shape. The last operand is the result."""
    return (Signature((shape, shape, shape), (("alpha", -2),)),)


def _zeroed_through_its_part(x: torch.Tensor) -> torch.Tensor:
    """Returns a copy of x whose local tensor, which `to_local` gives, is then set to zero."""
    copied = x.mul(1)
    with torch.no_grad():
        (copied if module_of_dtensor(copied) is None else copied.to_local()).zero_()  # type: ignore[attr-defined]
    return copied


def _kept_beside_a_write(x: torch.Tensor) -> torch.Tensor:
    """Returns a copy of x, after a write to that copy in other placements, which must not change it."""
    copied = x.mul(1)
    with torch.no_grad():
        _elsewhere(copied).neg_()
    return copied


TRANSFORMS = (
    ("fft", True, True), ("ifft", True, True), ("rfft", False, True), ("irfft", True, False), ("hfft", True, False),
    ("fftn", True, True), ("rfftn", False, True), ("irfftn", True, False),
)  # fmt: skip
"""Transforms of torch.fft, whether their operand is complex, and whether their result is complex."""

ROWS = (
    _second("tanh", torch.tanh, each()),
    _second("exp", torch.exp, each()),
    _second("softmax", torch.softmax, along()),
    _second("sum", torch.sum, reduced(several=False)),
    _second("mul", torch.mul, pairs()),
    _second("div", torch.div, pairs(), domain=POSITIVE),
    _second("mm", torch.mm, products("mk", "kn"), num_dims=(2,)),
    _second("silu", functional.silu, each()),
    rounded("mul of complex numbers", _product_of_complex, _complex_pairs, num_dims=(1, 2)),
    rounded("mul of a conjugate", _product_with_conjugate, _complex_pairs, num_dims=(1, 2)),
    *(
        rounded(
            f"fft.{name} {'of' if of_pairs else 'to'} complex numbers",
            _transform(name, of_pairs=of_pairs, to_pairs=to_pairs),
            _dims_and_norms(of_pairs=of_pairs, to_pairs=to_pairs, several=name.endswith("n")),
            num_dims=(2,),
        )
        for name, of_pairs, to_pairs in TRANSFORMS
    ),
    chooses(
        "any to whole numbers",
        lambda x, **how: torch.any(x, **how).int(),
        reduced(several=False, all_dims=False),
        kinds=(BOOLS,),
    ),
    rounded("sum of norms", _sum_of_norms, alike(), num_dims=(2,)),
    *(
        rounded(f"{name} into a tensor", _into(getattr(torch, name)), _rows_and_result, num_dims=(2,))
        for name in ("sum", "mean", "amax")
    ),
    Operator("add into a tensor", _into(torch.add), _operands_and_result, num_dims=(2,)),
    chooses("to_local and write", _zeroed_through_its_part, each(), num_dims=(2,)),
    _second("redistribute", _elsewhere, each(), num_dims=(1, 2)),
    chooses("redistribute and write", _kept_beside_a_write, each(), num_dims=(1, 2)),
)
