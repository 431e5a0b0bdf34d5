"""Rules of factorizations and inverses, for matrices on which LAPACK rounds nothing: see `equivtest.oracle.running`.

Derived here. The sign ' is the transpose. Let U be an upper triangular matrix of -1, 0 and 1, with ones on its
diagonal. Let M = (2 I - |U|)^-1, which is the sum of the powers of |U| - I. Elimination of U finds each pivot in its
place, and only zeros below the pivot. Elimination of U' divides by ones. Householder's vectors of U are zero. All
further steps add whole numbers of limited magnitude. The limit is M in a substitution, M M' in the product of the
inverse with its transpose, and 2 |U|'|U| in Cholesky's algorithm for U'U. If the dtype can represent whole numbers up
to this limit, no step rounds, in any order.

If the diagonal of a diagonal matrix has distinct powers of two, the magnitudes of these powers are the singular values.
So no step rounds when LAPACK computes the singular values.

Source: LAPACK 3.12, xGETRF, xGETRS, xTRTRI, xLARFG, xPOTRF, xPOTRI and xGESDD, which torch calls on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from equivtest.oracle.exact import InexactData
from equivtest.oracle.ranged import Parts
from equivtest.oracle.running_roundings import chosen

LARGEST_POWER = 2.0**10
_OF_TRIANGLES = ("cholesky_inverse", "linalg_inv_ex", "linalg_lu", "linalg_lu_factor_ex", "linalg_qr")


def _is_simple(matrices: torch.Tensor, dtype: torch.dtype) -> bool:
    """True if each matrix has the form of U in the module's docstring, with sums that the dtype can represent."""
    if matrices.shape[-1] != matrices.shape[-2]:
        return False
    ones = torch.eye(matrices.shape[-1], dtype=torch.float64)
    sizes = matrices.abs()
    is_unit = torch.equal(matrices.triu(), matrices) and bool((sizes.diagonal(dim1=-2, dim2=-1) == 1).all())
    if not is_unit or not bool(((sizes == 0) | (sizes == 1)).all()) or bool((matrices * ones < 0).any()):
        return False
    powers = torch.linalg.solve_triangular(2 * ones - sizes, ones.expand(sizes.shape), upper=True, unitriangular=True)
    return float((powers @ powers.mT).sum()) < 1 / torch.finfo(dtype).eps


def _has_simple_root(matrices: torch.Tensor, dtype: torch.dtype) -> bool:
    roots, failed = torch.linalg.cholesky_ex(matrices, upper=True)
    return not bool(failed.any()) and torch.equal(roots.mT @ roots, matrices) and _is_simple(roots, dtype)


def _is_diagonal(matrices: torch.Tensor, dtype: torch.dtype) -> bool:
    """True if each matrix is diagonal, with distinct powers of two whose inverses the dtype can represent."""
    sizes = matrices.diagonal(dim1=-2, dim2=-1).abs()
    if not torch.equal(torch.diag_embed(sizes), matrices.abs()) or not bool((torch.frexp(sizes)[0] == 0.5).all()):
        return False
    ordered = sizes.sort(-1).values
    is_near = bool(((sizes <= LARGEST_POWER) & (sizes >= 1 / LARGEST_POWER)).all())
    return is_near and bool((ordered[..., 1:] > ordered[..., :-1]).all())


def _exactly(name: str, is_exact: Callable[[torch.Tensor, torch.dtype], bool]) -> Callable[..., Any]:
    """Makes the rule of the operator `name`.

    The rule is a function (matrices, other arguments) -> results without an error. It raises InexactData if the
    matrices have an error, or if `is_exact` is False for the matrices.

    A call of the rule looks the operator up by name, because torch 2.15 has no `cholesky`.
    """

    def rule(matrices: torch.Tensor, *how: Any, **named: Any) -> Any:
        a = Parts.of(matrices)
        if bool(a.error.any()) or not is_exact(a.value.double(), a.value.dtype):
            raise InexactData(f"no bound is known for {name}, except on matrices for which no step of it rounds")
        factors = getattr(torch.ops.aten, name)(a.value, *how, **named)
        return _as_it_is(factors) if isinstance(factors, torch.Tensor) else tuple(map(_as_it_is, factors))

    return rule


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """Wraps a floating-point tensor as `Ranged`, with an error of 0. Returns any other tensor unchanged."""
    return Parts.of(tensor).wrapped() if tensor.is_floating_point() else tensor


def unpacked(factors: torch.Tensor, pivots: torch.Tensor, *which: bool) -> tuple[torch.Tensor, ...]:
    """Returns the permutation, the lower factor and the upper factor of square matrices, like `torch.lu_unpack`."""
    a = Parts.of(factors)
    order, lower, upper = torch.lu_unpack(a.value, pivots, *which)
    if not lower.numel() == upper.numel() == a.value.numel():
        raise InexactData("no bound is known for lu_unpack, except for both factors of square matrices")
    off = (torch.zeros_like(order, dtype=torch.float64), a.error.tril(-1), a.error.triu())
    return tuple(chosen(value, error).wrapped() for value, error in zip((order, lower, upper), off, strict=True))


FACTORED: dict[str, Callable[..., Any]] = {
    **{name: _exactly(name, _is_simple) for name in _OF_TRIANGLES},
    **{name: _exactly(name, _has_simple_root) for name in ("cholesky", "linalg_cholesky_ex")},
    "linalg_pinv": _exactly("linalg_pinv", _is_diagonal),
    "lu_unpack": unpacked,
}
"""Operator -> rule, which takes the operator's own arguments."""
