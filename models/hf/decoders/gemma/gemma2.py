"""Gemma 2 in the Hugging Face format."""

from .....data.common.json_text import JsonObject, JsonValue
from ....decoders.gemma.gemma2 import Gemma2Config
from ...config_mapping import ACTIVATIONS, ConfigMapping, Field, FixedField, Settings, typed_field
from ...form import head_classes
from ...generation_config import NAMES
from ..causal_decoder import (
    ATTENTION,
    FEED_FORWARD,
    DecoderForm,
    Parts,
    layer_types_to_hf,
    set_windows,
    size_fields,
    take_layer_types,
)

FOUR_NORMS: Parts = {
    "attention_norm": "input_layernorm",
    "attention_output_norm": "post_attention_layernorm",
    "feed_forward_norm": "pre_feedforward_layernorm",
    "feed_forward_output_norm": "post_feedforward_layernorm",
}
"""The norms of a layer. In Gemma 2, `post_attention_layernorm` normalizes the output of
attention.
"""


WINDOW = 4096
"""The window that transformers assumes if a file states no window."""


def take_windows(
    fields: JsonObject, settings: Settings, source: str, *, num_layers: int, every: int
) -> None:
    """Reads and removes the window fields of a Gemma; sets `window` and `full_layers`.

    Args:
      fields: The content of the file.
      settings: the dict that receives `window` and `full_layers`.
      source: The path of the file, for messages.
      num_layers: The default of `num_hidden_layers`.
      every: n, if every n-th layer attends to all tokens by default.

    Raises:
      WeightsError: A field has a wrong type or does not fit the layers.
    """
    window = fields.pop("sliding_window", WINDOW)
    names = "sliding_window_pattern", "_sliding_window_pattern"
    every_given = next(filter(None, [fields.pop(name, None) for name in names]), every)
    number = typed_field(fields, "num_hidden_layers", num_layers, source)
    every = typed_field({names[0]: every_given}, names[0], every, source)
    windowed = take_layer_types(fields, number, source)
    if windowed is None:
        windowed = [bool((i + 1) % every) for i in range(number)]
    if window is not None:
        set_windows(settings, window, windowed, source)


def _own_settings(fields: JsonObject, settings: Settings, source: str) -> None:
    """Reads the windows and caps; transformers has default caps, and null means no cap."""
    take_windows(fields, settings, source, num_layers=26, every=2)
    fields.setdefault("attn_logit_softcapping", 50.0)
    fields.setdefault("final_logit_softcapping", 30.0)


def own_fields(config: Gemma2Config) -> JsonObject:
    """Returns the window fields."""
    if config.window is None:
        # transformers builds a window mask even if no layer uses it, so write a number.
        full: list[JsonValue] = ["full_attention"] * config.num_layers
        return {"sliding_window": WINDOW, "layer_types": full}
    return {"sliding_window": config.window, "layer_types": layer_types_to_hf(config)}


ACTIVATION = Field(
    "hidden_activation",
    "activation",
    "gelu_pytorch_tanh",
    {"gelu_pytorch_tanh": "gelu_tanh"} | ACTIVATIONS,
)

FORM = DecoderForm(
    config=Gemma2Config,
    model_type="gemma2",
    classes=head_classes(Gemma2Config, "Gemma2"),
    fields=ConfigMapping(
        (
            *size_fields(
                vocab_size=256_000,
                hidden_size=2304,
                intermediate_size=9216,
                num_hidden_layers=26,
                num_attention_heads=8,
                num_key_value_heads=4,
                max_position_embeddings=8192,
                head_dim=256,
                tie_word_embeddings=True,
                activation=ACTIVATION,
            ),
            Field("attention_bias", "attention_bias", False),
            Field("query_pre_attn_scalar", "score_divisor", 256),
            Field("attn_logit_softcapping", "score_cap", None, kind=float),
            Field("final_logit_softcapping", "logit_cap", None, kind=float),
            FixedField("use_bidirectional_attention", (None, False)),
        ),
        # Ignore older names of the activation and the window, which transformers does not read, and
        # the kind of cache.
        ignored=NAMES | {"hidden_act", "sliding_window_size", "cache_implementation"},
    ),
    layer={**ATTENTION, **FEED_FORWARD, **FOUR_NORMS},
    own_settings=_own_settings,
    own_fields=own_fields,
    generation_defaults={"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2},
)
MAPPING = FORM.mapping()
