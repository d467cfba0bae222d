"""GPT-Neo in the Hugging Face format."""

from .....data.common.fields import require
from .....data.common.json_text import JsonObject
from ....decoders.gpt.gpt_neo import GPTNeoConfig
from ...config_mapping import ACTIVATIONS, ConfigMapping, Field, Settings
from ...form import head_classes
from ...generation_config import NAMES
from ...tensors.mapping import WeightsError
from .gpt_form import GPTForm


def _own_settings(fields: JsonObject, settings: Settings, source: str) -> None:
    """Reads the kinds of layers from `attention_types`; `attention_layers` is redundant."""
    types = fields.pop("attention_types", None)
    fields.pop("attention_layers", None)
    window = fields.pop("window_size", 256)
    number = fields.get("num_layers", fields.get("num_hidden_layers", 24))
    # Expand the pairs (kinds, repetitions) to a list with the kind of each layer.
    kinds: list[object] = []
    try:
        for names, times in [[["global", "local"], 12]] if types is None else types:  # pyright: ignore[reportGeneralTypeIssues, reportOptionalIterable, reportAssignmentType]
            kinds += list(names) * times
        known = len(kinds) == number and set(kinds) <= {"global", "local"}
    except (TypeError, ValueError):
        known = False
    require(
        known,
        f'{source}: attention_types {types!r} does not state "global" or "local" for each of '
        f'{number} layers: give it as [[["global", "local"], {number} // 2]]',
        WeightsError,
    )
    local = tuple(i for i, kind in enumerate(kinds) if kind == "local")
    if not local:
        settings["local_window"] = None
        return
    settings["local_window"] = window
    # By default every second layer has the window, beginning with the second layer.
    if local != tuple(range(1, len(kinds), 2)):
        settings["local_layers"] = local


def _own_fields(config: GPTNeoConfig) -> JsonObject:
    windowed = config.windowed_layers if config.local_window else (False,) * config.num_layers
    kinds = ["local" if w else "global" for w in windowed]
    return {
        "attention_types": [[[kind], 1] for kind in kinds],
        "attention_layers": [*kinds],
        **({"window_size": config.local_window} if config.local_window else {}),
    }


FORM = GPTForm(
    config=GPTNeoConfig,
    model_type="gpt_neo",
    classes=head_classes(GPTNeoConfig, "GPTNeo"),
    fields=ConfigMapping(
        (
            Field("vocab_size", "vocab_size", 50_257),
            Field("max_position_embeddings", "max_length", 2048),
            Field("num_layers", "num_layers", 24),
            Field("hidden_size", "d_model", 2048),
            Field("num_heads", "num_heads", 16),
            Field("intermediate_size", "d_ff", None, kind=int),
            Field("activation_function", "activation", "gelu_new", ACTIVATIONS),
            Field("layer_norm_epsilon", "norm_eps", 1e-5),
            Field("resid_dropout", "dropout_rate", 0.0),
            Field("embed_dropout", "embedding_dropout", 0.0),
            Field("attention_dropout", "attention_dropout", 0.0),
            Field("classifier_dropout", "classifier_dropout_rate", 0.1),
            Field("tie_word_embeddings", "tie_output", True),
        ),
        # The summary fields belong to older classes.
        ignored=NAMES
        | {
            *("summary_activation", "summary_first_dropout", "summary_proj_to_labels"),
            *("summary_type", "summary_use_proj", "gradient_checkpointing"),
        },
        aliases={"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
    ),
    allowed={"scale_scores": (False,), "local_window": ()},
    prefix="transformer.",
    tokens="wte",
    layers="h.{i}",
    parts={
        "attention/query": "attn.attention.q_proj",
        "attention/key": "attn.attention.k_proj",
        "attention/value": "attn.attention.v_proj",
        "attention/output": "attn.attention.out_proj",
        "feed_forward/up": "mlp.c_fc",
        "feed_forward/down": "mlp.c_proj",
        "attention_norm": "ln_1",
        "feed_forward_norm": "ln_2",
    },
    body={"position_embedding": "wpe", "final_norm": "ln_f"},
    ignored=("h.*.attn.attention.bias", "h.*.attn.attention.masked_bias"),
    own_settings=_own_settings,
    own_fields=_own_fields,
    generation_defaults={"bos_token_id": 50256, "eos_token_id": 50256},
)
MAPPING = FORM.mapping()
