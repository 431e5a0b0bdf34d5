"""Values of a perceptron of two layers for which floating point cannot round, in either layer or backward.

Letters: T tokens, K in_features, H hidden_features, N out_features, p significand bits, w ranks;
x (T, K), W1 (H, K), b1 (H,), W2 (N, H), b2 (N,), G (T, N) the cotangent.

Every tensor holds integers times one power of two.  ReLU keeps integers, so the forward and the
backward are sums of products of integers; if the magnitudes of the terms of each sum come to at
most 2**p, no order, no blocking and no division among ranks can round.  As products of three
tensors outgrow 16 bits soon, W1, W2 and G may be sparse: at most `cap` nonzero elements in each
row and column.  The oracle checks the sums of every draw.

DTensor divides a replicated bias by w where it makes it partial, so b2 is a multiple of w.  Where
gradients are averaged over the ranks, G is one: of w's odd part alone where nothing is trained,
since halving is exact, and else of w, so that the updates keep their unit.

Training: a gradient times a learning rate of 2**-k is counted in the same unit as its parameter,
and the magnitudes are 1, so that what the first update leaves is an integer of few bits.  Whether
the sums of the next step are exact as well is for the oracle to find out.  In float16, whose
largest number is 65504, cotangents are smaller by a power of two that leaves no update above
`_LARGEST_UPDATE`: the products of the next step would overflow.

Source: derived here but for Partial._partition_value in
torch.distributed.tensor.placement_types (2.13.0).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from equivtest.cases.integers import SIGNIFICAND_BITS, generator, hash_of, odd_floor, odd_integers, permutation
from equivtest.cases.perceptron import PerceptronCase, at_step, base_of
from equivtest.tensors import DTYPES

_LARGEST_UPDATE = 4  # in units of the parameters, in float16
_LOWEST_EXPONENT = -3  # of a tensor's power of two; float16 stays far above its subnormals
_FINER_BITS = 8  # by which the unit of every other part of a batch is finer: two parts then fit no 16-bit dtype
_WIDE = {"wide-x": "x", "wide-in": "w1", "wide-out": "w2", "wide-g": "g"}


@dataclass(frozen=True)
class Plan:
    """How large and how dense the tensors are: largest magnitudes, all odd, and nonzero elements per line.

    Attributes:
        tokens, features, hidden, outputs: T, K, H, N.
        x, w1, b1, w2, b2, g: Largest magnitudes; b1 is 0 without a bias, b2 is to be multiplied by
            the world size.
        cap1, cap2, cap_g: Nonzero elements in each row and in each column of W1, W2 and G.
        averaged: What G is to be multiplied by.
        tied: Whether W2 is W1 or its transpose: as sparse and as small as the lesser of the two plans.
    """

    tokens: int
    features: int
    hidden: int
    outputs: int
    world_size: int
    b1: int
    b2: int
    x: int = 1
    w1: int = 1
    w2: int = 1
    g: int = 1
    cap1: int = 1
    cap2: int = 1
    cap_g: int = 1
    averaged: int = 1
    tied: bool = False

    def sums(self) -> dict[str, int]:
        """What the magnitudes behind one element come to at most, and which caps that depends on."""
        before = min(self.features, self.cap1) * self.x * self.w1 + self.b1
        after = min(self.hidden, self.cap2) * self.w2 * before + self.b2 * self.world_size
        cotangent = self.g * self.averaged
        hidden_grad = cotangent * self.w2 * min(self.outputs, self.cap_g, self.cap2)
        tokens = min(self.tokens, self.cap_g)
        of_in = min(self.outputs, self.cap2) * self.w2 * tokens * cotangent * self.x
        of_out = tokens * cotangent * before
        grad_x = hidden_grad * self.w1 * min(self.hidden, self.cap1)
        forward = {"cap1": before, "cap1 cap2": after}
        if self.tied:
            return forward | {"cap1 cap2 cap_g": max(grad_x, of_in + of_out)}
        return forward | {"cap1 cap2 cap_g": grad_x, "cap2 cap_g": of_in, "cap1 cap_g": of_out}

    def fits(self, limit: int) -> bool:
        """Whether no sum is above `limit`."""
        return max(self.sums().values()) <= limit


@functools.lru_cache(maxsize=1024)
def choose_plan(
    tokens: int,
    features: int,
    hidden: int,
    outputs: int,
    world_size: int,
    limit: int,
    mode: str,
    *,
    has_b1: bool,
    small: bool,
    averaged: int = 1,
    tied: bool = False,
) -> Plan:
    """The plan of one draw.

    dense: as many nonzero elements as fit with magnitudes of 1, then magnitudes as large as fit;
    `small` leaves them at 1.  wide-*: one nonzero element per line, one tensor as large as fits:
    W2 and G meet hidden features of up to 1 + b1, and so take one bit less where there is a bias; the
    gradient of a tied weight is a sum of both uses.
    """
    b2 = 1 if small else odd_floor(max(1, limit // 8 // world_size))
    plan = Plan(tokens, features, hidden, outputs, world_size, int(has_b1), b2, averaged=averaged, tied=tied)
    if mode != "dense":
        met = averaged * ((1 + plan.b1 if tied or mode in ("wide-out", "wide-g") else 1) + tied)
        wide: dict[str, Any] = {_WIDE[mode]: odd_floor((limit - b2 * world_size - 2) // met)}
        return replace(plan, **wide)
    plan = replace(plan, cap1=max(features, hidden), cap2=max(hidden, outputs), cap_g=max(tokens, outputs))
    while not plan.fits(limit):
        plan = _thinner(plan, limit)
    return plan if small else _larger(plan, limit)


def _thinner(plan: Plan, limit: int) -> Plan:
    """The plan with the largest cap lowered among those that a sum above `limit` depends on."""
    names = {name for caps, total in plan.sums().items() if total > limit for name in caps.split()}
    name = max(sorted(names), key=lambda name: getattr(plan, name))
    cap = getattr(plan, name)
    assert cap > 1, f"nothing fits {limit}: {plan}"
    return replace(plan, **{name: cap - max(1, cap // 8)})


def _larger(plan: Plan, limit: int) -> Plan:
    """The plan with magnitudes raised in turn, in large steps first, until no more fits."""
    for doubling in (True, False):
        raised = True
        while raised:
            raised = False
            for name in ("x", "w2", "g", "w1"):
                magnitude = getattr(plan, name)
                step = magnitude + 1 if doubling else max(2, magnitude // 16 * 2)
                larger = replace(plan, **{name: magnitude + step})
                larger = replace(larger, b1=larger.x * larger.w1 if plan.b1 else 0)  # as large as one product
                if larger.fits(limit):
                    plan, raised = larger, True
    return plan


def draw_mlp(case: PerceptronCase, index: int) -> dict[str, torch.Tensor]:
    """Global x (*leading, K), parameters, cotangent (*leading, N), and x and cotangent of each later step.

    Modes:
        dense: Odd integers, as dense and as large as the sums allow.
        wide-x, wide-in, wide-out, wide-g: x, W1, W2 or G takes the whole significand; each hidden
            feature goes by one feature, each output by one hidden feature, each output's
            gradient comes from one token.
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
    """What the cotangents are a multiple of."""
    averaged = case.num_averaged
    return averaged if case.trains else averaged // (averaged & -averaged)


