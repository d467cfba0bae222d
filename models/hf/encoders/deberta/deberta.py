"""DeBERTa in the Hugging Face format: `deberta` (version 1) and `deberta-v2` (versions 2, 3)."""

from ....encoders.deberta.deberta import DebertaConfig
from ....encoders.deberta.disentangled import PROJECTIONS
from ...config_mapping import ConfigMapping, Settings
from ...form import head_classes, join_forms
from ...generation_config import NAMES
from ...tensors.layout import BY_HEAD, CONVOLUTION, VECTOR
from ...tensors.mapping import TensorRule, embedding, linear, norm
from ..encoder_form import BERT_LAYER, LEGACY_NAMES, EncoderForm, TokenLogits, as_stored
from .deberta_fields import V1_FIELDS, V2_FIELDS, read_v1, read_v2, write_own

PROJECTED = tuple(f"attention/{name}" for name in ("query", "key", "value"))
V1_NAMES = {"key": "pos_proj", "query": "pos_q_proj"}
"""The names of the distance projections in version 1."""
POOLED = "sequence_classification", "multiple_choice"
IGNORED = NAMES | {"cls_dropout", "padding_idx"}


def _own_rules(config: DebertaConfig, prefix: str) -> list[TensorRule]:
    """Returns the rules of the distance vectors, the convolution and the projections."""
    layer, encoder = f"{prefix}encoder.layer.{{i}}.attention.self", f"{prefix}encoder"
    rules: list[TensorRule] = []
    if config.d_embedding is not None:
        rules += linear("embedding_projection", f"{prefix}embeddings.embed_proj", bias=False)
    if config.distance_terms:
        rules += embedding("distance_embedding", f"{encoder}.rel_embeddings")
    if config.norm_distances:
        rules += norm("distance_norm", f"{encoder}.LayerNorm")
    if config.convolution_size is not None:
        rules += linear("convolution/taps", f"{encoder}.conv.conv", CONVOLUTION)
        rules += norm("convolution", f"{encoder}.conv.LayerNorm")
    # The fused projections of version 1 have no key bias.
    if not config.key_bias:
        kernels = tuple(f"layers/{part}/kernel" for part in PROJECTED)
        rules.append(TensorRule(kernels, f"{layer}.in_proj.weight", BY_HEAD))
        for name in ("query", "value"):
            path = (f"layers/attention/{name}/bias",)
            rules.append(TensorRule(path, f"{layer}.{name[0]}_bias", VECTOR))
    separate = () if config.share_projections else config.distance_terms
    for name in (PROJECTIONS[term] for term in separate):
        stored = f"pos_{name}_proj" if config.key_bias else V1_NAMES[name]
        bias = config.key_bias or name != "key"
        rules += linear(f"layers/attention/position_{name}", f"{layer}.{stored}", bias=bias)
    return rules


# transformers has no class for the head of replaced-token detection, which trained version 3.
CLASSES = head_classes(DebertaConfig, "DebertaV2")
del CLASSES["replaced_token_detection"]
SHARED: Settings = {
    "config": DebertaConfig,
    "embeddings": {
        "token_embedding": "embeddings.word_embeddings",
        "position_embedding": "embeddings.position_embeddings",
        "token_type_embedding": "embeddings.token_type_embeddings",
        "embedding_norm": "embeddings.LayerNorm",
    },
    "token_logits": TokenLogits(
        "cls.predictions.transform.dense",
        "cls.predictions.transform.LayerNorm",
        "cls.predictions.bias",
        "cls.predictions.decoder",
    ),
    "head_parts": {head: {"pooler": "pooler.dense"} for head in POOLED},
    # The tensor names of the head if the field `legacy` is false.
    "older_names": (
        ("cls.predictions.transform.", "lm_predictions.lm_head."),
        ("cls.predictions.", "lm_predictions.lm_head."),
        *LEGACY_NAMES,
    ),
    "other_heads": (
        *("cls.predictions.*", "lm_predictions.*", "mask_predictions.*"),
        "deberta.embeddings.position_embeddings.*",
        # Ignore distance vectors if no term of the attention scores uses them.
        *("deberta.encoder.rel_embeddings.*", "deberta.encoder.LayerNorm.*"),
    ),
    "classifier_rates": dict.fromkeys(POOLED, ("cls_dropout", None)),
    "own_fields": write_own,
    "own_rules": _own_rules,
}


class DebertaForm(EncoderForm[DebertaConfig]):
    """The conversion of one version. In both versions, the tensor names begin with `deberta.`."""

    @property
    def prefix(self) -> str:
        """The prefix of the body's tensors in a model with a head."""
        return "deberta."


V1 = DebertaForm(
    model_type="deberta",
    classes={
        head: name.replace("V2", "") for head, name in CLASSES.items() if head != "multiple_choice"
    },
    fields=ConfigMapping(V1_FIELDS, IGNORED),
    parts={part: name for part, name in BERT_LAYER.items() if part not in PROJECTED},
    allowed={
        **{"num_token_types": (), "positions": (), "convolution_size": (None,)},
        **{"share_projections": (False,), "norm_distances": (False,), "position_buckets": (None,)},
    },
    own_settings=read_v1,
    **SHARED,
)
V2 = DebertaForm(
    model_type="deberta-v2",
    classes=CLASSES,
    fields=ConfigMapping(V2_FIELDS, IGNORED),
    parts={
        **BERT_LAYER,
        **{part: f"attention.self.{part.partition('/')[2]}_proj" for part in PROJECTED},
    },
    allowed={"num_token_types": (), "positions": ()},
    own_settings=read_v2,
    **SHARED,
)
MAPPING = join_forms((V1, V2), lambda config: V2 if config.key_bias else V1, as_stored=as_stored)
