"""MPNet in the Hugging Face format."""

from ....data.common.json_text import JsonObject
from ...encoders.mpnet import MPNetConfig
from ..config_mapping import ConfigMapping, FixedField, Settings, with_defaults
from ..generation_config import NAMES
from .encoder_form import BERT_EMBEDDINGS, BERT_FIELDS
from .roberta import roberta_form, take_offset

OFFSET = 2
"""The index of the first used row of the position table, for any padding id."""
WITHOUT = ("type_vocab_size", "position_embedding_type", "add_cross_attention")
"""Fields of a BERT that an MPNet does not have."""


def _own_settings(fields: JsonObject, settings: Settings, source: str) -> None:
    """Sets the settings that have no field."""
    del source
    settings["num_token_types"] = 0
    take_offset(fields, settings, OFFSET)


FORM = roberta_form(
    MPNetConfig,
    "mpnet",
    "MPNet",
    fields=ConfigMapping(
        (
            *(
                field
                for field in with_defaults(BERT_FIELDS, vocab_size=30_527)
                if field.hf not in WITHOUT
            ),
            # This field is the number of rows of the table, but transformers always uses 32
            # buckets.
            FixedField("relative_attention_num_buckets", (32,)),
        ),
        NAMES,
    ),
    embeddings={**BERT_EMBEDDINGS, "position_bias": "encoder.relative_attention_bias"},
    parts={
        "attention/query": "attention.attn.q",
        "attention/key": "attention.attn.k",
        "attention/value": "attention.attn.v",
        "attention/output": "attention.attn.o",
        "attention_norm": "attention.LayerNorm",
        "feed_forward/up": "intermediate.dense",
        "feed_forward/down": "output.dense",
        "feed_forward_norm": "output.LayerNorm",
    },
    classifier_rates={},
    allowed={
        "num_token_types": (0,),
        "position_offset": (OFFSET,),
        "position_buckets": (32,),
        "position_distance": (None,),
    },
    own_settings=_own_settings,
)
MAPPING = FORM.mapping()
