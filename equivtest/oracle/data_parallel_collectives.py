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
    calls = [Collective(case.fetch, size // share) for size in layers.values()]
    used = LAYERS if case.hidden_requires_grad else LAYERS[1:]
    calls += [Collective(case.fetch, layers[layer] // share, "backward") for layer in used]
    calls += [Collective("reduce_scatter", padded[name], "backward") for name in case.trained_names()]
    clipping = [Collective("all_reduce", DTYPES["float64"].itemsize)] if case.clips else []
    return tuple((calls * case.micro_batches + clipping) * case.steps)


def _padded_bytes(case: DataParallelCase, name: str) -> int:
    numel = math.prod(case.shapes()[f"param.{name}"])
    return -(-numel // case.world_size) * case.world_size * DTYPES[case.dtype].itemsize
