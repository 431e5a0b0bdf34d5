"""Modules that round, by name, and another program for each: the same formulas, summed otherwise."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

FEATURES = 6
ABOVE = torch.ones(5, FEATURES).triu(1).bool()
Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Of(nn.Module):
    """A function of x (T, FEATURES) and of one weight (FEATURES, FEATURES)."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.empty(FEATURES, FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.weight)


def of(function: Function) -> Callable[[], nn.Module]:
    return lambda: Of(function)


def _rotated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rotates by angles that the module computes itself."""
    left, right = (x @ weight).chunk(2, -1)
    angles = torch.arange(x.shape[0], dtype=x.dtype)[:, None] / torch.arange(1, 4, dtype=x.dtype)
    return torch.cat([left * angles.cos() - right * angles.sin(), left * angles.sin() + right * angles.cos()], -1)


def _rotated_as_pairs(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rotates by angles that the module computes itself, as complex numbers of at least float32."""
    pairs = torch.view_as_complex((x @ weight).to(torch.promote_types(x.dtype, torch.float32)).reshape(5, 3, 2))
    angles = torch.arange(5)[:, None] / torch.arange(1, 4, dtype=pairs.real.dtype)
    turns = torch.polar(torch.ones_like(angles), angles)
    turns *= 1.5
    return torch.view_as_real(pairs * turns + pairs.conj() - 0.5).flatten(-2).to(x.dtype)


