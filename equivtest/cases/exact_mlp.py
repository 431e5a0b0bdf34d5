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

import torch

from equivtest.cases.integers import SIGNIFICAND_BITS, generator, hash_of, odd_floor, odd_integers, permutation
from equivtest.cases.perceptron import PerceptronCase, at_step, base_of
from equivtest.tensors import DTYPES

_LARGEST_UPDATE = 4  # in units of the parameters, in float16
_LOWEST_EXPONENT = -3  # of a tensor's power of two; float16 stays far above its subnormals
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

    def sums(self) -> dict[str, int]:
        """What the magnitudes behind one element come to at most, and which caps that depends on."""
        before = min(self.features, self.cap1) * self.x * self.w1 + self.b1
        after = min(self.hidden, self.cap2) * self.w2 * before + self.b2 * self.world_size
        cotangent = self.g * self.averaged
        hidden_grad = cotangent * self.w2 * min(self.outputs, self.cap_g, self.cap2)
        tokens = min(self.tokens, self.cap_g)
        return {
            "cap1": before,
            "cap1 cap2": after,
            "cap1 cap2 cap_g": hidden_grad * self.w1 * min(self.hidden, self.cap1),
            "cap2 cap_g": min(self.outputs, self.cap2) * self.w2 * tokens * cotangent * self.x,
            "cap1 cap_g": tokens * cotangent * before,
        }

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
) -> Plan:
    """The plan of one draw.

    dense: as many nonzero elements as fit with magnitudes of 1, then magnitudes as large as fit;
    `small` leaves them at 1.  wide-*: one nonzero element per line, one tensor as large as fits:
    W2 and G meet hidden features of up to 1 + b1, and so take one bit less where there is a bias.
    """
    b2 = 1 if small else odd_floor(max(1, limit // 8 // world_size))
    plan = Plan(tokens, features, hidden, outputs, world_size, int(has_b1), b2, averaged=averaged)
    if mode != "dense":
        met = averaged * (1 + plan.b1 if mode in ("wide-out", "wide-g") else 1)
        return replace(plan, **{_WIDE[mode]: odd_floor((limit - b2 * world_size - 2) // met)})
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
    shape = (math.prod(case.batch), case.in_features, case.hidden_features, case.out_features)
    limit = 2 ** SIGNIFICAND_BITS[case.dtype]
    has_b1 = "in_proj" in case.biases
    plan = choose_plan(*shape, case.world_size, limit, mode, has_b1=has_b1, small=case.trains, averaged=_divisor(case))
    parameters = _draw_parameters(plan, mode, seed)
    integers = {name: parameters[name] for name in case.parameter_names()} | _draw_step(plan, mode, seed, 1)
    _activate(integers, plan, mode, seed)
    for step in range(2, case.steps + 1):
        integers |= _draw_step(plan, mode, seed, step)
    for name in integers.keys() - parameters.keys():
        if base_of(name) == "cotangent":
            integers[name] = integers[name] * plan.averaged
    exponents = _exponents(case, mode, seed)
    if case.trains and case.dtype == "float16":
        largest = _largest_gradient(integers) / case.num_averaged
        exponents["cotangent"] -= max(0, math.ceil(math.log2(max(1.0, largest) / _LARGEST_UPDATE)))
    shapes = case.shapes()
    return {
        name: integers[name].to(DTYPES[case.dtype]).mul_(2.0 ** exponents[_of_any_step(name)]).view(shapes[name])
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
    return {
        "in_proj.weight": _sparse(plan.hidden, plan.features, plan.cap1, low["w1"], plan.w1, sources["w1"]),
        "in_proj.bias": odd_integers((plan.hidden,), 1, max(1, plan.b1), sources["b1"]),
        "out_proj.weight": _sparse(plan.outputs, plan.hidden, plan.cap2, low["w2"], plan.w2, sources["w2"]),
        "out_proj.bias": odd_integers((plan.outputs,), 1, plan.b2, sources["b2"]) * plan.world_size,
    }


def _draw_step(plan: Plan, mode: str, seed: int, step: int) -> dict[str, torch.Tensor]:
    """x (T, K) and cotangent (T, N) of one step, int64."""
    x_name, g_name = at_step(step, "x"), at_step(step, "cotangent")
    x_source, g_source = generator(mode, seed, x_name), generator(mode, seed, g_name)
    low = _lowest(mode, "g", plan.g)
    return {
        x_name: odd_integers((plan.tokens, plan.features), _lowest(mode, "x", plan.x), plan.x, x_source),
        g_name: _sparse(plan.tokens, plan.outputs, plan.cap_g, low, plan.g, g_source),
    }


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


def _largest_gradient(integers: dict[str, torch.Tensor]) -> int:
    """The largest magnitude among the first step's gradients of the parameters, summed over all tokens, in units."""
    x, cotangent, weight = (integers[name] for name in ("x", "cotangent", "out_proj.weight"))
    before = x @ integers["in_proj.weight"].T + integers.get("in_proj.bias", 0)
    before_grad = (cotangent @ weight) * (before > 0)
    sums = (before_grad.T @ x, before_grad.sum(0), cotangent.T @ before.relu(), cotangent.sum(0))
    return max(int(total.abs().max()) for total in sums)


def _exponents(case: PerceptronCase, mode: str, seed: int) -> dict[str, int]:
    """The power of two of each tensor; of later steps' x and cotangent as of the first's."""
    names = ("x", "in_proj.weight", "out_proj.weight", "cotangent")
    span = 1 - _LOWEST_EXPONENT
    found = {name: _LOWEST_EXPONENT + hash_of(mode, seed, f"{name} exponent") % span for name in names}
    if case.trains:
        found = dict.fromkeys(names, 0) | {"cotangent": round(-math.log2(case.lr))}
    found["in_proj.bias"] = found["x"] + found["in_proj.weight"]
    found["out_proj.bias"] = found["in_proj.bias"] + found["out_proj.weight"]
    return found


def _of_any_step(name: str) -> str:
    return name.rpartition(".")[2] if name.startswith("step") else name
