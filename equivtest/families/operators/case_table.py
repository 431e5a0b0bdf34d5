"""The operators that are judged, each with the signatures that it is called with.

Source: names and arguments as torch documents them; torch.testing._internal.common_methods_invocations.op_db (2.13.0)
lists them.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from equivtest.families.operators.case_forms import (
    Arguments,
    Form,
    Signature,
    Signatures,
    along,
    dims_of,
    each,
    either,
    indexed,
    joined,
    moved,
    numbers,
    pairs,
    products,
    reduced,
    triples,
)
from equivtest.kit.case import Shape

ANY, POSITIVE, UNIT, POWERS, DISTINCT = DOMAINS = ("any", "positive", "unit", "powers", "distinct")
"""What an operand holds: numbers of either sign; positive ones; of magnitude below 1; powers of two; none twice."""

FLOATS, INDEX, BOOLS, WHOLE = KINDS = ("floats", "index", "bools", "whole")
"""Numbers of the case's dtype; int64 that count along a dim of the first operand; bools; int64 from 0 to 7."""

Call = Callable[..., Any]
ALONE = each()


@dataclass(frozen=True)
class Operator:
    """One operator, and how it is called.

    Attributes:
        name: As torch's list of operators has it; with a word behind it for a form of its own.
        call: Of the operands in order, and the arguments by name.
        form: The signatures for one shape.
        kinds: Of each operand; of operands beyond them, floats.
        domain: Of the values of operands that are floats.
        is_exact: Whether the values of that domain come out as they are, or as numbers of as few bits, so that equality
            can be asked of them; of sums and products it need not be said: that is proved.
        adds_cotangents: Whether the gradient of an exact one adds up cotangents, each as it is or halved, and computes
            nothing else.
        rounds: Whether what comes out is rounded, so that 16 bits are too few to conclude anything.
        num_dims: Of the shapes that it takes.
    """

    name: str
    call: Call
    form: Form = ALONE
    kinds: tuple[str, ...] = ()
    domain: str = ANY
    is_exact: bool = False
    adds_cotangents: bool = True
    rounds: bool = False
    num_dims: tuple[int, ...] = (0, 1, 2, 3)

    def kind_of(self, number: int) -> str:
        """Of the operand of that number."""
        return self.kinds[number] if number < len(self.kinds) else FLOATS


def _chooses(name: str, call: Call, form: Form = ALONE, **how: Any) -> Operator:
    return Operator(name, call, form, is_exact=True, **how)


def _rounds(name: str, call: Call, form: Form = ALONE, **how: Any) -> Operator:
    return Operator(name, call, form, rounds=True, **how)


def _in_place(method: str) -> Call:
    """The method of the first operand times one, which is then the answer; a clone of a partial one would be whole."""

    def call(x: torch.Tensor, *others: torch.Tensor, **arguments: Any) -> torch.Tensor:
        copied = x.mul(1)
        getattr(copied, method)(*others, **arguments)
        return copied

    return call


def _norm(x: torch.Tensor, ord: float | str, **how: Any) -> Any:
    """The order may be 'inf', of which a case's code can tell."""
    return torch.linalg.vector_norm(x, float(ord), **how)


