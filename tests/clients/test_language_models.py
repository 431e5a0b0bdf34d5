"""Every language model of transformers that has a tensor-parallel plan and a tiny configuration, under that plan.

A failure here means that the plan of a model type computes something else than the model, forward or backward.
"""

from __future__ import annotations

from tests.clients.next_token import judged

HERE = "tests.clients.language_models:"

DENSE = (
    "apertus", "arcee", "beam", "cohere", "cohere2", "doge", "ernie4_5", "exaone4", "flint", "gemma", "gemma2",
    "gemma3_text", "glm", "glm4", "gpt_neox", "granite", "granite_swa", "helium", "hrm_text", "hyperclovax",
    "internlm3", "iquestcoder", "jais2", "llama", "minicpm3", "ministral", "ministral3", "mistral", "nanochat",
    "nemotron", "olmo", "olmo2", "olmo3", "phi", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "starcoder2",
    "vaultgemma", "youtu",
)  # fmt: skip

HYBRID = (
    "cohere_compass_text", "cwm", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "olmo_hybrid",
    "phi4_multimodal", "qwen3_5_text",
)  # fmt: skip
"""Models with layers of several kinds, or unusual sizes: judged on a few tokens."""

INDEXED = ("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa")
"""Their `topk` takes as many keys as there are tokens; with three tokens or more the first query has several that are
masked, and so equal."""

EXPERTS = (
    "afmoe", "aria_text", "axk1", "bailing_hybrid", "cohere2_moe", "deepseek_v2", "deepseek_v3", "dots1",
    "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite", "granitemoe", "granitemoe_swa",
    "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "jamba", "kolibri1", "laguna", "mellum", "minimax", "minimax_m2",
    "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "solar_open",
    "deepseek_v4", "granitemoehybrid", "hy_v4", "inkling2_text", "inkling_text", "kimi_linear", "lfm2_moe",
    "llama4_text", "longcat_flash", "mimo_v2_flash", "minimax_m3_vl_text", "nemotron_h", "qwen3_5_moe_text",
    "qwen3_next", "qwen4_exp_text",
)  # fmt: skip
"""Models judged on few tokens: a router whose roundings may choose other experts leaves a draw inconclusive."""


for _type in DENSE:
    globals()[_type] = judged(HERE + _type, f"{HERE}tensor_parallel", {"batch": (2, 1), "seq": (5, 3)}, batch="whole")
for _type in INDEXED:
    globals()[_type] = judged(HERE + _type, f"{HERE}tensor_parallel", {"batch": (2,), "seq": (2,)}, batch="whole")
for _type in (*EXPERTS, *HYBRID):
    globals()[_type] = judged(HERE + _type, f"{HERE}tensor_parallel", {"batch": (1,), "seq": (4, 2)}, batch="whole")
inkling2_text_packed = judged(
    f"{HERE}inkling2_text", f"{HERE}packed_experts", {"batch": (1,), "seq": (4, 2)}, batch="whole"
)
for _type in ("llama", "mixtral"):
    globals()[f"{_type}_layers_sharded"] = judged(
        HERE + _type, f"{HERE}layers_sharded", {"batch": (1, 2, 3, 4, 12), "seq": (3,)}, batch="mean of parts"
    )
del _type
