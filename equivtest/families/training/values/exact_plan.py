"""Chooses how large and how dense the tensors of a perceptron may be so that none of its sums can round.

Letters and conditions: see `equivtest.families.training.values.exact`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from equivtest.cases.values.integers import odd_floor

WIDE = {"wide-x": "x", "wide-in": "w1", "wide-out": "w2", "wide-g": "g"}
"""Mode -> field of `Plan` that then takes the whole significand."""


@dataclass(frozen=True)
class Plan:
    """Says how large and how dense the tensors of one draw are.

    Attributes:
        tokens, features, hidden, outputs: Numbers of tokens, in_features, hidden_features and out_features.
        x, w1, b1, w2, b2, g: The largest magnitude in x, in the weight and bias of in_proj (1) and of out_proj (2), and
            in the cotangent (g). Each is an odd number, except that b1 is 0 if in_proj has no bias. b2 is later
            multiplied by the world size.
        cap1, cap2, cap_g: Largest number of nonzero elements in a row, and in a column, of in_proj's weight, of
            out_proj's weight and of the cotangent.
        averaged: Factor by which the cotangent is later multiplied.
        tied: True if out_proj's weight is in_proj's weight or its transpose. The shared weight then has the smaller of
            the two caps and the smaller of the two magnitudes.
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
        """Maps caps to the largest sum of the magnitudes of the terms behind one element of an answer.

        A key names the caps on which the sum depends. For example, the key 'cap1 cap2' is for the output, which sums
        products with both weights.
        """
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
    """Returns how large and how dense the tensors of one draw are.

    In mode dense, as many elements are nonzero as fit with magnitudes of 1. Then magnitudes grow as far as they fit. If
    `small` is True, they stay 1. In a mode wide-*, each row and column has one nonzero element, and one tensor is as
    large as fits. out_proj's weight and the cotangent are multiplied by hidden features of up to 1 + (in_proj's bias).
    So they have one bit less if there is a bias. The gradient of a tied weight is a sum over both layers.

    Args:
        limit: Largest sum of the magnitudes of the terms behind one element: 2**p for p significand bits.
        averaged: Factor by which the cotangent is later multiplied.
    """
    b2 = 1 if small else odd_floor(max(1, limit // 8 // world_size))
    plan = Plan(tokens, features, hidden, outputs, world_size, int(has_b1), b2, averaged=averaged, tied=tied)
    if mode != "dense":
        met = averaged * ((1 + plan.b1 if tied or mode in ("wide-out", "wide-g") else 1) + tied)
        wide: dict[str, Any] = {WIDE[mode]: odd_floor((limit - b2 * world_size - 2) // met)}
        return replace(plan, **wide)
    plan = replace(plan, cap1=max(features, hidden), cap2=max(hidden, outputs), cap_g=max(tokens, outputs))
    while not plan.fits(limit):
        plan = _thinner(plan, limit)
    return plan if small else _larger(plan, limit)


def _thinner(plan: Plan, limit: int) -> Plan:
    """Lowers the largest of the caps on which a sum above `limit` depends."""
    names = {name for caps, total in plan.sums().items() if total > limit for name in caps.split()}
    name = max(sorted(names), key=lambda name: getattr(plan, name))
    cap = getattr(plan, name)
    assert cap > 1, f"nothing fits {limit}: {plan}"
    return replace(plan, **{name: cap - max(1, cap // 8)})


def _larger(plan: Plan, limit: int) -> Plan:
    """Raises magnitudes in turn, in large steps first, until no larger plan has all sums within `limit`."""
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
