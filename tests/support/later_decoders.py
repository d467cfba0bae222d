"""Small models of transformers, of the decoders that differ from Llama in norms or positions.

`tests/models/hf/test_decoders.py` compares each with the model loaded from its files.
"""

from typing import Any

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "OLMo 2": ("Olmo2", {}),
    "OLMo 2, biases": (
        "Olmo2",
        {
            **{"attention_bias": True, "num_key_value_heads": 1, "head_dim": 10},
            **{"tie_word_embeddings": True, "rms_norm_eps": 0.03, "hidden_act": "gelu"},
        },
    ),
    "OLMo 3": ("Olmo3", {"num_hidden_layers": 5, "sliding_window": 4}),
    "OLMo 3, yarn": (
        "Olmo3",
        {
            **{"sliding_window": 3, "head_dim": 16, "num_key_value_heads": 4},
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {
                    **{"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0},
                    **{"original_max_position_embeddings": 9, "attention_factor": 1.3},
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
            },
        },
    ),
    "Phi-4-mini": (
        "Phi3",
        {
            **{"hidden_size": 32, "tie_word_embeddings": True, "num_key_value_heads": 1},
            "original_max_position_embeddings": 8,
            "rope_parameters": {
                **{"rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 0.75},
                **{"short_factor": [1.0, 1.5, 1.0], "long_factor": [2.0, 9.0, 3.0]},
            },
        },
    ),
    "GPT-NeoX, odd": (
        "GPTNeoX",
        {
            **{"hidden_size": 40, "intermediate_size": 20},
            "rope_parameters": {"rope_theta": 50.0, "partial_rotary_factor": 0.5},
        },
    ),
    "GPT-NeoX, odd and dynamic": (
        "GPTNeoX",
        {
            **{"hidden_size": 40, "intermediate_size": 20},
            "rope_parameters": {
                **{"rope_type": "dynamic", "factor": 2.0},
                **{"rope_theta": 50.0, "partial_rotary_factor": 0.5},
            },
        },
    ),
    "Qwen3 MoE, experts in every second layer": (
        "Qwen3Moe",
        {
            **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 10},
            **{"head_dim": 8, "norm_topk_prob": True, "decoder_sparse_step": 2},
        },
    ),
    "Qwen3 MoE, layers without experts": (
        "Qwen3Moe",
        {
            **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 10},
            **{"head_dim": 6, "mlp_only_layers": [0, 7], "tie_word_embeddings": True},
        },
    ),
    "SmolLM3": ("SmolLM3", {"num_hidden_layers": 5, "mlp_bias": True, "attention_bias": True}),
    "SmolLM3, windows": (
        "SmolLM3",
        {
            **{"no_rope_layers": [1, 0, 0, 1, 1], "use_sliding_window": True, "sliding_window": 4},
            **{"tie_word_embeddings": False, "head_dim": 8},
            "rope_parameters": {"rope_type": "linear", "rope_theta": 50.0, "factor": 3.0},
        },
    ),
    "SmolLM3, layers of windows": (
        "SmolLM3",
        {
            **{"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 3},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "Granite": (
        "Granite",
        {
            **{"embedding_multiplier": 12, "attention_multiplier": 0.3, "logits_scaling": 6.0},
            **{"residual_multiplier": 0.22, "tie_word_embeddings": True},
        },
    ),
    "Granite, biases": (
        "Granite",
        {
            **{"attention_bias": True, "mlp_bias": True, "head_dim": 10, "hidden_act": "gelu"},
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 50.0, "factor": 2.0},
        },
    ),
    "StableLM": ("StableLm", {"hidden_size": 32, "use_qkv_bias": True, "hidden_dropout": 0.1}),
    "StableLM, parallel": (
        "StableLm",
        {
            **{"hidden_size": 32, "qk_layernorm": True, "use_parallel_residual": True},
            **{"tie_word_embeddings": True, "layer_norm_eps": 0.03},
            "rope_parameters": {"rope_theta": 50.0, "partial_rotary_factor": 0.75},
        },
    ),
    "StableLM, all dimensions": (
        "StableLm",
        {
            **{"hidden_size": 32, "qk_layernorm": True, "num_key_value_heads": 1},
            "rope_parameters": {
                **{"rope_type": "linear", "factor": 2.0},
                **{"rope_theta": 50.0, "partial_rotary_factor": 1.0},
            },
        },
    ),
    "Falcon": ("Falcon", {"num_attention_heads": 6, "ffn_hidden_size": 20}),
    "Falcon, biases, all heads": (
        "Falcon",
        {
            **{"multi_query": False, "bias": True, "tie_word_embeddings": False},
            **{"hidden_dropout": 0.2, "attention_dropout": 0.1},
            "rope_parameters": {"rope_type": "linear", "rope_theta": 50.0, "factor": 3.0},
        },
    ),
    "Falcon, groups": (
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "activation": "relu"},
    ),
    "Falcon, groups, one norm": (
        "Falcon",
        {
            **{"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
            "num_ln_in_parallel_attn": 1,
        },
    ),
    "Falcon, ALiBi": (
        "Falcon",
        {
            **{"alibi": True, "parallel_attn": False, "multi_query": False, "bias": True},
            **{"num_attention_heads": 6, "layer_norm_epsilon": 0.03},
        },
    ),
    "Falcon, ALiBi, parallel": ("Falcon", {"alibi": True, "num_attention_heads": 3}),
}
"""The name of a model → its family, and the fields of its configuration besides the sizes."""
HEADS = {
    "OLMo 2": ("ForSequenceClassification", "Model"),
    "SmolLM3": ("ForSequenceClassification", "ForTokenClassification", "Model"),
    "Granite": ("Model",),
    "Falcon, ALiBi": ("ForSequenceClassification", "ForTokenClassification", "Model"),
    "StableLM": ("ForSequenceClassification", "ForTokenClassification", "Model"),
}
"""The classes with other heads, for one model of each family."""
