"""Lists elementwise operators of one or several operands."""

from __future__ import annotations

import torch
from torch.nn import functional

from equivtest.families.operators.case_arguments import masks
from equivtest.families.operators.case_forms import Argument, Form, Signature, each, either, numbers, pairs, triples
from equivtest.families.operators.case_operator import (
    ALONE,
    ANY,
    BITS,
    BOOLS,
    FLOATS,
    HALVES,
    POSITIVE,
    UNIT,
    Call,
    Operator,
    chooses,
    rounded,
)

_UNARY_EXACT: tuple[tuple[str, Call], ...] = (
    ("abs", torch.abs), ("neg", torch.neg), ("positive", torch.positive), ("relu", functional.relu),
    ("sign", torch.sign), ("ceil", torch.ceil), ("floor", torch.floor), ("trunc", torch.trunc), ("round", torch.round),
    ("frac", torch.frac), ("clone", torch.clone), ("zeros_like", torch.zeros_like), ("ones_like", torch.ones_like),
    ("isnan", torch.isnan), ("isfinite", torch.isfinite), ("isinf", torch.isinf), ("signbit", torch.signbit),
    ("nn.functional.hardtanh", functional.hardtanh),
    ("nn.functional.relu6", functional.relu6),
    ("nan_to_num", torch.nan_to_num), ("sgn", torch.sgn), ("bool", lambda x: x.bool()), ("long", lambda x: x.long()),
    ("angle", torch.angle), ("conj_physical", torch.conj_physical), ("isneginf", torch.isneginf),
    ("isposinf", torch.isposinf),
    ("conj", torch.conj), ("real", torch.real), ("detach", torch.detach), ("contiguous", lambda x: x.contiguous()),
)  # fmt: skip

_TO_WHOLE_NUMBERS = frozenset({"ceil", "floor", "trunc", "round", "frac", "long"})
"""Operators that are the identity, or zero, on whole numbers."""

_UNARY_ROUNDED: tuple[tuple[str, Call, str], ...] = (
    ("exp", torch.exp, ANY), ("expm1", torch.expm1, ANY), ("exp2", torch.exp2, ANY), ("log", torch.log, POSITIVE),
    ("log1p", torch.log1p, POSITIVE), ("log2", torch.log2, POSITIVE), ("log10", torch.log10, POSITIVE),
    ("sqrt", torch.sqrt, POSITIVE), ("rsqrt", torch.rsqrt, POSITIVE), ("sin", torch.sin, ANY), ("cos", torch.cos, ANY),
    ("tan", torch.tan, UNIT), ("tanh", torch.tanh, ANY), ("sinh", torch.sinh, ANY), ("cosh", torch.cosh, ANY),
    ("asin", torch.asin, UNIT), ("acos", torch.acos, UNIT), ("atan", torch.atan, ANY), ("asinh", torch.asinh, ANY),
    ("atanh", torch.atanh, UNIT), ("erf", torch.erf, ANY), ("erfc", torch.erfc, ANY), ("erfinv", torch.erfinv, UNIT),
    ("sigmoid", torch.sigmoid, ANY), ("nn.functional.logsigmoid", functional.logsigmoid, ANY),
    ("nn.functional.silu", functional.silu, ANY), ("nn.functional.gelu", functional.gelu, ANY),
    ("nn.functional.softplus", functional.softplus, ANY), ("nn.functional.mish", functional.mish, ANY),
    ("nn.functional.elu", functional.elu, ANY), ("nn.functional.selu", functional.selu, ANY),
    ("nn.functional.celu", functional.celu, ANY), ("nn.functional.leaky_relu", functional.leaky_relu, ANY),
    ("nn.functional.hardswish", functional.hardswish, ANY), ("nn.functional.softsign", functional.softsign, ANY),
    ("nn.functional.tanhshrink", functional.tanhshrink, ANY), ("reciprocal", torch.reciprocal, POSITIVE),
    ("digamma", torch.digamma, POSITIVE), ("lgamma", torch.lgamma, POSITIVE), ("sinc", torch.sinc, POSITIVE),
    ("deg2rad", torch.deg2rad, ANY), ("rad2deg", torch.rad2deg, ANY),
)  # fmt: skip

_OPTIONS: dict[str, dict[str, Argument]] = {
    "nn.functional.gelu": {"approximate": "tanh"}, "nn.functional.elu": {"alpha": 0.5},
    "nn.functional.celu": {"alpha": 0.5}, "nn.functional.leaky_relu": {"negative_slope": 0.5},
    "nn.functional.softplus": {"beta": 2.0, "threshold": 1.5},
    "nn.functional.hardtanh": {"min_val": -2.0, "max_val": 2.0},
}  # fmt: skip
"""Options of functions that are also called without them."""


