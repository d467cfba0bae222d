"""OpenAI GPT and GPT-2 in the Hugging Face format: configuration, classes and tensors."""

from .....data.common.json_text import JsonObject
from ....decoders.gpt.gpt import GPTConfig
from ...config_mapping import ACTIVATIONS, ConfigMapping, Field, FixedField, Settings
from ...equivalent_params import as_gpt2
from ...form import head_classes, join_forms
from ...generation_config import NAMES
from ...tensors.layout import TABLE, TABLE_FROM_HEADS, VECTOR
from .gpt_form import GPTForm

SIZES = (
    Field("n_embd", "d_model", 768),
    Field("n_layer", "num_layers", 12),
    Field("n_head", "num_heads", 12),
    Field("resid_pdrop", "dropout_rate", 0.1),
    Field("embd_pdrop", "embedding_dropout", 0.1),
    Field("attn_pdrop", "attention_dropout", 0.1),
    Field("layer_norm_epsilon", "norm_eps", 1e-5),
    Field("tie_word_embeddings", "tie_output", True),
)
# The summary fields belong to classes with two heads, `n_ctx` is an old name of `n_positions`, and
# special tokens are now part of the vocabulary.
IGNORED = frozenset(
    """
    n_ctx n_special predict_special_tokens summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj
    """.split()
)
ALIASES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
SHARED: Settings = {
    "config": GPTConfig,
    "prefix": "transformer.",
    "layers": "h.{i}",
    # Queries, keys and values are projected by one linear map, and the first axis of every kernel
    # is the input axis.
    "joined": "attn.c_attn",
    "joined_layouts": (TABLE, VECTOR),
    "layout": TABLE,
    "output_layout": TABLE_FROM_HEADS,
    "parts": {
        "attention/output": "attn.c_proj",
        "feed_forward/up": "mlp.c_fc",
        "feed_forward/down": "mlp.c_proj",
        "attention_norm": "ln_1",
        "feed_forward_norm": "ln_2",
    },
    # Buffers of older files: the causal mask, the score of masked positions, and position ids.
    "ignored": ("h.*.attn.bias", "h.*.attn.masked_bias", "position_ids"),
}


def _post_norm(fields: JsonObject, settings: Settings, source: str) -> None:
    del fields, source
    settings |= {"norm_position": "post", "scale_residual_init": False}


OPENAI_GPT = GPTForm(
    **SHARED,
    model_type="openai-gpt",
    classes=head_classes(GPTConfig, "OpenAIGPT", causal_lm="OpenAIGPTLMHeadModel"),
    fields=ConfigMapping(
        (
            *SIZES,
            Field("vocab_size", "vocab_size", 40478),
            Field("n_positions", "max_length", 512),
            # In this family "gelu" has always meant the tanh approximation.
            Field(
                "afn",
                "activation",
                "gelu",
                {"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"},
            ),
        ),
        IGNORED | NAMES,
        ALIASES,
    ),
    allowed={
        "norm_position": ("post",),
        "activation": ("gelu_tanh", "relu", "silu"),
    },
    tokens="tokens_embed",
    body={"position_embedding": "positions_embed"},
    own_settings=_post_norm,
)
GPT2 = GPTForm(
    **SHARED,
    model_type="gpt2",
    classes=head_classes(GPTConfig, "GPT2", causal_lm="GPT2LMHeadModel"),
    fields=ConfigMapping(
        (
            *SIZES,
            Field("vocab_size", "vocab_size", 50257),
            Field("n_positions", "max_length", 1024),
            Field("n_inner", "d_ff", None, kind=int),
            Field("activation_function", "activation", "gelu_new", ACTIVATIONS),
            Field("scale_attn_weights", "scale_scores", True),
            Field("scale_attn_by_inverse_layer_idx", "scale_scores_by_layer", False),
            FixedField("add_cross_attention", (False,)),
        ),
        # This field only changes the precision and the order of the computation of scores.
        IGNORED | NAMES | {"reorder_and_upcast_attn"},
        ALIASES,
    ),
    allowed={"scale_scores": (), "scale_scores_by_layer": ()},
    tokens="wte",
    body={"position_embedding": "wpe", "final_norm": "ln_f"},
    generation_defaults={"bos_token_id": 50256, "eos_token_id": 50256},
)
MAPPING = join_forms(
    (GPT2, OPENAI_GPT),
    lambda config: OPENAI_GPT if config.norm_position == "post" else GPT2,
    to_hf_equivalent=as_gpt2,
)
