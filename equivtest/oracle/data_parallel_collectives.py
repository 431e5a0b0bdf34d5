"""The collectives of ZeRO-3, derived from its partitions."""

from __future__ import annotations

import math

from equivtest.cases.data_parallel import DataParallelCase
from equivtest.cases.perceptron import LAYERS
from equivtest.collective import Collective
from equivtest.oracle.collectives import Collectives
from equivtest.tensors import DTYPES


def document_data_parallel(case: DataParallelCase, rank: int) -> Collectives:
    """Each micro-batch fetches every layer forward, and backward again those that gradients pass through.

    A fetch is one collective of a layer's partitions (all_gather) or of its padded parameters
    (all_reduce); every gradient takes one reduce_scatter of its padded elements.  The backward
    passes through in_proj only where its output needs a gradient.  Where gradients are clipped, each
    step ends with one all_reduce of one float64, a sum of powers or the largest magnitude.

    Source: Rajbhandari et al., ZeRO (2020), sections 5.3 and 7.2.2: parameters are gathered for the
    forward and again for the backward, gradients are reduced and scattered.
    """
    padded = {name: _padded_bytes(case, name) for name in case.parameter_names()}
    layers = {layer: sum(size for name, size in padded.items() if name.startswith(layer)) for layer in LAYERS}
    share = 1 if case.fetch == "all_reduce" else case.world_size
    forward = [Collective(case.fetch, size // share) for size in layers.values()]
    clipping = [Collective("all_reduce", DTYPES["float64"].itemsize)] if case.clips else []
    found: list[Collective] = []
    for step in range(1, case.steps + 1):
        used = LAYERS if case.hidden_requires_grad and not case.stops_at_hidden(step) else LAYERS[1:]
        backward = [Collective(case.fetch, layers[layer] // share, "backward") for layer in used]
        graded = [padded[name] for name in case.graded_parameters(step)]
        backward += [Collective("reduce_scatter", size_bytes, "backward") for size_bytes in graded]
        found += (forward + backward) * case.micro_batches + clipping
    return tuple(found)


def _padded_bytes(case: DataParallelCase, name: str) -> int:
    numel = math.prod(case.shapes()[f"param.{name}"])
    return -(-numel // case.world_size) * case.world_size * DTYPES[case.dtype].itemsize
