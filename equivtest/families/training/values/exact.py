"""Draws values of a perceptron of two layers that no floating-point operation rounds, forward or backward.

Letters: T tokens, K in_features, H hidden_features, N out_features, p significand bits, w ranks;
x (T, K), W1 (H, K), b1 (H,), W2 (N, H), b2 (N,), G (T, N) the cotangent.

Every tensor holds integers times one power of two. ReLU keeps integers, so the forward and the backward are sums of
products of integers. If the magnitudes of the terms of each sum add up to at most 2**p, no order, no blocking and no
division among ranks can round. Because products of three tensors soon exceed 16 bits, W1, W2 and G may be sparse, with
at most `cap` nonzero elements in each row and column. The oracle checks the sums of every draw.

DTensor divides a replicated bias by w when it makes it partial, so b2 is a multiple of w. If gradients are averaged
over the ranks and nothing is trained, G is a multiple of w's odd part, because halving is exact. If something is
trained, G is a multiple of w, so that the updates keep their unit.

In training, a gradient times the learning rate of 2**-k is an integer in the unit of its parameter. The magnitudes are
1, so that the parameters after the first update are integers of few bits. The oracle finds out if the sums of the next
step are exact as well. In float16, whose largest number is 65504, products of the next step could overflow. So
cotangents are divided by a power of two after which no update exceeds `_LARGEST_UPDATE`.

Source: derived here except Partial._partition_value in
torch.distributed.tensor.placement_types (2.13.0).
"""

from __future__ import annotations

import math

import torch

from equivtest.cases.case import at_step
from equivtest.cases.values.integers import generator, hash_of, odd_floor, odd_integers, permutation
from equivtest.families.training.case import PerceptronCase, base_of
from equivtest.families.training.values.exact_plan import WIDE, Plan, choose_plan
from equivtest.tensors import DTYPES, SIGNIFICAND_BITS

_LARGEST_UPDATE = 4  # in units of the parameters, in float16
_LOWEST_EXPONENT = -3  # of a tensor's power of two; float16 stays far above its subnormals
_FINER_BITS = 8  # bits by which the unit of every other part of a batch is finer: two parts exceed 16-bit dtypes


