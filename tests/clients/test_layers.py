"""Parallel layers of fairscale and megatron-core, on integers: equal in every dtype."""

from __future__ import annotations

from dataclasses import replace

from equivtest import ids, program
from tests.clients import layers

X_SHAPES = ((1, 4), (2, 4), (3, 4), (2, 3, 4))

fairscale_layers = replace(
    program(layers.block, layers.fairscale_layers, X_SHAPES, batch="whole"), requires="fairscale"
)
megatron_layers = replace(program(layers.block, layers.megatron_layers, X_SHAPES, batch="whole"), requires="megatron")
fairscale_embedding = replace(
    program(
        layers.embedding,
        layers.fairscale_embedding,
        inputs={"input": ids(12, ("batch", "seq"))},
        sizes={"batch": (1, 2, 3), "seq": (2, 3)},
        batch="whole",
    ),
    requires="fairscale",
)
