"""Sizes of each model type of transformers: common ones, and a type's own.

Source: transformers 5.23.0, the configuration of each type.
"""

from __future__ import annotations

from typing import Any

HEADS, FEATURES, VOCABULARY = 12, 48, 24
"""1, 2, 3 and 4 ranks divide each of them."""

TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": FEATURES, "intermediate_size": FEATURES, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": 4, "max_position_embeddings": 32,
    "moe_intermediate_size": 2 * FEATURES, "shared_expert_intermediate_size": FEATURES,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "sliding_window": 4,
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4,
    "attention_dropout": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "hidden_dropout": 0.0,
    "use_cache": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
"""Small sizes for those entries that a configuration has."""

WIDER = (
    "cohere2_moe", "granitemoe", "granitemoeshared", "hunyuan_v1_moe", "minimax", "minimax_m2", "mixtral", "olmoe",
)  # fmt: skip

GATED_DELTA: dict[str, Any] = {
    "linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_num_key_heads": HEADS,
    "linear_num_value_heads": HEADS, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip

SLIDING: dict[str, Any] = {
    "swa_num_attention_heads": HEADS, "swa_num_key_value_heads": HEADS, "swa_head_dim": 4, "sliding_window_size": 4,
    "d_rel": 4, "rel_extent": 16, "layer_types": ["hybrid_sliding", "hybrid"],
}  # fmt: skip

OF_TYPE: dict[str, dict[str, Any]] = {
    **{key: {"intermediate_size": 2 * FEATURES} for key in WIDER},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("sliding_attention", "full_attention")
        },
    },
    "cwm": {"bos_token_id": 1, "eos_token_id": 2},
    "deepseek_v4": {
        "o_groups": HEADS, "o_lora_rank": 4, "index_n_heads": HEADS, "index_head_dim": 4, "index_topk": 2,
        "hc_mult": 2, "hc_sinkhorn_iters": 2,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 2},
    },
    "dots3_note_text": {
        "index_topk": 2, "index_head_dim": 8, "index_n_heads": HEADS, "shared_experts_intermediate_size": FEATURES,
    },
    "gemma3n_text": {
        "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
        "laurel_rank": 8, "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma4_text": {
        "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "global_head_dim": 8,
    },
    "gemma4_unified_text": {"global_head_dim": 8},
    "granitemoehybrid": {
        "mamba_n_heads": HEADS, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_chunk_size": 4,
        "shared_intermediate_size": FEATURES,
        "layer_types": ["mamba", "attention"],
    },
    "inkling2_text": {**SLIDING, "unpadded_vocab_size": VOCABULARY},
    "inkling_text": SLIDING,
    "kimi_linear": {
        "linear_head_dim": 4, "linear_num_heads": HEADS, "layer_types": ["linear_attention", "full_attention"],
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {
        "ffn_hidden_size": FEATURES, "expert_ffn_hidden_size": 2 * FEATURES, "moe_topk": 2, "zero_expert_num": 2,
    },
    "mimo_v2_flash": {"num_attention_heads": 2 * HEADS},  # layers with a window have twice the heads for keys
    "minimax_m3_vl_text": {
        "dense_intermediate_size": FEATURES, "shared_intermediate_size": FEATURES, "rotary_dim": 4,
        "index_head_dim": 4, "index_block_size": 2, "index_topk_blocks": 2,
    },
    "nemotron_h": {
        "ssm_state_size": 4, "mamba_num_heads": HEADS, "mamba_head_dim": 4, "n_groups": HEADS, "chunk_size": 4,
        "moe_shared_expert_intermediate_size": FEATURES,
    },
    "phi4_multimodal": {
        "vision_config": {
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 28, "crop_size": 28,
        },
        "audio_config": {
            "hidden_size": 16, "intermediate_size": 16, "num_blocks": 1, "num_attention_heads": 2,
            "ext_pw_out_channel": 16, "nemo_conv_channels": 16,
        },
    },
    "qwen3_5_moe_text": GATED_DELTA,
    "qwen3_5_text": GATED_DELTA,
    "qwen3_next": GATED_DELTA,
    "qwen4_exp_text": {
        **GATED_DELTA, "hc_count": 2, "hc_lowrank": 8, "ngram_vocab_size_base": 64, "heads_per_ngram": 2,
        "layer_types": ["linear_attention", "indexed_attention"], "indexer_n_heads": HEADS, "indexer_kv_heads": 1,
        "indexer_head_dim": 4, "indexer_budget": 2, "indexer_compress_ratio": 1, "split_ngram_parts": 1,
        "make_ngram_vocab_size_divisible_by": 1,
    },
    "seed_oss": {"residual_dropout": 0.0},
}  # fmt: skip
"""Further needs of a type: torch's grouped products need rows of 16 bytes, and four ranks have a quarter of each."""
