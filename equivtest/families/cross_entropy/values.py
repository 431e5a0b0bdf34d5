"""Draws values of cross entropies: targets on both sides of every shard boundary, and rows whose softmax is exact.

A row has the logits of one position. A row with one logit far above all others has a softmax of one and zeros: if the
exponentials of all others underflow to zero, the sum of all exponentials is exactly 1 and the logarithm of the sum is
0. The logarithm of the softmax is then a difference of logits. If logits are small multiples of a power of two, nothing
rounds, in any order and for any division of the classes.

Source: derived here; exp(0) is 1 and log(1) is 0 in every C library (C11, F.10.3.1 and F.10.3.7).
"""

from __future__ import annotations

import torch

from equivtest.cases.values import draw
from equivtest.cases.values.integers import generator, hash_of, odd_integers, permutation, signs
from equivtest.cases.values.real import nearly_normal, without_subnormals
from equivtest.families.cross_entropy.case import CrossEntropyCase, RefusedCrossEntropyCase
from equivtest.tensors import DTYPES

_SCALES = {"x": (1.0, 0.3, 4.0), "cotangent": (1.0, 0.1, 3.0)}
_SCALES_16_BITS = _SCALES | {"x": (1.0, 1.5, 2.0)}
"""Scales for 16-bit dtypes.

Rows that are nearly even, or nearly one peak, leave few bits of a gradient or a loss there.
"""
_OFFSETS = (0.0, 25.0, -25.0)  # in scales: 100 overflows exp in float32, -100 underflows
PEAK_UNITS = {"float64": 1024.0, "float32": 128.0, "bfloat16": 128.0, "float16": 128.0}
"""Dtype -> distance of a peak from the next logit: exp(-745.2) is zero in float64, exp(-104) in float32."""


@draw.register
def draw_cross_entropy(case: CrossEntropyCase, index: int) -> dict[str, torch.Tensor]:
    """Draws the global logits x, the target (int64), a weight per class if the case has weights, and the cotangent.

    Modes:
        real: Nearly normal logits of several scales, around zero or far from it.
        peaked: Multiples of a power of two. In each position one logit is so far above the others that nothing rounds.
            Weights are 1 to 3, and the mean divides cotangents without a remainder.
    """
    mode, seed = case.values[index]
    target = draw_target(case, mode, seed)
    given = {"target": target.view(case.positions)}
    if case.weighted:
        given["weight"] = _draw_weight(case, mode, seed)
    if mode == "peaked":
        counted = _weight_of_positions(case, target, given.get("weight")).sum()
        given |= _draw_peaked(case, seed, target, counted)
    else:
        given |= _draw_real(case, seed)
    return {name: given[name] for name in case.given_names()}


@draw.register
def draw_refused_cross_entropy(case: RefusedCrossEntropyCase, index: int) -> dict[str, torch.Tensor]:
    """Returns the tensors of a valid case, except that the target or the weight is invalid, as `misfit` says."""
    mode, seed = case.values[index]
    names = ("x", "target", "cotangent", *(("weight",) if case.weighted else ()))
    base = {name: getattr(case, name) for name in ("world_size", "dtype", "values", "positions", "num_classes")}
    base |= {"reduction": case.reduction, "weighted": case.weighted, "requires_grad": case.requires_grad}
    given = {name: draw_cross_entropy(CrossEntropyCase(**base), index)[name] for name in names}
    source = generator(mode, seed, "misfit")
    if case.misfit == "probabilities":
        given["target"] = nearly_normal(case.shapes()["target"], source).abs().to(DTYPES[case.dtype])
    elif case.misfit == "weight":
        given["weight"] = nearly_normal(case.shapes()["weight"], source).abs().to(DTYPES[case.dtype])
    elif case.misfit in ("above", "below"):
        place = hash_of(mode, seed, "misfit") % case.num_positions
        given["target"].view(-1)[place] = case.num_classes if case.misfit == "above" else -1
    return {name: given[name] for name in case.given_names()}


