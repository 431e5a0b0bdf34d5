"""What all wrong elements have in common; said only where it is certain."""

from __future__ import annotations

import torch

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""(actual, expected) at the wrong elements of one rank after the other, 1-D float64."""


def pattern_of(wrong: Pairs) -> str:
    """One sentence that holds of every wrong element, or ''."""
    actual = torch.cat([pair[0] for pair in wrong])
    expected = torch.cat([pair[1] for pair in wrong])
    if bool(actual.isnan().all()):
        return "NaN at every wrong element"
    if bool((actual == 0).all()):
        return "zero at every wrong element"
    if len(actual) < 2:
        return ""
    difference = actual - expected
    if bool((difference == difference[0]).all()):
        return f"actual - expected = {float(difference[0]):g} at every wrong element"
    ratio = actual / expected
    if bool((ratio == ratio[0]).all()) and bool(ratio[0].isfinite()):
        return f"actual / expected = {float(ratio[0]):.3f} at every wrong element"
    if torch.equal(actual.sort().values, expected.sort().values):
        return "the wrong elements hold the right values in another order"
    return ""
