"""torchtitan's Llama, its own plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from equivtest import ids, module_property
from equivtest.property import Property

HERE = "tests.clients.titan:"


def judged(build: str, parallelize: str, sizes: dict[str, tuple[int, ...]], **how: Any) -> Property:
    found = module_property(
        HERE + build,
        HERE + parallelize,
        inputs={"tokens": ids(24, ("batch", "seq"))},
        sizes=sizes,
        by_parts=True,
        needs_world=True,
        **how,
    )
    return replace(found, requires="torchtitan")


titan_tensor_parallel = judged("llama", "tensor_parallel", {"batch": (2, 1), "seq": (5, 3)}, batch="whole")
titan_cos_sin = judged("cos_sin_llama", "tensor_parallel", {"batch": (2, 1), "seq": (5, 3)}, batch="whole")
titan_sequence_parallel = judged("sequence_llama", "tensor_parallel", {"batch": (1,), "seq": (12,)}, batch="whole")
titan_layers_sharded = judged("llama", "layers_sharded", {"batch": (12,), "seq": (3,)}, batch="sum of parts")
titan_both = judged("llama", "both", {"batch": (12,), "seq": (3,)}, batch="sum of parts", axes=("dp", "tp"))