def draw_target(case: CrossEntropyCase, mode: str, seed: int) -> torch.Tensor:
    """Draws the target of each position, as int64 with one dim: a class, or `ignore_index` if the position is ignored.

    Before positions are ignored, every class of `edge_classes` is the target of some position. If there are fewer
    positions than such classes, the targets are classes that follow each other in `edge_classes`.
    """
    source = generator(mode, seed, "target")
    num, edges = case.num_positions, case.edge_classes()
    target = torch.randint(0, case.num_classes, (num,), generator=source, device="cpu")
    first = hash_of(mode, seed, "first edge") % len(edges)
    taken = torch.tensor((edges[first:] + edges[:first])[:num], device="cpu")
    target[permutation(num, source)[: len(taken)]] = taken
    if case.ignored != "none":
        target[slice(None) if case.ignored == "all" else slice(1, None, 2)] = case.ignore_index
    return target


def _weight_of_positions(case: CrossEntropyCase, target: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """Returns the weight of each position's target, in float64. It is 0 if the position is ignored."""
    kept = target != case.ignore_index
    weights = torch.ones(case.num_classes, dtype=torch.float64) if weight is None else weight.double()
    return weights[torch.where(kept, target, 0)] * kept


def _draw_weight(case: CrossEntropyCase, mode: str, seed: int) -> torch.Tensor:
    source = generator(mode, seed, "weight")
    if mode == "peaked":
        return torch.randint(1, 4, (case.num_classes,), generator=source, device="cpu").to(DTYPES[case.dtype])
    return (nearly_normal((case.num_classes,), source).abs() + 0.25).to(DTYPES[case.dtype])


def _draw_real(case: CrossEntropyCase, seed: int) -> dict[str, torch.Tensor]:
    given = {}
    for name, scales in (_SCALES_16_BITS if DTYPES[case.dtype].itemsize == 2 else _SCALES).items():
        value = nearly_normal(case.shapes()[name], generator("real", seed, name))
        offset = _OFFSETS[seed % len(_OFFSETS)] if name == "x" else 0.0
        scale = scales[hash_of("real", seed, f"{name} scale") % len(scales)]
        given[name] = without_subnormals((value + offset) * scale).to(DTYPES[case.dtype])
    return given


def _draw_peaked(
    case: CrossEntropyCase, seed: int, target: torch.Tensor, counted: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Draws x and the cotangent for mode 'peaked'. In each position one class, the peak, lies far above all others.

    The peak has -1 to 1 units of `PEAK_UNITS`, and all other classes have 1 to 3 units less. In the first position that
    counts, the peak is not the target's class, because otherwise the gradient could be all zeros.
    """
    source, shapes = generator("peaked", seed, "x"), case.shapes()
    num, edges = case.num_positions, torch.tensor(case.edge_classes(), device="cpu")
    units = -torch.randint(1, 4, (num, case.num_classes), generator=source, device="cpu")
    peaks = edges[torch.randint(0, len(edges), (num,), generator=source, device="cpu")]
    kept = (target != case.ignore_index).nonzero()[:1, 0]
    peaks[kept] = torch.where(peaks[kept] == target[kept], (target[kept] + 1) % case.num_classes, peaks[kept])
    units[torch.arange(num, device="cpu"), peaks] = 0
    units += torch.randint(-1, 2, (num, 1), generator=source, device="cpu")
    x = (units * PEAK_UNITS[case.dtype]).to(DTYPES[case.dtype])
    x = x.view(*case.positions, case.num_classes).movedim(-1, case.class_dim).contiguous()
    source = generator("peaked", seed, "cotangent")
    if case.reduction == "mean":
        cotangent = signs((), source) * counted.clamp(min=1)
    else:
        cotangent = odd_integers(shapes["cotangent"], 1, 7, source)
    return {"x": x, "cotangent": cotangent.to(DTYPES[case.dtype])}
