"""BART and mBART in the Hugging Face format.

The heads for labels and answers are supported only for BART: in an mBART with such a head, the
input of the decoder begins with the last token of the source.
"""

import dataclasses
from collections.abc import Callable

from ....data.common.json_text import JsonObject
from ...encoder_decoders.bart import BartConfig
from ...nn.typing import Params
from ..config_mapping import ConfigMapping, Field, Settings
from ..equivalent_params import with_zeros
from ..form import head_classes, join_forms
from ..tensors.read import TensorSource
from .bart_form import ALIASES, IGNORED, SIZES, BartForm, type_fields

NUM_LABELS = 3
"""Number of labels of a BART whose configuration does not name them."""
# These fields describe how a distilled model was made.
DISTILLED = {"replacing_rate", "save_step", "student_decoder_layers", "student_encoder_layers"}
GENERATION = {"bos_token_id": 0, "eos_token_id": 2, "forced_eos_token_id": 2, "pad_token_id": 1}


def _fields(*, pre_norm: bool) -> ConfigMapping:
    """Returns the fields of BART (`pre_norm` False) or mBART (`pre_norm` True)."""
    return ConfigMapping(
        (
            *SIZES,
            Field("vocab_size", "vocab_size", 50265),
            Field("classifier_dropout", "classifier_dropout", 0.0),
            Field("tie_word_embeddings", "tie_output", True),
            *type_fields(pre_norm=pre_norm, learned_positions=True),
        ),
        IGNORED | DISTILLED,
        ALIASES,
    )


def _own_settings(fields: JsonObject, settings: Settings, source: str) -> None:
    del settings, source
    fields.setdefault("num_labels", NUM_LABELS)


def _own_fields(config: BartConfig) -> JsonObject:
    fields: JsonObject = {"tie_word_embeddings": config.share_embeddings}
    if config.head != "seq2seq_lm":
        fields |= {"decoder_start_token_id": config.start_id, "eos_token_id": config.end_id}
    return fields


BART = BartForm(
    config=BartConfig,
    model_type="bart",
    classes=head_classes(BartConfig, "Bart", seq2seq_lm="BartForConditionalGeneration"),
    fields=_fields(pre_norm=False),
    settings={"norm_position": "post"},
    learned_positions=True,
    own_settings=_own_settings,
    own_fields=_own_fields,
    generation_defaults={**GENERATION, "decoder_start_token_id": 2},
)
MBART = dataclasses.replace(
    BART,
    model_type="mbart",
    classes={"seq2seq_lm": "MBartForConditionalGeneration", "none": "MBartModel"},
    fields=_fields(pre_norm=True),
    settings={"norm_position": "pre"},
    generation_defaults=GENERATION,
)


def as_stored(config: BartConfig, tensors: Callable[[], TensorSource]) -> BartConfig:
    """Sets `output_bias` of the configuration to False if the files have no bias of the logits."""
    if config.output_bias and "final_logits_bias" not in tensors().shapes():
        return dataclasses.replace(config, output_bias=False)
    return config


def as_bart(config: BartConfig, params: Params) -> tuple[BartConfig, Params]:
    """Adds zero biases to attention and to the output, if the model has no such biases."""
    equivalent = dataclasses.replace(
        config, attention_bias=True, output_bias=config.head == "seq2seq_lm"
    )
    return equivalent, with_zeros(equivalent, params)


MAPPING = join_forms(
    (BART, MBART),
    lambda config: MBART if config.norm_position == "pre" else BART,
    to_hf_equivalent=as_bart,
    as_stored=as_stored,
    is_encoder_decoder=True,
)