def _with_option(name: str) -> Form:
    return either(each(), each(**_OPTIONS[name])) if name in _OPTIONS else ALONE


_COMPARISONS: tuple[tuple[str, Call], ...] = (
    ("eq", torch.eq), ("ne", torch.ne), ("lt", torch.lt), ("le", torch.le), ("gt", torch.gt), ("ge", torch.ge),
    ("logical_and", torch.logical_and), ("logical_or", torch.logical_or), ("logical_xor", torch.logical_xor),
)  # fmt: skip

_CHOICES: tuple[tuple[str, Call], ...] = (
    ("maximum", torch.maximum), ("minimum", torch.minimum), ("fmax", torch.fmax), ("fmin", torch.fmin),
)  # fmt: skip


ROWS = (
    *(
        chooses(name, call, _with_option(name), domain=HALVES if name in _TO_WHOLE_NUMBERS else ANY)
        for name, call in _UNARY_EXACT
    ),
    chooses("logical_not", torch.logical_not, domain=BITS),
    *(rounded(name, call, _with_option(name), domain=domain) for name, call, domain in _UNARY_ROUNDED),
    *(chooses(name, call, either(pairs(), numbers("other", 1.0, 0.0, -2.0))) for name, call in _COMPARISONS[:6]),
    *(chooses(name, call, pairs(), domain=BITS) for name, call in _COMPARISONS[6:]),
    chooses("isclose", torch.isclose, either(pairs(), pairs(rtol=0.0, atol=1.0)), domain=BITS),
    *(chooses(name, call, pairs()) for name, call in _CHOICES),
    chooses("copysign", torch.copysign, either(pairs(), numbers("other", -1.0))),
    # Arithmetic of two and three operands.
    Operator("add", torch.add, either(pairs(), pairs(alpha=2), pairs(alpha=-2), numbers("other", 1.0, 2, -3.0))),
    Operator("sub", torch.sub, either(pairs(), pairs(alpha=2), pairs(alpha=-2), numbers("other", 1.0, 2, -3.0))),
    Operator("rsub", torch.rsub, either(pairs(), pairs(alpha=2), numbers("other", 1.0, 2, -3.0))),
    Operator("mul", torch.mul, either(pairs(), numbers("other", 2.0, -3, 0.5))),
    rounded("div", torch.div, either(pairs(), numbers("other", 3.0, 2, -2.0)), domain=POSITIVE),
    rounded("true_divide", torch.true_divide, pairs(), domain=POSITIVE),
    chooses(
        "remainder", torch.remainder, either(pairs(), numbers("other", 2.0)), domain=POSITIVE, adds_cotangents=False
    ),
    chooses("fmod", torch.fmod, either(pairs(), numbers("other", 2.0)), domain=POSITIVE, adds_cotangents=False),
    rounded("pow", torch.pow, either(numbers("exponent", 2, 3, 0.5, 1, 0), pairs()), domain=POSITIVE),
    rounded("float_power", torch.float_power, numbers("exponent", 2.0, 3.0), domain=POSITIVE),
    rounded("square", torch.square),
    rounded("atan2", torch.atan2, pairs()),
    rounded("hypot", torch.hypot, pairs()),
    rounded("logaddexp", torch.logaddexp, pairs()),
    rounded("xlogy", torch.xlogy, pairs(), domain=POSITIVE),
    rounded("addcmul", torch.addcmul, either(triples(), triples(value=2), triples(value=-2))),
    rounded("addcdiv", torch.addcdiv, either(triples(), triples(value=-2)), domain=POSITIVE),
    rounded("lerp", torch.lerp, either(triples(), pairs(weight=0.5))),
    chooses(
        "clamp",
        torch.clamp,
        either(*(each(**how) for how in ({"min": -1.0}, {"max": 1.0}, {"min": -1.0, "max": 2.0})), triples()),
    ),
    chooses("clamp_min", torch.clamp_min, numbers("min", 0.0, 2.0)),
    chooses("clamp_max", torch.clamp_max, numbers("max", 0.0, -2.0)),
    chooses("nn.functional.threshold", functional.threshold, each(threshold=1.0, value=2.0)),
    chooses("nn.functional.hardshrink", functional.hardshrink, either(each(), each(lambd=2.0))),
    rounded("nn.functional.softshrink", functional.softshrink, either(each(), each(lambd=2.0))),
    rounded("nn.functional.prelu", functional.prelu, lambda shape: (Signature((shape, (1,))),)),
    chooses("where", torch.where, triples(), kinds=(BOOLS,)),
    chooses("masked_fill", torch.masked_fill, masks, kinds=(FLOATS, BOOLS)),
)

NOT_DRAWN = (
    rounded("pow of a number", lambda x, base: torch.pow(base, x), numbers("base", 0.5, 3.0), domain=POSITIVE),
)
"""Operators that a gate enumerates, and that random cases have none of."""
