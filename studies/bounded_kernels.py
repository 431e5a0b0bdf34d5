"""Draws single calls of torch's kernels and computes their running-error bounds, for `studies.bounded_ops`.

Each kernel runs on contiguous and on strided operands, and so do its gradients.  Functions that round to 16 bits in
between are drawn in sizes around the vector length, and in sizes beyond the blocks of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from equivtest.oracle.declared import arithmetic_of
from equivtest.oracle.rounding import Bounded
from equivtest.oracle.running import RunningError
from equivtest.programs.oracle.apart import TakesApart

if TYPE_CHECKING:
    from studies.bounded_ops import Draw

Tensors = dict[str, torch.Tensor]
Call = tuple[Callable[..., torch.Tensor], Tensors]

SIZES = (1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 64, 65, 127)
FEW = (1, 2, 3, 5, 17, 33)
TOKENS = (1, 2, 5, 17, 40, 130)


def _of_one(function: Callable[[torch.Tensor], torch.Tensor], factor: float = 1.0) -> Callable[[Draw], Call]:
    return lambda draw: (lambda x: function(x), {"x": draw.normal(draw.size(FEW), draw.size(SIZES)) * factor})


def _positive(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Draw], Call]:
    return lambda draw: (function, {"x": draw.normal(draw.size(FEW), draw.size(SIZES)).abs() + 0.25})


def _linear(draw: Draw) -> Call:
    features, outputs = draw.size(SIZES), draw.size(SIZES)
    given = {"input": draw.normal(draw.size(FEW), features), "weight": draw.normal(outputs, features)}
    return F.linear, given | ({"bias": draw.normal(outputs)} if draw.size((0, 1)) else {})


def _products(draw: Draw) -> Call:
    batch, rows, terms, columns = draw.size((1, 2, 3)), draw.size(FEW), draw.size(SIZES), draw.size(FEW)
    return torch.bmm, {"input": draw.normal(batch, rows, terms), "mat2": draw.normal(batch, terms, columns)}


def _by_a_vector(draw: Draw) -> Call:
    terms = draw.size(SIZES)
    return torch.mv, {"input": draw.normal(draw.size(FEW), terms), "vec": draw.normal(terms)}


def _scaled_sum(draw: Draw) -> Call:
    rows, terms, columns = draw.size(FEW), draw.size(SIZES), draw.size(FEW)
    given = {"input": draw.normal(rows, columns), "mat1": draw.normal(rows, terms), "mat2": draw.normal(terms, columns)}
    beta, alpha = draw.pick((0.5, 1.0)), draw.pick((2.0, 0.3))
    return lambda **each: torch.addmm(**each, beta=beta, alpha=alpha), given


def _layer_norm(draw: Draw) -> Call:
    features = draw.size(SIZES)
    given = {"input": draw.normal(draw.size(FEW), features) + draw.pick((0.0, 1.0))}
    if draw.size((0, 1, 1)):
        given |= {"weight": draw.normal(features), "bias": draw.normal(features)}
    if draw.size((0, 0, 1)):  # as under autocast
        given = {name: each if name == "input" else each.float() for name, each in given.items()}
    if draw.name == "float64":
        given = {name: each.double() for name, each in given.items()}
    return lambda **each: F.layer_norm(normalized_shape=(features,), **each), given


def _rms_norm(draw: Draw) -> Call:
    features = draw.size(SIZES)
    given = {"input": draw.normal(draw.size(FEW), features), "weight": draw.normal(features)}
    return lambda **each: F.rms_norm(normalized_shape=(features,), eps=1e-5, **each), given


def _cross_entropy(draw: Draw) -> Call:
    rows, classes = draw.size((1, 2, 5, 16, 17, 40)), draw.size((2, 3, 16, 33, 65))
    target = torch.randint(classes, (rows,), generator=draw.source)
    target[0] = -100 if draw.size((0, 0, 1)) else 0
    weight = {"weight": draw.normal(classes).abs() + 0.5} if draw.size((0, 0, 1)) else {}
    reduction = ("mean", "sum", "none")[draw.size((0, 1, 2))]
    smoothing = 0.0 if weight else draw.pick((0.0, 0.1))  # with both, torch writes into what was made before

    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, target, reduction=reduction, label_smoothing=smoothing, **weight)

    return loss, {"x": draw.normal(rows, classes)}


def _embedding(draw: Draw) -> Call:
    rows = draw.size(FEW) + 1
    ids = torch.randint(rows, (draw.size((1, 5, 17, 40)),), generator=draw.source)
    padding, scaled = draw.size((0, 1)) - 1, bool(draw.size((0, 0, 1)))

    def looked_up(weight: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, weight, padding_idx=None if padding < 0 else padding, scale_grad_by_freq=scaled)

    return looked_up, {"weight": draw.normal(rows, draw.size(SIZES))}


def _attention(draw: Draw) -> Call:
    queries, keys, width = draw.size(TOKENS), draw.size(TOKENS), draw.size((1, 5, 8, 16))
    heads, shared = draw.size((2, 4)), draw.size((1, 2))
    shapes = {"query": (heads, queries), "key": (heads // shared, keys), "value": (heads // shared, keys)}
    given = {name: draw.normal(1, *shape, width) for name, shape in shapes.items()}
    how: dict[str, Any] = {"enable_gqa": shared > 1}
    if draw.size((0, 1)):
        how["is_causal"] = True
    elif draw.size((0, 1)):
        how["attn_mask"] = draw.normal(queries, keys)
    return lambda **each: F.scaled_dot_product_attention(**each, **how), given


def _added_rows(draw: Draw) -> Call:
    rows, features = draw.size(FEW), draw.size(FEW)
    ids = torch.randint(rows, (draw.size((1, 5, 17)),), generator=draw.source)
    given = {"input": draw.normal(rows, features), "source": draw.normal(len(ids), features)}
    return lambda **each: torch.index_add(dim=0, index=ids, **each), given


def _squares(draw: Draw) -> Call:
    shape = draw.size(FEW), draw.size(SIZES)
    return F.mse_loss, {"input": draw.normal(*shape), "target": draw.normal(*shape)}


def _of_two(function: Callable[..., torch.Tensor]) -> Callable[[Draw], Call]:
    """Calls a function of two tensors of one shape. Elements of the first are above zero, of the second not near it."""

    def make(draw: Draw) -> Call:
        shape = draw.size(FEW), draw.size(SIZES)
        second = draw.normal(*shape)
        return function, {"input": draw.normal(*shape).abs() + 0.25, "other": second + second.sign() / 4}

    return make


CALLS: dict[str, Callable[[Draw], Call]] = {
    "linear": _linear, "bmm": _products, "mv": _by_a_vector, "addmm": _scaled_sum, "layer_norm": _layer_norm,
    "rms_norm": _rms_norm, "cross_entropy": _cross_entropy, "embedding": _embedding, "attention": _attention,
    "index_add": _added_rows, "mse_loss": _squares,
    "sum": _of_one(lambda x: x.sum(0)), "sum of all": _of_one(lambda x: x.sum()), "mean": _of_one(lambda x: x.mean(-1)),
    "cumsum": _of_one(lambda x: x.cumsum(-1)), "var": _of_one(lambda x: torch.cat([x, 1 + x], -1).var(-1)),
    "softmax": _of_one(lambda x: x.softmax(-1)), "softmax of dim 0": _of_one(lambda x: x.softmax(0)),
    "log_softmax": _of_one(lambda x: x.log_softmax(-1)), "log_softmax of dim 0": _of_one(lambda x: x.log_softmax(0)),
    "silu": _of_one(F.silu, 4.0), "gelu": _of_one(F.gelu, 4.0), "sigmoid": _of_one(torch.sigmoid, 4.0),
    "gelu by tanh": _of_one(lambda x: F.gelu(x, approximate="tanh"), 4.0), "tanh": _of_one(torch.tanh),
    "softplus": _of_one(F.softplus), "mish": _of_one(F.mish), "elu": _of_one(F.elu), "relu": _of_one(F.relu),
    "leaky_relu": _of_one(F.leaky_relu), "no dropout": _of_one(lambda x: F.dropout(x, 0.0)),
    "vector norm": _of_one(lambda x: torch.linalg.vector_norm(x, dim=-1)), "cube": _of_one(lambda x: x**3),
    "square": _of_one(lambda x: x**2), "rsqrt": _positive(torch.rsqrt), "sqrt": _positive(torch.sqrt),
    "power": _positive(lambda x: x**-1.5), "log": _positive(torch.log), "exp": _of_one(torch.exp),
    "logsumexp": _of_one(lambda x: x.logsumexp(-1)), "deviation": _of_one(lambda x: torch.cat([x, 1 + x], -1).std(-1)),
    "glu": _of_one(lambda x: F.glu(torch.cat([x, x], -1))), "erf": _of_one(torch.erf), "sines": _of_one(torch.sin),
    "power by a tensor": _of_two(lambda input, other: input**other),
    "fmod": _of_two(torch.fmod), "remainder": _of_two(torch.remainder),
    "whole quotient": _of_two(lambda input, other: torch.div(input, other, rounding_mode="floor") + input),
    "amin": _of_one(lambda x: x.amin(-1)),
    "norm of order 3": _of_one(lambda x: torch.linalg.vector_norm(x, 3, dim=-1)),
}  # fmt: skip


def kernels(draw: Draw) -> Iterator[tuple[str, torch.Tensor, Bounded]]:
    for name, make in CALLS.items():
        function, given = make(draw)
        cotangent = draw.normal(*function(**given).shape).to(function(**given).dtype)
        counted = RunningError(arithmetic_of(draw.name), draw.size((1, 2, 3)))
        ranged = {key: counted.exactly(each) for key, each in given.items()}
        ranged_cotangent = counted.exactly(cotangent)
        with counted, TakesApart():
            found = _run(function, ranged, ranged_cotangent)
        right = {key: counted.bounded(each) for key, each in found.items()}
        strided = {key: each.mT.contiguous().mT if each.dim() > 1 else each.clone() for key, each in given.items()}
        for tensors in ({key: each.clone() for key, each in given.items()}, strided):
            for key, each in _run(function, tensors, cotangent).items():
                yield f"kernel: {name}, {'output' if key == 'output' else 'gradient'}", each.detach(), right[key]


def _run(function: Callable[..., torch.Tensor], given: Tensors, cotangent: torch.Tensor) -> Tensors:
    for each in given.values():
        each.requires_grad_()
    output = function(**given)
    output.backward(cotangent)
    return {"output": output} | {key: each.grad for key, each in given.items() if each.grad is not None}
