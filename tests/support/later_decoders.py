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
}
"""The name of a model → its family, and the fields of its configuration besides the sizes."""
HEADS = {"OLMo 2": ("ForSequenceClassification", "Model")}
"""The classes with other heads, for one model of each family."""