def _taken_away(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Nearly all of it."""
    rows = torch.arange(x.shape[0])
    return (x @ weight).index_add(0, rows, x.flip(1) @ weight.flip(0), alpha=-1) + 1e-6 * x


def stored_in_16_bits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    stored = torch.zeros_like(x, dtype=torch.bfloat16)
    stored[:] = x @ weight
    return stored.to(x.dtype)


def _routed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Each row to the two columns that it has most of."""
    scores, chosen = (x @ weight).topk(2, -1)
    weights = torch.zeros_like(x).scatter(-1, chosen, scores.softmax(-1))
    rows, columns = torch.nonzero(weights.detach(), as_tuple=True)
    return torch.zeros_like(x).index_add(0, rows, x[rows] * weights[rows, columns][:, None])


def _sorted_into_tensors(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Sorts into two tensors that the module made, one of them of integers."""
    values, columns = torch.zeros_like(x), torch.zeros(x.shape, dtype=torch.int64)
    torch.sort((x @ weight).detach(), -1, out=(values, columns))
    return values * x.gather(-1, columns)


def _by_expert(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows in groups, one of them empty, each times an expert's weight; eight columns, as torch asks for 16 bytes."""
    counts = torch.histc(torch.tensor([0.0, 0.0, 2.0, 2.0, 2.0]), bins=3, min=0, max=2)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    rows = torch.cat([x, x[:, :2]], -1)
    columns = torch.cat([weight, weight[:2]])
    experts = torch.stack([torch.cat([columns, columns[:, :2] * factor], -1) for factor in (1.0, 2.0, 3.0)])
    experts = experts.transpose(-2, -1)
    if x.dtype == torch.float64:  # which torch's kernel does not take
        return torch.cat([rows[:2] @ experts[0], rows[2:] @ experts[2]])
    return functional.grouped_mm(rows, experts, offs=ends)


class MaskedHeads(nn.Module):
    """Attention that returns its weights, which uses another kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(FEATURES, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[0], x.shape[0]).triu(1).bool()
        attended, weights = self.heads(x, x, x, attn_mask=mask)
        return torch.cat([attended, weights], -1)


class Cached(nn.Module):
    """Written to memory that it had before."""

    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(5, FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache[:3] = x[:3]
        return self.cache.exp()


def _written(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Writes into its own memory, in place."""
    total = torch.zeros_like(x)
    total += x @ weight
    total[0] = x[0] * 2
    return total.mul_(3).index_add(0, torch.tensor([1, 1]), x[:2])


MODULES: dict[str, Callable[[], nn.Module]] = {
    "layer norm": lambda: nn.LayerNorm(FEATURES),
    "group norm": lambda: nn.GroupNorm(3, FEATURES),
    "rms norm": lambda: nn.RMSNorm(FEATURES, eps=1e-6),
    "rms norm by hand": of(lambda x, w: (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) @ w),
    "softmax": lambda: nn.Softmax(-1),
    "log softmax": lambda: nn.LogSoftmax(-1),
    "masked softmax": of(lambda x, w: (x @ w).masked_fill(torch.ones(x.shape).triu(1).bool(), -torch.inf).softmax(-1)),
    "gelu": nn.GELU,
    "gelu by tanh": lambda: nn.GELU("tanh"),
    "silu": nn.SiLU,
    "sigmoid": nn.Sigmoid,
    "softplus": nn.Softplus,
    "elu": nn.ELU,
    "mish": nn.Mish,
    "glu": lambda: nn.Sequential(nn.Linear(FEATURES, 2 * FEATURES), nn.GLU()),
    "clamp": of(lambda x, w: (x @ w).clamp(-1, 1)),
    "attention": of(lambda x, w: functional.scaled_dot_product_attention(x @ w, x, x @ w.T, is_causal=True)),
    "heads": lambda: nn.TransformerEncoderLayer(FEATURES, 2, 8, dropout=0.0, batch_first=True),
    "normalize": of(lambda x, w: functional.normalize(x, dim=-1) @ w),
    "cosine": of(lambda x, w: functional.cosine_similarity(x, x @ w, dim=-1)),
    "log of sums": of(lambda x, w: torch.logsumexp(x @ w, -1)),
    "deviation": of(lambda x, w: (x @ w).std(-1)),
    "quotient": of(lambda x, w: x / (1 + (x @ w) ** 2)),
    "running sums": of(lambda x, w: torch.cumsum(x @ w, -1)),
    "three factors": of(lambda x, w: torch.einsum("bi,ij,kj->bk", x, w, w)),
    "scaled sums": of(lambda x, w: torch.addmm(x, x, w, beta=0.5, alpha=2.0)),
    "mean squares": of(lambda x, w: functional.mse_loss(x @ w, x)),
    "rotated": of(_rotated),
    "log sigmoid": nn.LogSigmoid,
    "rotated as pairs": of(_rotated_as_pairs),
    "powers of a number": of(lambda x, w: 3.0 ** (x @ w).tanh() + 0.5 ** x.tanh()),
    "products by group": of(_by_expert),
    "written": of(_written),
    "taken away": of(_taken_away),
    "told where": of(lambda x, w: torch.cumsum((x @ w).detach(), -1, out=torch.zeros_like(x)) * x),
    "with integers": of(lambda x, w: torch.cat([x @ w, torch.arange(-2, 3)[:, None]], -1).sigmoid()),
    "summed curves": of(lambda x, w: (x @ w).tanh().sum(-1)),
    "reciprocal": of(lambda x, w: x @ w + (2 + x.square()) ** -1 + (-3 - x.square()) ** -3),
    "masked heads": lambda: MaskedHeads(),
    "scaled mask": of(lambda x, w: ((x @ w) + torch.full((5, 6), -torch.inf).triu(1) / 2).softmax(-1)),
    "masked by the lowest": of(
        lambda x, w: ((x @ w) + torch.zeros(5, 6).to(x.dtype).masked_fill(ABOVE, torch.finfo(x.dtype).min)).softmax(-1)
    ),
    "masked by what is too low for float32": of(
        lambda x, w: ((x @ w) + torch.zeros(5, 6).double().masked_fill(ABOVE, -1e308)).float().softmax(-1).to(x.dtype)
    ),
    "filled with the lowest": of(lambda x, w: (x @ w).masked_fill(ABOVE, torch.finfo(x.dtype).min).softmax(-1)),
    "one less the mask": of(lambda x, w: (x @ w + (1.0 - (~ABOVE).to(x.dtype)) * torch.finfo(x.dtype).min).softmax(-1)),
    "largest": of(lambda x, w: (x @ w).max(-1).values),
    "chosen": of(lambda x, w: (x @ w).softmax(-1).gather(-1, (x @ w).argmin(-1, keepdim=True))),
    "sorted": of(lambda x, w: (x @ w).sort(-1, descending=True).values),
    "sorted into tensors": of(_sorted_into_tensors),
    "routed": of(_routed),
    "convolution": lambda: nn.Conv1d(5, 4, 3, padding=1),
    "convolution in groups": of(lambda x, w: functional.conv1d(x.T, w.reshape(6, 1, 6)[..., :3], groups=6, dilation=2)),
    "convolution of images": of(
        lambda x, w: functional.conv2d(x.reshape(5, 1, 2, 3), w.reshape(4, 1, 3, 3), w[0, :4], stride=2, padding=1)
    ),
    "convolution of a volume": of(
        lambda x, w: functional.conv3d((x @ w).reshape(1, 2, 3, 5, 1), w[:4].reshape(2, 2, 3, 2, 1))
    ),
    "convolution transposed": of(
        lambda x, w: functional.conv_transpose2d(
            x.reshape(5, 2, 3, 1), w.reshape(2, 3, 3, 2), w[0, :6], stride=2, output_padding=1, groups=2
        )
    ),
    "normed images": lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.BatchNorm1d(2, track_running_stats=False)),
    "pooled by the largest": of(lambda x, w: functional.max_pool2d((x @ w).reshape(1, 5, 6), 3, 2, 1)),
    "pooled by the mean": of(lambda x, w: functional.avg_pool2d((x @ w).reshape(1, 5, 6), 3, 2, 1)),
    "pooled to a size": of(lambda x, w: functional.adaptive_avg_pool2d((x @ w).reshape(1, 5, 6), (4, 4))),
    "enlarged": of(lambda x, w: functional.interpolate((x @ w)[None], scale_factor=3)),
    "padded": of(lambda x, w: functional.pad(x @ w, (1, 2), value=3.0)),
    "padded by its border": of(lambda x, w: functional.pad((x @ w)[None], (2, 1, 1, 0), mode="replicate")),
    "masked by numbers": of(lambda x, w: ((x @ w) + torch.ones(5, 6).triu(1).bool() * -1e9).softmax(-1)),
}

MADE_BEFORE = torch.zeros(5, 6)

NARROWER_WITHIN = ("masked by what is too low for float32",)
"""Modules that compute in float32 for inputs of any dtype."""

REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "summed as integers": (
        of(lambda x, w: (x @ w).sum(dtype=torch.int64) * x),
        "no bound is known for a sum in int64 of inexact values",
    ),
    "a quotient of pairs": (
        of(lambda x, w: torch.view_as_real(1 / torch.view_as_complex((x @ w).reshape(5, 3, 2)))),
        "no bound is known for reciprocal of complex numbers",
    ),
    "dropout": (nn.Dropout, "bernoulli_ draws at random"),
    "noise": (of(lambda x, w: x @ w + torch.randn(x.shape)), "randn draws at random"),
    "a negative base": (of(lambda x, w: (-2.0) ** (x @ w)), "no bound is known for pow"),
    "a number": (of(lambda x, w: x * (x @ w).sum().item()), r"no bound is known for item\(\)"),
    "elsewhere": (of(lambda x, w: torch.cumsum((x @ w).detach(), -1, out=MADE_BEFORE) * x), "no bound is known"),
    "shuffled by hand": (of(lambda x, w: (x @ w)[torch.randint_like(torch.arange(5), 5)]), "randint_like draws at"),
    "drawn in place": (of(lambda x, w: (x @ w)[torch.zeros(5).long().random_(5)]), "random_ draws at random"),
    "a sixth in float32": (nn.Hardsigmoid, "no bound is known for hardsigmoid_backward"),
    "shuffled": (of(lambda x, w: (x @ w)[torch.randperm(5)]), "randperm draws at random"),
    "bits": (of(lambda x, w: (x @ w).view(torch.int64) % 2 * x), "no bound is known for view"),
    "written as integers": (
        of(lambda x, w: torch.zeros(5, 6, dtype=torch.int64).copy_(x @ w) * x),
        "no bound is known for copy_",
    ),
    "cached": (Cached, "copy_ writes into a tensor that was made before"),
    "counted": (lambda: nn.BatchNorm1d(FEATURES), "writes into a tensor that was made before"),
}
"""Modules without a bound, and the message."""


class SummedOtherwise(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes products and sums from two shares, with terms in another order, within its context."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._random = random.Random(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name in ("mm", "bmm"):
            return self._product(*args)
        if name == "addmm" and not kwargs:
            return args[0] / 3 + (self._product(*args[1:]) + args[0] / 3) + args[0] / 3
        if name == "convolution" and args[-1] == 1 and not args[6]:
            cut = self._random.randint(1, args[0].shape[1])
            shares = [
                func(args[0][:, some], args[1][:, some], None, *args[3:])
                for some in (slice(cut), slice(cut, None))
                if args[0][:, some].numel()
            ]
            bias = 0 if args[2] is None else args[2].reshape(-1, *[1] * len(args[3]))
            return sum(shares[1:], shares[0]) + bias
        return func(*args, **kwargs)

    def _product(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        terms = list(range(left.shape[-1]))
        self._random.shuffle(terms)
        cut = self._random.randint(0, len(terms))
        shares = [torch.matmul(left[..., some], right[..., some, :]) for some in (terms[:cut], terms[cut:])]
        return shares[0] + shares[1]
