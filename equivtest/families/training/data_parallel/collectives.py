"""Derives the collectives of a perceptron under ZeRO-3 from its partitions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from equivtest.base.collective import Collective
from equivtest.families.training.case import LAYERS
from equivtest.families.training.data_parallel.case import DataParallelCase
from equivtest.oracle.collectives import Collectives, expected_collectives
from equivtest.tensors import DTYPES


@expected_collectives.register
def data_parallel_collectives(case: DataParallelCase, rank: int) -> Collectives:
    """Returns the collectives of all steps.

    Each micro-batch fetches every layer in the forward. In the backward it fetches every layer through which gradients
    pass. A fetch is one collective of the layer's partitions (all_gather) or of its padded parameters (all_reduce). A
    tied weight that the layer before has fetched is left out; if nothing remains, there is no collective. Every
    gradient takes one reduce_scatter of its padded elements. The backward passes through in_proj only if its output
    needs a gradient. When the hidden activation is recomputed, in_proj is fetched once more, except a weight that
    out_proj uses too. If gradients are clipped, each step ends with one all_reduce of one float64: a sum of powers or
    the largest magnitude.

    Source: Rajbhandari et al., ZeRO (2020), sections 5.3 and 7.2.2: parameters are gathered for the forward and again
    for the backward, gradients are reduced and scattered.
    """
    padded = {name: _padded_bytes(case, name) for name in case.parameter_names()}
    share = 1 if case.fetch == "all_reduce" else case.world_size
    forward = [Collective(case.fetch, size // share) for size in _fetched(case, padded, LAYERS)]
    clipping = [Collective("all_reduce", DTYPES["float64"].itemsize)] if case.clips else []
    found: list[Collective] = []
    for step in range(1, case.steps + 1):
        used = LAYERS[::-1] if case.hidden_requires_grad and not case.stops_at_hidden(step) else LAYERS[1:]
        fetched = list(_fetched(case, padded, used))
        fetched += fetched[1:] if case.computes_hidden_again(step) else []
        backward = [Collective(case.fetch, size // share, "backward") for size in fetched]
        graded = [padded[name] for name in case.graded_parameters(step)]
        backward += [Collective("reduce_scatter", size_bytes, "backward") for size_bytes in graded]
        found += (forward + backward) * case.micro_batches + clipping
    return tuple(found)


def _fetched(case: DataParallelCase, padded: Mapping[str, int], layers: Sequence[str]) -> Iterator[int]:
    """Yields the bytes of each layer's fetch. A parameter that an earlier layer has fetched is not fetched again."""
    fetched: set[str] = set()
    for layer in layers:
        needed = {case.parameter_at(place) for place in case.place_names() if place.startswith(layer)} - fetched
        if needed:
            yield sum(padded[name] for name in needed)
        fetched |= needed


def _padded_bytes(case: DataParallelCase, name: str) -> int:
    numel = math.prod(case.shapes()[f"param.{name}"])
    return -(-numel // case.world_size) * case.world_size * DTYPES[case.dtype].itemsize
