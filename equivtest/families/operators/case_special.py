"""Lists special functions, and other elementwise operators of torch's own list."""

from __future__ import annotations

import torch

from equivtest.cases.case import Shape
from equivtest.families.operators.case_arguments import reshapes
from equivtest.families.operators.case_forms import Signature, Signatures, alike, each, either, moved, numbers, pairs
from equivtest.families.operators.case_operator import (
    ABOVE,
    ANY,
    BITS,
    BOOLS,
    FLOATS,
    FRACTION,
    HALVES,
    POSITIVE,
    SIGNS,
    WHOLE,
    Call,
    chooses,
    rounded,
)

_OF_ONE: tuple[tuple[str, Call, str], ...] = (
    ("acosh", torch.acosh, ABOVE), ("i0", torch.i0, ANY), ("special.i0e", torch.special.i0e, ANY),
    ("special.i1", torch.special.i1, ANY), ("special.i1e", torch.special.i1e, ANY),
    ("special.entr", torch.special.entr, POSITIVE), ("special.erfcx", torch.special.erfcx, ANY),
    ("special.log_ndtr", torch.special.log_ndtr, ANY), ("special.ndtri", torch.special.ndtri, FRACTION),
)  # fmt: skip


def _complex(shape: Shape) -> Signatures:
    """The last dim of the operand (*shape, 2) has real and imaginary parts."""
    return (Signature(((*shape, 2),)),)


def _equal(x: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Calls `torch.equal` on x and a copy of x, and on x and `other`. Returns each result as the number 0 or 1."""
    return tuple(x.new_full((1, 1), float(torch.equal(x, one))) for one in (x.mul(1), other))


ROWS = (
    *(rounded(name, call, domain=domain) for name, call, domain in _OF_ONE),
    rounded("logit", torch.logit, either(each(), each(eps=0.375)), domain=FRACTION),
    rounded("special.xlog1py", torch.special.xlog1py, pairs(), domain=POSITIVE),
    rounded("special.zeta", lambda x, q: torch.special.zeta(x.detach(), q), pairs(), domain=ABOVE),
    rounded("polygamma", lambda x, n: torch.polygamma(n, x), numbers("n", 1, 2, 0), domain=POSITIVE),
    rounded("mvlgamma", torch.mvlgamma, numbers("p", 1, 2), domain=ABOVE),
    rounded("igamma", lambda a, x: torch.igamma(a.detach(), x), pairs(), domain=POSITIVE),
    rounded("igammac", lambda a, x: torch.igammac(a.detach(), x), pairs(), domain=POSITIVE),
    rounded("logaddexp2", torch.logaddexp2, pairs()),
    chooses("heaviside", lambda x, values: torch.heaviside(x.detach(), values.detach()), pairs()),
    chooses("nextafter", torch.nextafter, pairs(), rounds=True),
    chooses("ldexp", torch.ldexp, pairs(), kinds=(FLOATS, WHOLE), adds_cotangents=False, rounds=True),
    chooses("frexp", lambda x: (torch.frexp(x)[0], torch.frexp(x)[1].long()), adds_cotangents=False, rounds=True),
    chooses(
        "div to whole numbers",
        torch.div,
        either(pairs(rounding_mode="floor"), pairs(rounding_mode="trunc")),
        adds_cotangents=False,
    ),
    chooses("bool of bits", lambda x: x.bool(), domain=BITS),
    chooses("reciprocal of signs", torch.reciprocal, domain=SIGNS),
    chooses("round to decimals", torch.round, numbers("decimals", -1), rounds=True),
    chooses("equal", _equal, pairs()),
    chooses("histc", torch.histc, either(each(bins=4, min=-4.0, max=4.0), each(bins=4)), rounds=True),
    chooses(
        "to",
        lambda x, dtype: x.to(dtype=getattr(torch, dtype), copy=True),
        either(each(dtype="float64"), each(dtype="int64")),
        domain=HALVES,
    ),
    chooses("view_copy", lambda x, shape: torch.view_copy(x, shape), moved(reshapes)),
    chooses("view_as_complex", lambda x: torch.view_as_real(torch.view_as_complex(x)), _complex, rounds=True),
    chooses(
        "native_dropout_backward",
        lambda g, mask, scale: torch.ops.aten.native_dropout_backward(g, mask, scale),
        either(alike(scale=2.0), alike(scale=4.0)),
        kinds=(FLOATS, BOOLS),
    ),
)