def _reshapes(shape: Shape) -> list[Arguments]:
    """Flat, two neighbouring dims in one, a dim in two where it is even, a dim of size 1 more."""
    found: list[Shape] = [(-1,)]
    for dim in range(len(shape) - 1):
        found.append((*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :]))
    for dim, size in enumerate(shape):
        found.append((*shape[:dim], 1, *shape[dim:]))
        if size and size % 2 == 0:
            found += [(*shape[:dim], 2, size // 2, *shape[dim + 1 :]), (*shape[:dim], size // 2, 2, *shape[dim + 1 :])]
    return [(("shape", each),) for each in found]


def _permutations(shape: Shape) -> list[Arguments]:
    n = len(shape)
    orders: list[Shape] = [tuple(reversed(range(n)))]
    if n >= 2:
        orders += [(*range(1, n), 0), tuple(range(-1, -n - 1, -1))]
    return [(("dims", order),) for order in orders]


def _narrows(shape: Shape) -> list[Arguments]:
    found: list[Arguments] = []
    for dim in dims_of(shape):
        size = shape[dim]
        for start, length in ((0, size), (0, size - 1), (1, size - 1), (-1, 1)):
            if length >= 1:
                found.append((("dim", dim), ("start", start), ("length", length)))
    return found


def _per_dim(name: str, *values: int, **arguments: Any) -> Callable[[Shape], list[Arguments]]:
    """One number for each dim, along which something is done, or the like."""

    def make(shape: Shape) -> list[Arguments]:
        return [(("dim", dim), (name, value), *arguments.items()) for dim in dims_of(shape) for value in values]

    return make


def _rolls(shape: Shape) -> list[Arguments]:
    found: list[Arguments] = [(("shifts", shift), ("dims", dim)) for dim in dims_of(shape) for shift in (1, -1)]
    return [*found, (("shifts", 1),)]


def _flips(shape: Shape) -> list[Arguments]:
    found: list[Arguments] = [(("dims", (dim,)),) for dim in dims_of(shape)]
    return [*found, (("dims", tuple(range(len(shape)))),)]


def _swaps(shape: Shape) -> list[Arguments]:
    n = len(shape)
    return [
        (("dim0", a), ("dim1", b)) for a, b in ((0, -1), (-1, 0), (0, 1), (-2, -1)) if max(a, b) < n and min(a, b) >= -n
    ]


def _expands(shape: Shape) -> list[Arguments]:
    keep = (-1,) * len(shape)
    return [(("sizes", (2, *keep)),), (("sizes", (1, *shape)),), (("sizes", keep),)]


def _repeats(shape: Shape) -> list[Arguments]:
    ones = (1,) * len(shape)
    found: list[Shape] = [(2, *ones), ones]
    found += [(*ones[:dim], 2, *ones[dim + 1 :]) for dim in range(len(shape))]
    return [(("repeats", each),) for each in found]


def _pads(shape: Shape) -> list[Arguments]:
    found: list[Shape] = [(1, 0), (0, 1), (1, 2)]
    found += [(0, 0, 1, 0), (1, 0, 0, 2)] if len(shape) >= 2 else []
    return [(("pad", pad), ("value", value)) for pad in found for value in (0.0, 2.0)]


def _splits(shape: Shape) -> list[Arguments]:
    found: list[Arguments] = [(("sizes", size), ("dim", dim)) for dim in dims_of(shape) for size in (1, 2)]
    return found + [(("sizes", (1, shape[dim] - 1)), ("dim", dim)) for dim in dims_of(shape) if shape[dim] > 1]


def _squeezes(shape: Shape) -> list[Arguments]:
    return [(), *((("dim", dim),) for dim in dims_of(shape))]


def _unsqueezes(shape: Shape) -> list[Arguments]:
    return [(("dim", dim),) for dim in range(-len(shape) - 1, len(shape) + 1)]


def _selects(shape: Shape) -> list[Arguments]:
    return [(("dim", dim), ("index", index)) for dim in dims_of(shape) for index in (0, -1, shape[dim] // 2)]


def _flattens(shape: Shape) -> list[Arguments]:
    found: list[Arguments] = [()]
    return found + [
        (("start_dim", a), ("end_dim", b)) for a, b in ((0, 1), (1, -1), (-2, -1)) if len(shape) > max(a, b)
    ]


def _unflattens(shape: Shape) -> list[Arguments]:
    found: list[Arguments] = []
    for dim in dims_of(shape):
        size = shape[dim]
        parts = [(1, size), (size, 1), (-1, size)] + ([(2, size // 2), (size // 2, 2)] if size % 2 == 0 else [])
        found += [(("dim", dim), ("sizes", part)) for part in parts]
    return found


def _windows(shape: Shape) -> list[Arguments]:
    found: list[Arguments] = []
    for dim in dims_of(shape):
        found += [(("dimension", dim), ("size", size), ("step", step)) for size, step in ((1, 1), (2, 1), (2, 2))]
    return found


def _masks(shape: Shape) -> Signatures:
    others = (shape, shape[1:], (1, *shape[1:]))
    return tuple(Signature((shape, mask), (("value", 2.0),)) for mask in others)


def _same_mask(shape: Shape) -> Signatures:
    return _masks(shape)[:1]


def _smaller_beside(shape: Shape) -> Signatures:
    """The first operand of the whole shape."""
    return pairs()(shape)[: 2 * len(shape) + 1]


def _picked_rows(shape: Shape) -> Signatures:
    return tuple(Signature((shape, index)) for index in ((2,), (1,), (3,), (2, 2)) if shape)


def _equations(shape: Shape) -> Signatures:
    dims = (("mk", "kn", "mn"), ("bmk", "bkn", "bmn"), ("bmk", "kn", "mbn"), ("mk", "mk", "m"), ("mk", "mk", ""))
    return tuple(
        Signature(signature.shapes, (("equation", f"{left},{right}->{out}"),))
        for left, right, out in dims
        for signature in products(left, right)(shape)
    )


def _slices(shape: Shape) -> list[Arguments]:
    """By dims counted from the front: of others findings/52 speaks."""
    found: list[Arguments] = []
    for dim in range(len(shape)):
        ends = [(0, shape[dim], 2), (1, shape[dim], 1), (0, -1, 1)]
        found += [(("dim", dim), ("start", start), ("end", end), ("step", step)) for start, end, step in ends]
    return found


def _uneven_splits(shape: Shape) -> list[Arguments]:
    return [(("sizes", (1, shape[dim] - 1)), ("dim", dim)) for dim in dims_of(shape) if shape[dim] > 1]


def _selected_beside(shape: Shape) -> Signatures:
    """What is written in the place of one row."""
    fronts = [(dim, dim % len(shape)) for dim in dims_of(shape)]
    return tuple(
        Signature((shape, (*shape[:front], *shape[front + 1 :])), (("dim", dim), ("index", index)))
        for dim, front in fronts
        for index in (0, -1)
    )


def _sliced_beside(shape: Shape) -> Signatures:
    """What is written in the place of all rows but the first."""
    fronts = [(dim, dim % len(shape)) for dim in dims_of(shape) if shape[dim] > 1]
    return tuple(
        Signature((shape, (*shape[:front], shape[front] - 1, *shape[front + 1 :])), (("dim", dim), ("start", 1)))
        for dim, front in fronts
    )


def _added_rows(shape: Shape) -> Signatures:
    """An index of one row along each dim, and what is added there."""
    fronts = [(dim, dim % len(shape)) for dim in dims_of(shape)]
    rows = [(dim, (*shape[:front], size, *shape[front + 1 :])) for dim, front in fronts for size in (1, 2)]
    return tuple(Signature((shape, row, row), (("dim", dim),)) for dim, row in rows)


def _images(*, transposed: bool = False) -> Form:
    """Images (N, C, 3, W), or lines (N, C, W), of the shape's N, C and W; a kernel for 2 or C channels, and a bias."""

    def form(shape: Shape) -> Signatures:
        n, c, w = shape
        images, lines, found = (n, c, 3, w), (n, c, w), []
        ways: list[tuple[Shape, Shape, Arguments]] = [
            (images, (1, 1), ()),
            (images, (3, 3), (("padding", 1),)),
            (images, (2, 2), (("stride", (1, 2)),)),
            (images, (2, 3), (("dilation", (2, 1)), ("padding", (0, 1)))),
            (lines, (1,), ()),
            (lines, (3,), (("padding", 1),)),
            (lines, (2,), (("stride", 2),)),
        ]
        for x, window, how in ways:
            weight = (c, 2, *window) if transposed else (2, c, *window)
            found += [Signature((x, weight), how), Signature((x, weight, (2,)), how)]
            found += [Signature((x, (c, 1, *window)), (*how, ("groups", c)))]
        return tuple(found)

    return form


def _of_either(of_lines: Call, of_images: Call) -> Call:
    """The first for (N, C, W), the second for (N, C, H, W)."""
    return lambda x, *others, **how: (of_images if x.dim() == 4 else of_lines)(x, *others, **how)


_OF_BOOLS = ("bitwise_and", "bitwise_or", "bitwise_xor")
_OF_WHOLE_NUMBERS = ("gcd", "lcm", "bitwise_left_shift", "bitwise_right_shift")
_SORTED = moved(_per_dim("k", 1, 2))

_UNARY_EXACT: tuple[tuple[str, Call], ...] = (
    ("abs", torch.abs), ("neg", torch.neg), ("positive", torch.positive), ("relu", functional.relu),
    ("sign", torch.sign), ("ceil", torch.ceil), ("floor", torch.floor), ("trunc", torch.trunc), ("round", torch.round),
    ("frac", torch.frac), ("clone", torch.clone), ("zeros_like", torch.zeros_like), ("ones_like", torch.ones_like),
    ("isnan", torch.isnan), ("isfinite", torch.isfinite), ("isinf", torch.isinf), ("signbit", torch.signbit),
    ("logical_not", torch.logical_not), ("nn.functional.hardtanh", functional.hardtanh),
    ("nn.functional.relu6", functional.relu6),
    ("nan_to_num", torch.nan_to_num), ("sgn", torch.sgn), ("bool", lambda x: x.bool()), ("long", lambda x: x.long()),
    ("angle", torch.angle), ("conj_physical", torch.conj_physical), ("isneginf", torch.isneginf),
    ("isposinf", torch.isposinf),
    ("conj", torch.conj), ("real", torch.real), ("detach", torch.detach), ("contiguous", lambda x: x.contiguous()),
)  # fmt: skip

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

_COMPARISONS: tuple[tuple[str, Call], ...] = (
    ("eq", torch.eq), ("ne", torch.ne), ("lt", torch.lt), ("le", torch.le), ("gt", torch.gt), ("ge", torch.ge),
    ("logical_and", torch.logical_and), ("logical_or", torch.logical_or), ("logical_xor", torch.logical_xor),
    ("isclose", torch.isclose),
)  # fmt: skip

_CHOICES: tuple[tuple[str, Call], ...] = (
    ("maximum", torch.maximum), ("minimum", torch.minimum), ("fmax", torch.fmax), ("fmin", torch.fmin),
    ("copysign", torch.copysign),
)  # fmt: skip


OPERATORS: dict[str, Operator] = {
    operator.name: operator
    for operator in (
        *(_chooses(name, call) for name, call in _UNARY_EXACT),
        *(_rounds(name, call, domain=domain) for name, call, domain in _UNARY_ROUNDED),
        *(_chooses(name, call, either(pairs(), numbers("other", 1.0, 0.0, -2.0))) for name, call in _COMPARISONS[:6]),
        *(_chooses(name, call, pairs()) for name, call in _COMPARISONS[6:]),
        *(_chooses(name, call, pairs()) for name, call in _CHOICES),
        # Arithmetic of two and three operands.
        Operator("add", torch.add, either(pairs(), pairs(alpha=2), numbers("other", 1.0, 2, -3.0))),
        Operator("sub", torch.sub, either(pairs(), pairs(alpha=2), numbers("other", 1.0, 2))),
        Operator("rsub", torch.rsub, either(pairs(), numbers("other", 1.0, 2))),
        Operator("mul", torch.mul, either(pairs(), numbers("other", 2.0, -3, 0.5))),
        _rounds("div", torch.div, either(pairs(), numbers("other", 3.0, 2)), domain=POSITIVE),
        _rounds("true_divide", torch.true_divide, pairs(), domain=POSITIVE),
        _chooses(
            "remainder", torch.remainder, either(pairs(), numbers("other", 2.0)), domain=POSITIVE, adds_cotangents=False
        ),
        _chooses("fmod", torch.fmod, either(pairs(), numbers("other", 2.0)), domain=POSITIVE, adds_cotangents=False),
        _rounds("pow", torch.pow, either(numbers("exponent", 2, 3, 0.5, 1, 0), pairs()), domain=POSITIVE),
        _rounds("float_power", torch.float_power, numbers("exponent", 2.0, 3.0), domain=POSITIVE),
        _rounds("square", torch.square),
        _rounds("atan2", torch.atan2, pairs()),
        _rounds("hypot", torch.hypot, pairs()),
        _rounds("logaddexp", torch.logaddexp, pairs()),
        _rounds("xlogy", torch.xlogy, pairs(), domain=POSITIVE),
        _rounds("addcmul", torch.addcmul, either(triples(), triples(value=2))),
        _rounds("addcdiv", torch.addcdiv, triples(), domain=POSITIVE),
        _rounds("lerp", torch.lerp, either(triples(), pairs(weight=0.5))),
        _chooses(
            "clamp",
            torch.clamp,
            either(*(each(**how) for how in ({"min": -1.0}, {"max": 1.0}, {"min": -1.0, "max": 2.0})), triples()),
        ),
        _chooses("clamp_min", torch.clamp_min, numbers("min", 0.0, 2.0)),
        _chooses("clamp_max", torch.clamp_max, numbers("max", 0.0, -2.0)),
        _chooses("nn.functional.threshold", functional.threshold, each(threshold=1.0, value=2.0)),
        _chooses("nn.functional.hardshrink", functional.hardshrink),
        _rounds("nn.functional.softshrink", functional.softshrink),
        _rounds("nn.functional.prelu", functional.prelu, lambda shape: (Signature((shape, (1,))),)),
        _chooses("where", torch.where, triples(), kinds=(BOOLS,)),
        _chooses("masked_fill", torch.masked_fill, _masks, kinds=(FLOATS, BOOLS)),
        # Reductions.
        Operator("sum", torch.sum, reduced()),
        _rounds("mean", torch.mean, reduced()),
        _rounds("nansum", torch.nansum, reduced()),
        _chooses("amax", torch.amax, reduced(), domain=DISTINCT),
        _chooses("amin", torch.amin, reduced(), domain=DISTINCT),
        _chooses("aminmax", torch.aminmax, reduced(several=False), domain=DISTINCT),
        _chooses("max", torch.max, reduced(several=False), domain=DISTINCT),
        _chooses("min", torch.min, reduced(several=False), domain=DISTINCT),
        _chooses("argmax", torch.argmax, reduced(several=False), domain=DISTINCT),
        _chooses("argmin", torch.argmin, reduced(several=False), domain=DISTINCT),
        _chooses("median", torch.median, reduced(several=False), domain=DISTINCT),
        _chooses("mode", torch.mode, reduced(several=False, all_dims=False), domain=DISTINCT),
        _chooses("all", torch.all, reduced()),
        _chooses("any", torch.any, reduced()),
        _chooses("any of bools", torch.any, reduced(), kinds=(BOOLS,)),
        _chooses("all of bools", torch.all, reduced(), kinds=(BOOLS,)),
        _chooses("count_nonzero", torch.count_nonzero, reduced(keepdim=False)),
        _chooses("prod", torch.prod, reduced(several=False), domain=POWERS, adds_cotangents=False),
        _rounds("var", torch.var, either(reduced(), reduced(correction=0))),
        _rounds("std", torch.std, either(reduced(), reduced(correction=0))),
        _rounds("var_mean", torch.var_mean, reduced()),
        _rounds("std_mean", torch.std_mean, reduced()),
        _rounds("norm", _norm, either(*(reduced(ord=ord) for ord in (2, 1, "inf", 3, 0)))),
        _rounds("linalg.vector_norm", torch.linalg.vector_norm, reduced()),
        _rounds("logsumexp", torch.logsumexp, reduced(all_dims=False, keepdim=False)),  # findings/58
        Operator("cumsum", torch.cumsum, along()),
        _chooses("cumprod", torch.cumprod, along(), domain=POWERS, adds_cotangents=False),
        _rounds("logcumsumexp", torch.logcumsumexp, along()),
        _chooses("cummax", torch.cummax, along(), domain=DISTINCT),
        _chooses("cummin", torch.cummin, along(), domain=DISTINCT),
        _rounds("softmax", torch.softmax, along()),
        _rounds("log_softmax", torch.log_softmax, along()),
        _rounds("nn.functional.softmin", functional.softmin, along()),
        _rounds("nn.functional.normalize", functional.normalize, along()),
        _rounds("nn.functional.glu", functional.glu, along()),
        _rounds("renorm", torch.renorm, along(p=2, maxnorm=1.0)),
        # Views and moves.
        _chooses("transpose", torch.transpose, moved(_swaps)),
        _chooses("permute", torch.permute, moved(_permutations)),
        _chooses("t", torch.t, num_dims=(0, 1, 2)),
        _chooses("movedim", lambda x, dim0, dim1: torch.movedim(x, dim0, dim1), moved(_swaps)),
        _chooses("reshape", torch.reshape, moved(_reshapes)),
        _chooses("view", lambda x, shape: x.view(shape), moved(_reshapes)),
        _chooses("flatten", torch.flatten, moved(_flattens)),
        _chooses("unflatten", torch.unflatten, moved(_unflattens)),
        _chooses("squeeze", torch.squeeze, moved(_squeezes)),
        _chooses("unsqueeze", torch.unsqueeze, moved(_unsqueezes)),
        _chooses("expand", lambda x, sizes: x.expand(sizes), moved(_expands)),
        _chooses("repeat", lambda x, repeats: x.repeat(repeats), moved(_repeats)),
        _chooses("repeat_interleave", torch.repeat_interleave, moved(_per_dim("repeats", 2, 1))),
        _chooses("tile", lambda x, repeats: torch.tile(x, repeats), moved(_repeats)),
        _chooses("narrow", torch.narrow, moved(_narrows)),
        _chooses("select", torch.select, moved(_selects)),
        _chooses("unbind", torch.unbind, along()),
        _chooses(
            "split",
            lambda x, sizes, dim: torch.split(x, list(sizes) if isinstance(sizes, tuple) else sizes, dim),
            moved(_splits),
        ),
        _chooses("chunk", torch.chunk, moved(_per_dim("chunks", 2, 3, 1))),
        _chooses(
            "tensor_split",
            lambda x, sections, dim: torch.tensor_split(x, sections, dim),
            moved(_per_dim("sections", 2, 3)),
        ),
        _chooses("unfold", lambda x, **how: x.unfold(**how), moved(_windows)),
        _chooses(
            "diagonal",
            torch.diagonal,
            either(each(), each(offset=1), each(offset=-1, dim1=-1, dim2=0)),
            num_dims=(2, 3),
        ),
        _chooses("diag_embed", torch.diag_embed, either(each(), each(offset=1)), num_dims=(1, 2)),
        _chooses("tril", torch.tril, either(each(), each(diagonal=1), each(diagonal=-1)), num_dims=(2, 3)),
        _chooses("triu", torch.triu, either(each(), each(diagonal=1), each(diagonal=-1)), num_dims=(2, 3)),
        _chooses("flip", torch.flip, moved(_flips)),
        _chooses("roll", torch.roll, moved(_rolls)),
        _chooses("rot90", torch.rot90, num_dims=(2, 3)),
        _chooses("nn.functional.pad", functional.pad, moved(_pads), num_dims=(1, 2, 3)),
        _chooses("cat", lambda *xs, dim: torch.cat(xs, dim), joined(new_dim=False)),
        _chooses("stack", lambda *xs, dim: torch.stack(xs, dim), joined(new_dim=True)),
        _chooses(
            "index_select",
            lambda x, index, dim: torch.index_select(x, dim, index),
            indexed(same_dims=False),
            kinds=(FLOATS, INDEX),
        ),
        _chooses(
            "gather", lambda x, index, dim: torch.gather(x, dim, index), indexed(same_dims=True), kinds=(FLOATS, INDEX)
        ),
        _chooses(
            "take_along_dim",
            lambda x, index, dim: torch.take_along_dim(x, index, dim),
            indexed(same_dims=True),
            kinds=(FLOATS, INDEX),
        ),
        _chooses(
            "index_fill",
            lambda x, index, dim: torch.index_fill(x, dim, index, 2.0),
            indexed(same_dims=False),
            kinds=(FLOATS, INDEX),
        ),
        _chooses(
            "scatter",
            lambda x, index, dim: torch.scatter(x, dim, index, 2.0),
            indexed(same_dims=True),
            kinds=(FLOATS, INDEX),
        ),
        Operator(
            "scatter_add",
            lambda x, index, other, dim: torch.scatter_add(x, dim, index, other),
            _added_rows,
            kinds=(FLOATS, INDEX, FLOATS),
        ),
        Operator(
            "index_put",
            lambda x, index, other: torch.index_put(x, (index,), other, accumulate=True),
            lambda shape: tuple(Signature((shape, (n,), (n, *shape[1:]))) for n in (1, 2, 3) if shape),
            kinds=(FLOATS, INDEX, FLOATS),
        ),
        _chooses("__getitem__", lambda x, index: x[index], _picked_rows, kinds=(FLOATS, INDEX)),
        _chooses("sort", torch.sort, either(along(), along(descending=True)), domain=DISTINCT),
        _chooses("argsort", torch.argsort, along(), domain=DISTINCT),
        _chooses("topk", torch.topk, _SORTED, domain=DISTINCT),
        _chooses("kthvalue", torch.kthvalue, _SORTED, domain=DISTINCT),
        # Products.
        Operator("mm", torch.mm, products("mk", "kn"), num_dims=(2,)),
        Operator("bmm", torch.bmm, products("bmk", "bkn"), num_dims=(3,)),
        Operator("mv", torch.mv, products("mk", "k"), num_dims=(2,)),
        Operator("dot", torch.dot, lambda shape: (Signature((shape, shape)),), num_dims=(1,)),
        Operator(
            "outer", torch.outer, lambda shape: (Signature((shape, (3,))), Signature(((2,), shape))), num_dims=(1,)
        ),
        Operator(
            "matmul",
            torch.matmul,
            either(
                *(
                    products(*dims)
                    for dims in (
                        ("mk", "kn"),
                        ("bmk", "bkn"),
                        ("bmk", "kn"),
                        ("mk", "k"),
                        ("k", "kn"),
                        ("bmk", "k"),
                        ("mk", "bkn"),
                        ("1mk", "bkn"),
                    )
                )
            ),
            num_dims=(2, 3),
        ),
        Operator(
            "addmm",
            torch.addmm,
            either(products("n", "mk", "kn"), products("mn", "mk", "kn"), products("1n", "mk", "kn")),
            num_dims=(2,),
        ),
        Operator(
            "addmm scaled",
            lambda a, b, c: torch.addmm(a, b, c, beta=2, alpha=3),
            products("mn", "mk", "kn"),
            num_dims=(2,),
        ),
        Operator("baddbmm", torch.baddbmm, products("bmn", "bmk", "bkn"), num_dims=(3,)),
        Operator("addmv", torch.addmv, products("m", "mk", "k"), num_dims=(2,)),
        Operator(
            "nn.functional.linear",
            functional.linear,
            either(products("mk", "nk"), products("mk", "nk", "n"), products("bmk", "nk", "n"), products("bmk", "nk")),
            num_dims=(2, 3),
        ),
        Operator("einsum", lambda a, b, equation: torch.einsum(equation, a, b), _equations, num_dims=(2, 3)),
        Operator("convolution", _of_either(functional.conv1d, functional.conv2d), _images(), num_dims=(3,)),
        Operator(
            "convolution transposed",
            _of_either(functional.conv_transpose1d, functional.conv_transpose2d),
            _images(transposed=True),
            num_dims=(3,),
        ),
        # Whole numbers and bools.
        *(_chooses(name, getattr(torch, name), pairs(), kinds=(BOOLS, BOOLS)) for name in _OF_BOOLS),
        *(_chooses(name, getattr(torch, name), pairs(), kinds=(WHOLE, WHOLE)) for name in _OF_WHOLE_NUMBERS),
        _chooses("bitwise_not", torch.bitwise_not, kinds=(BOOLS,)),
        _chooses(
            "bucketize",
            lambda x, limits: torch.bucketize(x, limits.sort().values),
            lambda shape: (Signature((shape, (3,))),),
            domain=DISTINCT,
        ),
        # Copies of what the views above see, and of what is written into these.
        _chooses("slice", torch.ops.aten.slice.Tensor, moved(_slices)),
        _chooses("constant_pad_nd", torch.constant_pad_nd, moved(_pads), num_dims=(1, 2, 3)),
        _chooses("expand_copy", lambda x, sizes: torch.expand_copy(x, sizes), moved(_expands)),
        _chooses("diagonal_copy", torch.diagonal_copy, either(each(), each(offset=1)), num_dims=(2, 3)),
        _chooses(
            "split_with_sizes",
            lambda x, sizes, dim: torch.split_with_sizes(x, list(sizes), dim),
            moved(_uneven_splits),
        ),
        _chooses(
            "split_with_sizes_copy",
            lambda x, sizes, dim: torch.split_with_sizes_copy(x, list(sizes), dim),
            moved(_uneven_splits),
        ),
        _chooses("select_scatter", torch.select_scatter, _selected_beside),
        _chooses("slice_scatter", torch.slice_scatter, _sliced_beside),
        _chooses("diag", torch.diag, either(each(), each(diagonal=1)), num_dims=(1, 2)),
        _chooses("nanmedian", torch.nanmedian, reduced(several=False), domain=DISTINCT),
        _chooses("nn.functional.avg_pool1d", functional.avg_pool1d, each(kernel_size=2), num_dims=(3,)),
        _chooses("nn.functional.avg_pool2d", functional.avg_pool2d, each(kernel_size=(2, 1)), num_dims=(3,)),
        # In place, on a copy of the first operand.
        Operator("add in place", _in_place("add_"), either(_smaller_beside, numbers("other", 1.0))),
        _rounds("sub in place", _in_place("sub_"), numbers("other", 1.0)),
        _rounds("mul in place", _in_place("mul_"), either(_smaller_beside, numbers("other", 2.0))),
        _rounds("div in place", _in_place("div_"), numbers("other", 3.0)),
        _chooses("fill in place", _in_place("fill_"), each(value=2.0)),
        _chooses("zero in place", _in_place("zero_")),
        _chooses("copy in place", _in_place("copy_"), _smaller_beside),
        _chooses("masked_fill in place", _in_place("masked_fill_"), _same_mask, kinds=(FLOATS, BOOLS)),
        _chooses("clamp in place", _in_place("clamp_"), each(min=-1.0)),
        _chooses("relu in place", _in_place("relu_")),
        _chooses("neg in place", _in_place("neg_")),
        _rounds("exp in place", _in_place("exp_")),
        _chooses("transpose in place", _in_place("transpose_"), moved(_swaps)),
        _chooses("squeeze in place", _in_place("squeeze_"), moved(_squeezes)),
        _chooses("unsqueeze in place", _in_place("unsqueeze_"), moved(_unsqueezes)),
        # Made like another.
        _chooses("full_like", torch.full_like, each(fill_value=2.0)),
        _chooses("new_zeros", lambda x: x.new_zeros(x.shape)),
        _chooses("new_full", lambda x: x.new_full((3, 2), 2.0)),
        _chooses("new_ones", lambda x: x.new_ones(x.shape)),
        # To another dtype.
        _chooses("double", lambda x: x.double()),
        _chooses("to bfloat16 and back", lambda x: x.to(torch.bfloat16).to(x.dtype)),
    )
}
"""By name."""


def run(name: str, operands: tuple[Any, ...], arguments: Arguments) -> tuple[Any, ...]:
    """Calls the operator; gives its results in order.  Some warn of what becomes NaN, which is judged like all else."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = OPERATORS[name].call(*operands, **dict(arguments))
    return tuple(found) if isinstance(found, tuple | list) else (found,)


@functools.lru_cache(maxsize=2**14)
def signatures_of(name: str, shape: Shape) -> Signatures:
    """Those that the operator takes on tensors of that shape: it has been asked, on one thread, unsharded."""
    operator = OPERATORS[name]
    if len(shape) not in operator.num_dims:
        return ()
    return tuple(signature for signature in operator.form(shape) if _is_taken(name, signature))


def _is_taken(name: str, signature: Signature) -> bool:
    try:
        results_of(name, signature.shapes, signature.arguments, ("float64",) * len(signature.shapes))
    except (RuntimeError, IndexError, ValueError, TypeError):
        return False
    return True


@dataclass(frozen=True)
class Result:
    """What one result of a call looks like.

    Attributes:
        operands: Numbers of the operands of which it has a gradient.
    """

    shape: Shape
    dtype: str
    operands: tuple[int, ...]


@functools.lru_cache(maxsize=2**14)
def results_of(
    name: str, shapes: tuple[Shape, ...], arguments: Arguments, dtypes: tuple[str, ...]
) -> tuple[Result, ...]:
    """The results of a call on operands of such dtypes, as the unsharded operator gives them.

    Raises:
        RuntimeError, IndexError, ValueError, TypeError: torch's own, where the operator does not take them.
    """
    operands = tuple(
        _plain_operand(OPERATORS[name].kind_of(number), shape, dtype)
        for number, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    )
    results = run(name, operands, arguments)
    return tuple(
        Result(tuple(each.shape), str(each.dtype).removeprefix("torch."), _operands_of(each, operands))
        for each in results
    )


def _plain_operand(kind: str, shape: Shape, dtype: str) -> torch.Tensor:
    if kind == BOOLS:
        return torch.ones(shape, dtype=torch.bool, device="cpu")
    if kind in (INDEX, WHOLE):
        return torch.zeros(shape, dtype=torch.int64, device="cpu")
    return torch.full(shape, 0.5, dtype=getattr(torch, dtype), device="cpu").requires_grad_()


def _operands_of(result: torch.Tensor, operands: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
    if not result.requires_grad:
        return ()
    leaves = [(number, operand) for number, operand in enumerate(operands) if operand.requires_grad]
    grads = torch.autograd.grad(
        result, [leaf for _, leaf in leaves], torch.ones_like(result), allow_unused=True, retain_graph=True
    )
    return tuple(number for (number, _), grad in zip(leaves, grads, strict=True) if grad is not None)
