"""Mixtures of experts of transformers: whole experts on each rank, as transformers' expert-parallel plans have them.

A failure here means that tokens reach other experts, or other gradients, than in one process.
"""

from __future__ import annotations

from tests.clients.next_token import judged

HERE = "tests.clients.expert_parallel:"

EXCHANGED = (
    "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "flex_olmo", "glm4_moe", "gpt_oss", "granitemoe", "jamba", "minimax",
    "minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe",
)  # fmt: skip


for _type in EXCHANGED:
    globals()[f"{_type}_exchanged"] = judged(
        HERE + _type, f"{HERE}exchanged", {"batch": (1,), "seq": (4, 2)}, batch="whole"
    )
gpt_oss_summed = judged(f"{HERE}gpt_oss", f"{HERE}summed", {"batch": (1,), "seq": (4, 2)}, batch="whole")
mixtral_batch_divided = judged(
    f"{HERE}mixtral",
    f"{HERE}batch_divided",
    {"batch": (12,), "seq": (3,)},
    batch="mean of parts",
    needs_world=True,  # it makes its own meshes
)
del _type
