"""Lists operators of linear algebra, with matrices for which every step of the operator's algorithm is exact.

Elimination of a bidiagonal matrix B with ones on its diagonal, or of `B.T @ B`, subtracts integers and divides integers
by one. A triangular matrix needs no Householder reflection, by the definition of xLARFG. A diagonal matrix of powers of
two has its diagonal as eigenvalues and their magnitudes as singular values. A product of reflections I - t v v' has
integers if t and v have integers.

Source: LAPACK 3.12, xPOTRF, xGETRF, xSYTRF, xLARFG, xGEEV and xGESDD, which torch calls on the CPU.
"""

from __future__ import annotations

import torch

from equivtest.cases.case import Shape
from equivtest.families.operators.case_forms import Form, Signature, Signatures, along, resized
from equivtest.families.operators.case_operator import (
    BIDIAGONAL,
    BITS,
    DIAGONAL,
    FLOATS,
    INDEX,
    SQUARES,
    Call,
    Operator,
    chooses,
)


def _square(shape: Shape) -> Shape:
    return (*shape[:-2], shape[-1], shape[-1])


def _alone(shape: Shape) -> Signatures:
    """Returns a signature with square matrices that are as wide as the last dim: (2, 4, 3) gives (2, 3, 3)."""
    return (Signature((_square(shape),)),)


def _beside_columns(shape: Shape) -> Signatures:
    """Returns signatures with square matrices and right-hand sides, of two columns and of as many as the matrices."""
    square = _square(shape)
    return (Signature((square, (*square[:-1], 2))), Signature((square, square)))


def _reflections(*, columns: bool = False) -> Form:
    """Operands are Householder vectors, their factors and, if `columns`, matrices that the reflections multiply."""

    def form(shape: Shape) -> Signatures:
        square = _square(shape)
        return (Signature((square, square[:-1], (*square[:-1], 2))[: 2 + columns]),)

    return form


def _exactly(name: str, call: Call, domain: str | tuple[str, ...], form: Form = _alone) -> Operator:
    """Returns an operator whose results must be exact. `domain` names the contents of one or several first operands."""
    domains = (domain,) if isinstance(domain, str) else domain
    return chooses(name, call, form, domains=domains, rounds=True, adds_cotangents=False, num_dims=(2, 3))


def _crossed(shape: Shape) -> Signatures:
    """Returns signatures with one dim of size 3, because torch's cache of rules ignores `dim` (finding 152)."""
    found = []
    for dim in range(-len(shape), len(shape)):
        sizes = tuple(3 if place == dim % len(shape) else 4 if size == 3 else size for place, size in enumerate(shape))
        found.append(Signature((sizes, sizes), (("dim", dim),)))
    return tuple(found)


def _reduced_rows(shape: Shape) -> Signatures:
    """Returns signatures of `index_reduce`, which reduces rows of the third operand into indexed rows of the first."""
    found = []
    for signature in along()(shape):
        dim = dict(signature.arguments)["dim"]
        assert isinstance(dim, int)
        for num in (2, 1):
            rows = resized(shape, dim, num)
            found += [
                Signature((shape, (num,), rows), (("dim", dim), ("reduce", how), *rest))
                for how, rest in (("amax", ()), ("amin", ()), ("amax", (("include_self", False),)))
            ]
    return tuple(found)


def _diagonals(shape: Shape) -> Signatures:
    """Returns signatures with a matrix and new values for its main diagonal, or for the diagonal above.

    A shape of three dims also has a signature with a diagonal of the first two.
    """
    found = []
    if len(shape) == 3:
        size = min(shape[:2])
        found.append(Signature((shape, (shape[2], size)), (("offset", 0), ("dim1", 0), ("dim2", 1))))
    for offset in (0, 1):
        size = min(shape[-2], shape[-1] - offset)
        if size > 0:
            found.append(Signature((shape[-2:], (size,)), (("offset", offset),)))
    return tuple(found)


_REMOVED = (_exactly("cholesky", torch.cholesky, SQUARES),) if hasattr(torch.ops.aten, "cholesky") else ()
"""Operators that torch 2.15.0 no longer has."""

ROWS = (
    *_REMOVED,
    _exactly("linalg.cholesky_ex", lambda x: torch.linalg.cholesky_ex(x)[0], SQUARES),
    _exactly("cholesky_inverse", lambda x: torch.cholesky_inverse(x, upper=True), BIDIAGONAL),
    _exactly("cholesky_solve", lambda a, b: torch.cholesky_solve(b, a, upper=True), BIDIAGONAL, _beside_columns),
    _exactly("geqrf", lambda x: torch.geqrf(x.detach()), BIDIAGONAL),
    _exactly(
        "linalg.householder_product",
        lambda a, tau: torch.linalg.householder_product(a.mT, tau),
        (BIDIAGONAL, BITS),
        _reflections(),
    ),
    _exactly("linalg.qr", torch.linalg.qr, BIDIAGONAL),
    _exactly("ormqr", lambda a, tau, b: torch.ormqr(a.mT, tau, b), (BIDIAGONAL, BITS), _reflections(columns=True)),
    _exactly("linalg.inv_ex", lambda x: torch.linalg.inv_ex(x)[0], BIDIAGONAL),
    _exactly("linalg.lu", torch.linalg.lu, BIDIAGONAL),
    _exactly("linalg.lu_factor_ex", lambda x: torch.linalg.lu_factor_ex(x)[0], BIDIAGONAL),
    _exactly(
        "linalg.lu_solve",
        lambda a, b: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), b),
        BIDIAGONAL,
        _beside_columns,
    ),
    _exactly("lu_unpack", lambda x: torch.lu_unpack(*torch.linalg.lu_factor(x)), BIDIAGONAL),
    _exactly("linalg.ldl_factor_ex", lambda x: torch.linalg.ldl_factor_ex(x.detach())[0], SQUARES),
    _exactly(
        "linalg.ldl_solve",
        lambda a, b: torch.linalg.ldl_solve(*torch.linalg.ldl_factor(a.detach()), b.detach()),
        SQUARES,
        _beside_columns,
    ),
    _exactly(
        "linalg.solve_triangular",
        lambda a, b: torch.linalg.solve_triangular(a, b, upper=True),
        BIDIAGONAL,
        _beside_columns,
    ),
    _exactly(  # ones stand for a diagonal that holds others
        "linalg.solve_triangular with ones",
        lambda a, b: torch.linalg.solve_triangular(a * 2, b, upper=True, unitriangular=True),
        BIDIAGONAL,
        _beside_columns,
    ),
    _exactly("triangular_solve", lambda a, b: torch.triangular_solve(b, a)[0], BIDIAGONAL, _beside_columns),
    _exactly("linalg.pinv", torch.linalg.pinv, DIAGONAL),
    _exactly("linalg.eig", lambda x: torch.linalg.eig(x)[0].real, DIAGONAL),
    Operator("linalg.cross", torch.linalg.cross, _crossed, num_dims=(1, 2, 3)),
    chooses(
        "index_reduce",
        lambda x, index, other, dim, reduce, **how: torch.index_reduce(x, dim, index, other, reduce, **how),
        _reduced_rows,
        kinds=(FLOATS, INDEX, FLOATS),
        adds_cotangents=False,  # equal largest elements divide the gradient
        num_dims=(1, 2, 3),
    ),
    chooses("diagonal_scatter", torch.diagonal_scatter, _diagonals, num_dims=(2, 3)),
)
