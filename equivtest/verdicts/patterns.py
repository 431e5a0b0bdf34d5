"""Finds a pattern that all wrong elements have in common, if the values leave no doubt about it."""

from __future__ import annotations

import torch

Elements = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""(actual, expected, allowed) of the wrong elements, one entry for each rank that has some; 1-D, float64."""


def pattern_of(wrong: Elements) -> str:
    """Returns one sentence that is true of every wrong element. Returns '' if no pattern is certain."""
    actual, expected, allowed = (torch.cat(list(each)) for each in zip(*wrong, strict=True))
    if bool(actual.isnan().all()):
        return "NaN at every wrong element"
    if bool((actual == 0).all()):
        return "zero at every wrong element"
    if len(actual) < 2:
        return ""
    difference = actual - expected
    if bool((difference == difference[0]).all()):
        return f"actual - expected = {float(difference[0]):g} at every wrong element"
    if factor := _common_factor(actual, expected, allowed):
        return f"actual / expected = {factor} at every wrong element"
    if torch.equal(actual.sort().values, expected.sort().values):
        return "the wrong elements hold the right values in another order"
    return ""


def _common_factor(actual: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor) -> str:
    """Returns a factor, to three decimals, if every wrong element is that factor times its right value.

    Returns '' if there is no such factor.

    Derived here: let a be the actual value, e the expected value and b the allowed error. The right value v is within b
    of e, so a factor c with a = c v is between |a| / (|e| + b) and |a| / (|e| - b) in magnitude. The result is ''
    unless the intervals of all wrong elements overlap, and the ends of the overlap are equal to three decimals.
    """
    size, has_sign = expected.abs(), expected.abs() > allowed
    if not bool(has_sign.any()):
        return ""
    sign = (actual * expected)[has_sign].sign()
    least = (actual.abs() / (size + allowed)).max()
    most = (actual.abs() / (size - allowed))[has_sign].min()
    if bool((sign != sign[0]).any()) or not bool(least <= most) or not bool(most.isfinite()):
        return ""
    texts = {f"{float(sign[0] * each):.3f}" for each in (least, most)}
    return texts.pop() if len(texts) == 1 and float(max(texts)) else ""
