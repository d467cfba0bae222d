"""The fields of DeBERTa's `config.json`, in both versions."""

from .....data.common.fields import require
from .....data.common.json_text import JsonObject
from ....encoders.deberta.deberta import DebertaConfig
from ....encoders.deberta.disentangled import PROJECTIONS
from ...config_mapping import (
    ACTIVATIONS,
    Field,
    FixedField,
    Settings,
    take_field,
    typed_field,
    with_defaults,
)
from ...tensors.mapping import WeightsError
from ..encoder_form import BERT_FIELDS

V1_WIDTH, V2_WIDTH = 768, 1536
"""The defaults of `hidden_size`."""
POOLERS = ACTIVATIONS | {"tanh": "tanh"}
V1_FIELDS = (
    *with_defaults(BERT_FIELDS, vocab_size=50265, type_vocab_size=0, layer_norm_eps=1e-7),
    Field("pooler_hidden_act", "pooler_activation", "gelu", POOLERS),
    Field("pooler_dropout", "pooler_dropout", 0.0),
    FixedField("talking_head", (False,)),
)
V2_FIELDS = (
    *with_defaults(
        V1_FIELDS[:-1],
        **{"vocab_size": 128100, "hidden_size": V2_WIDTH, "intermediate_size": 6144},
        **{"num_hidden_layers": 24, "num_attention_heads": 24},
    ),
    Field("share_att_key", "share_projections", False),
    Field("conv_act", "convolution_activation", "tanh", POOLERS),
    Field("conv_groups", "convolution_groups", 1),
)
V1_NUMBERS = {"max_relative_positions": ("position_distance", -1)}
V2_ONLY = {
    "position_buckets": ("position_buckets", -1),
    "conv_kernel_size": ("convolution_size", 0),
}
"""For each field that is a positive number or None: its name in flaxzoo, and the number that means
None in files."""
NORMS = {"none": False, "layer_norm": True}


def read_v1(fields: JsonObject, settings: Settings, source: str, width: int = V1_WIDTH) -> None:
    """Reads the fields of version 1 that need a conversion; see `Form.own_settings`.

    Args:
      fields: all fields of the `config.json`; the fields that are read are removed.
      settings: the dict that receives the settings.
      source: the path of the file, for messages.
      width: the default of `hidden_size`.
    """
    # The terms of the attention scores may be given as text or as a list.
    stated = fields.pop("pos_att_type", None) or []
    words = stated.lower().replace(" ", "").split("|") if isinstance(stated, str) else stated
    words = words if isinstance(words, list) else [words]
    terms = tuple(filter(words.__contains__, PROJECTIONS))
    _require(len(terms) == len(words), "pos_att_type", stated, f"{source}: only c2p and p2c")
    relative, names = take_field(fields, "relative_attention", False, source), " and ".join(terms)
    supported = f"{source}: only True with pos_att_type {names}"
    _require(relative or not terms, "relative_attention", relative, supported)
    # The sizes of the embeddings and of the pooler default to the width of the layers.
    width = typed_field(fields, "hidden_size", width, source)
    narrow = take_field(fields, "embedding_size", width, source)
    pooler = take_field(fields, "pooler_hidden_size", width, source)
    _require(pooler == width, "pooler_hidden_size", pooler, f"{source}: only hidden_size, {width}")
    learned = take_field(fields, "position_biased_input", True, source)
    # If `legacy` is false, the tensors of the masked-word head have other names, and its matrix is
    # tied.
    if not take_field(fields, "legacy", True, source):
        fields["tie_word_embeddings"] = True
    settings |= {
        "d_embedding": None if narrow == width else narrow,
        "distance_terms": terms,
        "positions": "learned" if learned else "none",
        "key_bias": False,
    }
    _read_numbers(fields, settings, source, V1_NUMBERS)
    _drop_unread(settings)


def read_v2(fields: JsonObject, settings: Settings, source: str) -> None:
    """Reads the fields of version 2 that need a conversion; see `Form.own_settings`."""
    heads = typed_field(fields, "num_attention_heads", 24, source)
    width = typed_field(fields, "hidden_size", V2_WIDTH, source)
    size = take_field(fields, "attention_head_size", None, source, kind=int)
    supported = f"{source}: only hidden_size / num_attention_heads"
    _require(size is None or size * heads == width, "attention_head_size", size, supported)
    norm = take_field(fields, "norm_rel_ebd", "none", source)
    _require(norm in NORMS, "norm_rel_ebd", norm, f"{source}: only {' or '.join(NORMS)}")
    # Version 2 ignores the term "none" of small test models, which version 1 would count as a term.
    stated = fields.get("pos_att_type")
    if stated in ("none", ["none"]):
        fields["pos_att_type"] = None
    read_v1(fields, settings, source, V2_WIDTH)
    settings |= {"key_bias": True, "norm_distances": NORMS[norm]}
    _read_numbers(fields, settings, source, V2_ONLY)
    _drop_unread(settings)


def _drop_unread(settings: Settings) -> None:
    """Removes the distance settings if no term of the attention scores depends on distances."""
    if not settings["distance_terms"]:
        names = "position_distance", "position_buckets", "share_projections", "norm_distances"
        settings |= {name: DebertaConfig.__dataclass_fields__[name].default for name in names}


def _require(valid: bool, name: str, value: object, supported: str) -> None:
    """Raises WeightsError if a field is not supported."""
    source, _, only = supported.partition(": ")
    require(valid, f"{source}: {name} {value!r} is not supported: {only}", WeightsError)


def _read_numbers(
    fields: JsonObject, settings: Settings, source: str, numbers: dict[str, tuple[str, int]]
) -> None:
    for name, (ours, unused) in numbers.items():
        number = take_field(fields, name, unused, source)
        settings[ours] = number if number > 0 else None


def write_own(config: DebertaConfig) -> JsonObject:
    """Returns the fields that `read_v1` and `read_v2` read."""
    numbers = V1_NUMBERS | V2_ONLY if config.key_bias else V1_NUMBERS
    fields: JsonObject = {
        "relative_attention": bool(config.distance_terms),
        "pos_att_type": list(config.distance_terms),
        "position_biased_input": config.positions == "learned",
        "legacy": True,
        **{name: getattr(config, ours) or unused for name, (ours, unused) in numbers.items()},
    }
    if config.d_embedding is not None:
        fields["embedding_size"] = config.d_embedding
    # Only files of version 2, where keys have biases, tell whether the distance vectors are
    # normalized.
    if config.key_bias:
        fields["norm_rel_ebd"] = "layer_norm" if config.norm_distances else "none"
    return fields
