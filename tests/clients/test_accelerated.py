"""Models that accelerate prepares."""

from __future__ import annotations

from dataclasses import replace

from equivtest import module_property

HERE = "tests.clients.accelerated:"
ROWS = ((2, 3), (3, 3), (4, 3), (5, 3), (7, 3))

accelerated_replicated = replace(
    module_property(HERE + "perceptron", HERE + "replicated", ROWS, batch="mean of parts", needs_world=True),
    requires="accelerate",
)
