"""GPT-J in the Hugging Face format."""

from ....decoders.gpt.gptj import GPTJConfig
from ...config_mapping import ACTIVATIONS, ConfigMapping, Field, with_defaults
from ...form import head_classes
from ...generation_config import NAMES
from .gpt import ALIASES, IGNORED, SIZES
from .gpt_form import GPTForm

_DEFAULTS = {"n_embd": 4096, "n_layer": 28, "n_head": 16, "tie_word_embeddings": False}
_DEFAULTS |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

FORM = GPTForm(
    config=GPTJConfig,
    model_type="gptj",
    classes=head_classes(GPTJConfig, "GPTJ"),
    fields=ConfigMapping(
        (
            *with_defaults(SIZES, **_DEFAULTS),
            Field("vocab_size", "vocab_size", 50_400),
            Field("n_positions", "max_length", 2048),
            Field("n_inner", "d_ff", None, kind=int),
            Field("rotary_dim", "rotary_dim", 64),
            Field("activation_function", "activation", "gelu_new", ACTIVATIONS),
        ),
        IGNORED | NAMES | {"rotary", "scale_attn_weights", "gradient_checkpointing"},
        ALIASES,
    ),
    allowed={"attention_bias": (False,), "rotary_dim": ()},
    prefix="transformer.",
    tokens="wte",
    layers="h.{i}",
    parts={
        "attention/query": "attn.q_proj",
        "attention/key": "attn.k_proj",
        "attention/value": "attn.v_proj",
        "attention/output": "attn.out_proj",
        "feed_forward/up": "mlp.fc_in",
        "feed_forward/down": "mlp.fc_out",
        "attention_norm": "ln_1",
    },
    body={"final_norm": "ln_f"},
    ignored=("h.*.attn.bias", "h.*.attn.masked_bias", "h.*.attn.embed_positions"),
    generation_defaults={"bos_token_id": 50256, "eos_token_id": 50256},
)
MAPPING = FORM.mapping()
