"""Lists operators that reduce, accumulate or normalize along dims."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from equivtest.cases.case import Shape
from equivtest.families.operators.case_forms import Signature, Signatures, along, either, numbers, reduced
from equivtest.families.operators.case_operator import (
    BITS,
    BOOLS,
    DISTINCT,
    FEW,
    MOST,
    POWERS,
    SIGNS,
    WHOLE,
    Call,
    Operator,
    chooses,
    rounded,
)


def _norm(x: torch.Tensor, ord: float | str, **how: Any) -> Any:
    """`ord` may be the text 'inf' or '-inf', because a case's arguments can hold that text but no infinity."""
    return torch.linalg.vector_norm(x, float(ord), **how)


ROWS = (
    Operator("sum", torch.sum, reduced()),
    rounded("mean", torch.mean, reduced()),
    rounded("nansum", torch.nansum, reduced()),
    chooses("amax", torch.amax, reduced(), domain=DISTINCT),
    chooses("amin", torch.amin, reduced(), domain=DISTINCT),
    chooses("aminmax", torch.aminmax, reduced(several=False), domain=DISTINCT),
    chooses("max", torch.max, reduced(several=False), domain=DISTINCT),
    chooses("min", torch.min, reduced(several=False), domain=DISTINCT),
    chooses("argmax", torch.argmax, reduced(several=False), domain=DISTINCT),
    chooses("argmin", torch.argmin, reduced(several=False), domain=DISTINCT),
    chooses("median", torch.median, reduced(several=False), domain=DISTINCT),
    chooses("mode", torch.mode, reduced(several=False, all_dims=False), domain=DISTINCT),
    chooses("all", torch.all, reduced(), domain=MOST),
    chooses("any", torch.any, reduced(), domain=FEW),
    chooses("any of bools", torch.any, reduced(), kinds=(BOOLS,)),
    chooses("not any", lambda x, **how: ~torch.any(x, **how), reduced(), domain=FEW),
    chooses("not all", lambda x, **how: ~torch.all(x, **how), reduced(), domain=MOST),
    chooses("all of bools", torch.all, reduced(), kinds=(BOOLS,)),
    chooses("count_nonzero", torch.count_nonzero, reduced(keepdim=False), domain=BITS),
    chooses("prod", torch.prod, reduced(several=False), domain=POWERS, adds_cotangents=False),
    rounded("var", torch.var, either(reduced(), reduced(correction=0))),
    rounded("std", torch.std, either(reduced(), reduced(correction=0))),
    rounded("var_mean", torch.var_mean, either(reduced(), reduced(correction=0))),
    rounded("std_mean", torch.std_mean, either(reduced(), reduced(correction=0))),
    rounded("norm", _norm, either(*(reduced(ord=ord) for ord in (2, 1, "inf", 3, 0, "-inf")))),
    rounded("linalg.vector_norm", torch.linalg.vector_norm, reduced()),
    rounded("logsumexp", torch.logsumexp, reduced(all_dims=False, keepdim=False)),  # findings/58
    Operator("cumsum", torch.cumsum, along()),
    chooses("cumprod", torch.cumprod, along(), domain=POWERS, adds_cotangents=False),
    rounded("logcumsumexp", torch.logcumsumexp, along()),
    chooses("cummax", torch.cummax, along(), domain=DISTINCT),
    chooses("cummin", torch.cummin, along(), domain=DISTINCT),
    rounded("softmax", torch.softmax, along()),
    rounded("log_softmax", torch.log_softmax, along()),
    rounded("nn.functional.softmin", functional.softmin, along()),
    rounded("nn.functional.normalize", functional.normalize, either(along(), along(p=1.0), along(eps=64.0))),
    rounded("nn.functional.glu", functional.glu, along()),
    rounded("renorm", torch.renorm, along(p=2, maxnorm=1.0)),
)

TIES = chooses("amax of ties", torch.amax, reduced(), domain=SIGNS, adds_cotangents=False, rounds=True)
"""`amax` of values in which the largest element occurs several times, so that its gradient is divided among them.

In 16 bits the quotients are rounded so much that no verdict on the gradient is conclusive.
"""


def _over_last_dims(shape: Shape) -> Signatures:
    """Returns one signature for each number of last dims that are normalized together."""
    return tuple(Signature((shape,), (("dims", tuple(range(-num, 0))),)) for num in range(1, len(shape) + 1))


def _layer_norm(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    return functional.layer_norm(x, [x.shape[dim] for dim in dims], eps=0.5)


def _rms_norm(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    return functional.rms_norm(x, [x.shape[dim] for dim in dims], eps=0.5)


def _in_float64(call: Call) -> Call:
    return lambda x, **how: call(x, dtype=torch.float64, **how)


NOT_DRAWN = (
    TIES,
    rounded("sum in float64", _in_float64(torch.sum), reduced()),
    rounded("linalg.vector_norm in float64", _in_float64(torch.linalg.vector_norm), reduced()),
    rounded("mean in float64", _in_float64(torch.mean), reduced()),
    rounded("cumsum in float64", _in_float64(torch.cumsum), along()),
    rounded("softmax in float64", _in_float64(torch.softmax), along()),
    rounded("log_softmax in float64", _in_float64(torch.log_softmax), along()),
    chooses("prod in float64", _in_float64(torch.prod), reduced(several=False), domain=POWERS, adds_cotangents=False),
    chooses("cumprod in float64", _in_float64(torch.cumprod), along(), domain=POWERS, adds_cotangents=False),
    *(
        chooses(f"{name} of whole numbers", getattr(torch, name), numbers("other", 0.5), kinds=(WHOLE,))
        for name in ("add", "sub", "mul", "div")
    ),
    rounded("layer_norm of last dims", _layer_norm, _over_last_dims),
    rounded("rms_norm of last dims", _rms_norm, _over_last_dims),
)
"""Operators that random cases do not have.

These are `amax of ties`, operators with another dtype for the result, integers beside a floating-point number, and
norms of several dims without a weight.
"""