def draw_mlp(case: PerceptronCase, index: int) -> dict[str, torch.Tensor]:
    """Draws the parameters, and the global x and cotangent of each step.

    Modes:
        dense: Odd integers, as dense and as large as the sums allow.
        wide-x, wide-in, wide-out, wide-g: The integers of x, of in_proj's weight, of out_proj's weight or of the
            cotangent take all significand bits of the dtype. Each hidden feature depends on one feature, each output
            depends on one hidden feature, and each output's gradient depends on one token.
    """
    mode, seed = case.values[index]
    shape = (math.prod(case.batch) // case.num_sums, case.in_features, case.hidden_features, case.out_features)
    limit = 2 ** SIGNIFICAND_BITS[case.narrowest]
    has_b1 = "in_proj" in case.biases
    averaged, tied = _divisor(case), bool(case.tied)
    plan = choose_plan(
        *shape, case.world_size, limit, mode, has_b1=has_b1, small=case.trains, averaged=averaged, tied=tied
    )
    parameters = _draw_parameters(plan, mode, seed)
    integers = {name: parameters[name] for name in case.parameter_names()} | _draw_step(
        plan, mode, seed, 1, case.num_sums
    )
    _activate(integers, plan, mode, seed)
    for step in range(2, case.steps + 1):
        integers |= _draw_step(plan, mode, seed, step, case.num_sums)
    for name in integers.keys() - parameters.keys():
        if base_of(name) == "cotangent":
            integers[name] = integers[name] * plan.averaged
    exponents = _exponents(case, mode, seed)
    if case.trains and case.dtype == "float16":
        largest = _largest_gradient(integers, case.tied) / case.num_averaged
        exponents["cotangent"] -= max(0, math.ceil(math.log2(max(1.0, largest) / _LARGEST_UPDATE)))
    shapes = case.shapes()
    return {
        name: (integers[name].double() * 2.0 ** exponents[_of_any_step(name)])  # the integers alone may be too large
        .to(DTYPES[case.dtype_of(name)])
        .view(shapes[name])
        for name in case.given_names()
    }


def _divisor(case: PerceptronCase) -> int:
    averaged = case.num_averaged
    return averaged if case.trains else averaged // (averaged & -averaged)


def _draw_parameters(plan: Plan, mode: str, seed: int) -> dict[str, torch.Tensor]:
    sources = {name: generator(mode, seed, name) for name in ("w1", "b1", "w2", "b2")}
    low = {name: _lowest(mode, name, getattr(plan, name)) for name in ("w1", "w2")}
    cap1, w1 = (min(plan.cap1, plan.cap2), min(plan.w1, plan.w2)) if plan.tied else (plan.cap1, plan.w1)
    return {
        "in_proj.weight": _sparse(plan.hidden, plan.features, cap1, low["w1"], w1, sources["w1"]),
        "in_proj.bias": odd_integers((plan.hidden,), 1, max(1, plan.b1), sources["b1"]),
        "out_proj.weight": _sparse(plan.outputs, plan.hidden, plan.cap2, low["w2"], plan.w2, sources["w2"]),
        "out_proj.bias": odd_integers((plan.outputs,), 1, plan.b2, sources["b2"]) * plan.world_size,
    }


def _draw_step(plan: Plan, mode: str, seed: int, step: int, num_sums: int) -> dict[str, torch.Tensor]:
    """Draws int64 tensors for x and the cotangent of one step, by name.

    The batch has `num_sums` equal parts. If there are several, every second part of the cotangent has a finer unit (a
    smaller power of two), because only the sums within a part must be exact. After an update sums are rounded, and a
    sum over tokens that nearly cancels would give no conclusion. So in later steps most rows of a feature have one
    sign.
    """
    x_name, g_name = at_step(step, "x"), at_step(step, "cotangent")
    x_source, g_source = generator(mode, seed, x_name), generator(mode, seed, g_name)
    low = _lowest(mode, "g", plan.g)
    parts = [_sparse(plan.tokens, plan.outputs, plan.cap_g, low, plan.g, g_source) for _ in range(num_sums)]
    if num_sums > 1:
        parts[::2] = [part << _FINER_BITS for part in parts[::2]]
    x = odd_integers((plan.tokens * num_sums, plan.features), _lowest(mode, "x", plan.x), plan.x, x_source)
    signs, cotangent = x[: plan.tokens].sign(), torch.cat(parts)
    if step > 1:
        signs, cotangent = _leaning(signs, x_source), _leaning(cotangent, g_source)
    signs = signs.repeat(num_sums, 1)  # so that all parts activate the same features
    return {x_name: x.abs() * signs, g_name: cotangent}


def _leaning(rows: torch.Tensor, source: torch.Generator) -> torch.Tensor:
    """Changes signs so that in each column seven in eight elements lie on the same side of zero."""
    sides = odd_integers(rows.shape[1:], 1, 1, source)
    kept = torch.randint(4, rows.shape, generator=source, device="cpu") == 0
    return torch.where(kept, rows, rows.abs() * sides)


def _lowest(mode: str, name: str, largest: int) -> int:
    """Returns the smallest magnitude: above half of `largest` if integers have all significand bits, else 1."""
    return odd_floor(largest // 2 + 1) if WIDE.get(mode) == name else 1


def _sparse(num_rows: int, num_columns: int, cap: int, low: int, high: int, source: torch.Generator) -> torch.Tensor:
    """Returns a matrix of odd integers at random places, at most `cap` in each row and column, and zeros elsewhere."""
    longer = max(num_rows, num_columns)
    rows = permutation(num_rows, source) * (longer // num_rows)
    columns = permutation(num_columns, source) * (longer // num_columns)
    kept = (rows[:, None] + columns) % longer < cap
    return odd_integers((num_rows, num_columns), low, high, source) * kept


def _activate(integers: dict[str, torch.Tensor], plan: Plan, mode: str, seed: int) -> None:
    """Changes the signs of weights and biases of hidden features, in place, so that tokens activate them.

    Each feature belongs to a token, and the next feature to the next token. If the feature's sum of products is
    negative for its token, all signs of the feature change, except in every fourth feature. If all signs were random, a
    case of one token and one hidden feature would be zero half of the time.
    """
    hidden = torch.arange(plan.hidden, device="cpu")
    tokens = (hidden + hash_of(mode, seed, "active token") % plan.tokens) % plan.tokens
    weight = integers["in_proj.weight"]
    bias = integers.get("in_proj.bias", torch.zeros_like(hidden))
    before = (integers["x"][tokens] * weight).sum(1) + bias
    turned = torch.where((before < 0) & (hidden % 4 != 3), -1, 1)
    weight *= turned[:, None]
    bias *= turned


def _largest_gradient(integers: dict[str, torch.Tensor], tied: str) -> int:
    """Returns the largest magnitude in the first step's parameter gradients, in integers.

    A tied weight has two gradients, one per layer, and the sum of both counts too.
    """
    x, cotangent, first = (integers[name] for name in ("x", "cotangent", "in_proj.weight"))
    before = x @ first.T + integers.get("in_proj.bias", 0)
    second = integers.get("out_proj.weight", first.T if tied == "transposed" else first)
    before_grad = (cotangent @ second) * (before > 0)
    sums = (before_grad.T @ x, before_grad.sum(0), cotangent.T @ before.relu(), cotangent.sum(0))
    largest = [int(total.abs().max()) for total in sums]
    return max(*largest, largest[0] + largest[2] if tied else 0)


def _exponents(case: PerceptronCase, mode: str, seed: int) -> dict[str, int]:
    """Returns the exponent of two by which each tensor's integers are multiplied, the same in every step."""
    names = ("x", "in_proj.weight", "out_proj.weight", "cotangent")
    span = 1 - _LOWEST_EXPONENT
    found = {name: _LOWEST_EXPONENT + hash_of(mode, seed, f"{name} exponent") % span for name in names}
    if case.trains:
        found = dict.fromkeys(names, 0) | {"cotangent": round(-math.log2(case.lr))}
    if case.tied:
        found["out_proj.weight"] = found["in_proj.weight"]
    if case.num_sums > 1:
        found["cotangent"] -= _FINER_BITS
    found["in_proj.bias"] = found["x"] + found["in_proj.weight"]
    found["out_proj.bias"] = found["in_proj.bias"] + found["out_proj.weight"]
    return found


def _of_any_step(name: str) -> str:
    return name.rpartition(".")[2] if name.startswith("step") else name
