"""Nomic BERT in the Hugging Face format: the fields of transformers 5, and the authors' fields.

The authors' configuration derives from the configuration of GPT-2, and published files may contain
both kinds of fields.
"""

from ....data.common.fields import require
from ....data.common.json_text import JsonObject, JsonValue
from ...encoders.nomic_bert import NomicBertConfig
from ..config_mapping import ConfigMapping, Settings, typed_field
from ..generation_config import NAMES
from ..tensors.mapping import WeightsError
from .encoder_form import BERT_EMBEDDINGS, TokenLogits
from .rotary_form import (
    LAYERS,
    MODULES,
    rotary_fields,
    rotary_form,
    take_older_values,
    take_positions,
)

OLDER_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "layer_norm_eps",
    "resid_pdrop": "hidden_dropout_prob",
    "embd_pdrop": "hidden_dropout_prob",
    "attn_pdrop": "attention_probs_dropout_prob",
}
OLDER_VALUES: dict[str, JsonValue] = {
    "causal": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "use_rms_norm": False,
}
"""Fields of the authors' files that change the network, and their values in all published files."""
OLDER_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu"}
IGNORED = frozenset(
    """
    dense_seq_output fused_bias_fc fused_dropout_add_ln max_trained_positions n_positions
    pad_vocab_size_multiple parallel_block_tied_norm reorder_and_upcast_attn
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    use_flash_attn use_xentropy
    """.split()
)
"""Fields of the authors' files that have no effect, or only change how the model is computed."""


def _own_settings(fields: JsonObject, settings: Settings, source: str) -> None:
    """Reads the fields of positions, and the fields of the authors' files."""
    take_older_values(fields, OLDER_VALUES, source)
    if (older := fields.pop("activation_function", None)) is not None:
        fields.setdefault("hidden_act", OLDER_ACTIVATIONS.get(str(older), older))
    if (base := fields.pop("rotary_emb_base", None)) is not None:
        fields["rope_theta"] = base
    # In the authors' files, n_positions is the longest input; a scaling begins at the trained
    # length.
    longest = fields.get("n_positions")
    if (factor := fields.pop("rotary_scaling_factor", None)) is not None:
        fields["rope_scaling"] = {"type": "dynamic", "factor": factor}
        longest = fields.get("max_trained_positions", longest)
    if longest is not None:
        fields["max_position_embeddings"] = longest
    take_positions(fields, settings, source, 1_000.0)
    # The heads of this family always have the size D / N.
    size = fields.pop("head_dim", None)
    width = typed_field(fields, "hidden_size", 768, source)
    same = width // typed_field(fields, "num_attention_heads", 12, source)
    problem = f"{source}: head_dim {size!r} is not supported: only {same}"
    require(size in (None, same), problem, WeightsError)


FORM = rotary_form(
    NomicBertConfig,
    "nomic_bert",
    "NomicBert",
    fields=ConfigMapping(
        rotary_fields(
            vocab_size=30_528,
            hidden_act="silu",
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            max_position_embeddings=2048,
        ),
        NAMES | IGNORED,
        OLDER_NAMES,
    ),
    embeddings={**BERT_EMBEDDINGS, "embedding_norm": "emb_ln"},
    layers="encoder.layers.{i}",
    parts={
        ("attention/query", "attention/key", "attention/value"): "attn.Wqkv",
        "attention/output": "attn.out_proj",
        "attention_norm": "norm1",
        "feed_forward/up": "mlp.fc11",
        "feed_forward/gate": "mlp.fc12",
        "feed_forward/down": "mlp.fc2",
        "feed_forward_norm": "norm2",
    },
    token_logits=TokenLogits(
        "cls.predictions.transform.dense",
        "cls.predictions.transform.layer_norm",
        "cls.predictions.bias",
        "cls.predictions.decoder",
    ),
    own_settings=_own_settings,
    modules={
        "embeddings": BERT_EMBEDDINGS,
        "layers": LAYERS,
        "parts": {**MODULES, "feed_forward/down": "mlp.down_proj"},
    },
)
MAPPING = FORM.mapping()