def _draw_parameters(plan: Plan, mode: str, seed: int) -> dict[str, torch.Tensor]:
    """W1, b1, W2, b2, int64."""
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
    """x and cotangent of one step, so many times T rows, int64.

    Of several parts, whose sums may take more bits, every other cotangent counts in a finer unit.  After an
    update sums are rounded, and one over tokens that nearly cancels would conclude nothing: features lean to one side.
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
    signs = signs.repeat(num_sums, 1)  # so that what is active in one part is in all
    return {x_name: x.abs() * signs, g_name: cotangent}


def _leaning(rows: torch.Tensor, source: torch.Generator) -> torch.Tensor:
    """Signs turned so that of each column, a feature, seven rows in eight lie on one side of zero."""
    sides = odd_integers(rows.shape[1:], 1, 1, source)
    kept = torch.randint(4, rows.shape, generator=source, device="cpu") == 0
    return torch.where(kept, rows, rows.abs() * sides)


def _lowest(mode: str, name: str, largest: int) -> int:
    """The smallest magnitude: half the largest where the whole significand is to be used."""
    return odd_floor(largest // 2 + 1) if _WIDE.get(mode) == name else 1


def _sparse(num_rows: int, num_columns: int, cap: int, low: int, high: int, source: torch.Generator) -> torch.Tensor:
    """Odd integers, at most `cap` of them in each row and each column, else zeros; (rows, columns), int64.

    The places of a row, and those of a column, are distinct modulo the longer side.
    """
    longer = max(num_rows, num_columns)
    rows = permutation(num_rows, source) * (longer // num_rows)
    columns = permutation(num_columns, source) * (longer // num_columns)
    kept = (rows[:, None] + columns) % longer < cap
    return odd_integers((num_rows, num_columns), low, high, source) * kept


def _activate(integers: dict[str, torch.Tensor], plan: Plan, mode: str, seed: int) -> None:
    """Turns the signs of most hidden features so that one token, another for each, activates them.

    With random signs a case of one token and one hidden feature would be zero half of the time.
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
    """The largest magnitude among the first step's gradients of the parameters, summed over all tokens, in units.

    Of a tied weight it is one of either use, or as large as both together.
    """
    x, cotangent, first = (integers[name] for name in ("x", "cotangent", "in_proj.weight"))
    before = x @ first.T + integers.get("in_proj.bias", 0)
    second = integers.get("out_proj.weight", first.T if tied == "transposed" else first)
    before_grad = (cotangent @ second) * (before > 0)
    sums = (before_grad.T @ x, before_grad.sum(0), cotangent.T @ before.relu(), cotangent.sum(0))
    largest = [int(total.abs().max()) for total in sums]
    return max(*largest, largest[0] + largest[2] if tied else 0)


def _exponents(case: PerceptronCase, mode: str, seed: int) -> dict[str, int]:
    """The power of two of each tensor; of later steps' x and cotangent as of the first's."""
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
