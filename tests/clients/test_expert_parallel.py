"""Mixtures of experts of transformers: whole experts on each rank, as transformers' expert-parallel plans have them.

A failure here means that tokens reach other experts, or other gradients, than in one process.
"""

from __future__ import annotations

from dataclasses import replace

from equivtest import ids, module_property, targets
from equivtest.property import Property

HERE = "tests.clients.expert_parallel:"

EXCHANGED = (
    "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "flex_olmo", "glm4_moe", "gpt_oss", "granitemoe", "jamba", "minimax",
    "minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe",
)  # fmt: skip


def judged(model_type: str, parallelize: str, sizes: dict[str, tuple[int, ...]]) -> Property:
    """Loss, logits and every gradient; each submodule from what the ranks held where it begins."""
    shape = ("batch", "seq")
    divided = parallelize == "batch_divided"
    found = module_property(
        HERE + model_type,
        HERE + parallelize,
        inputs={"input_ids": ids(24, shape), "labels": targets(24, shape)},
        sizes=sizes,
        outputs=("loss", "logits"),
        by_parts=True,
        batch="mean of parts" if divided else "whole",
        needs_world=divided,  # it makes meshes of its own
    )
    return replace(found, requires="transformers")


for _type in EXCHANGED:
    globals()[f"{_type}_exchanged"] = judged(_type, "exchanged", {"batch": (1,), "seq": (4, 2)})
gpt_oss_summed = judged("gpt_oss", "summed", {"batch": (1,), "seq": (4, 2)})
mixtral_batch_divided = judged("mixtral", "batch_divided", {"batch": (12,), "seq": (3,)})
del _type
