"""RoBERTa in the Hugging Face format."""

import dataclasses
from typing import Any, TypeVar, cast

from ....data.common.fields import NonNegativeInt, expectation, require
from ....data.common.json_text import JsonObject
from ...encoders.roberta import RobertaConfig
from ..config_mapping import ConfigMapping, Settings, with_defaults
from ..form import head_classes
from ..tensors.mapping import WeightsError
from .bert import IGNORED, IS_DECODER
from .encoder_form import BERT_FIELDS, CLASSIFIER_RATE, EncoderForm, TokenLogits

Config = TypeVar("Config", bound=RobertaConfig)


def _own_settings(fields: JsonObject, settings: Settings, source: str) -> None:
    """Reads the number of unused rows at the beginning of the position table."""
    pad_id = fields.get("pad_token_id", 1)
    require(
        not expectation(pad_id, NonNegativeInt),
        f"{source}: pad_token_id {pad_id!r} is not supported: RoBERTa counts its positions from "
        "this id, so give the id of the model's training (usually 1)",
        WeightsError,
    )
    take_offset(fields, settings, cast(int, pad_id) + 1)


def take_offset(fields: JsonObject, settings: Settings, offset: int) -> None:
    """Sets the first used row of the position table; `max_length` excludes the rows before it."""
    settings["position_offset"] = offset
    rows = fields.get("max_position_embeddings", 512)
    fields["max_position_embeddings"] = rows - offset if isinstance(rows, int) else rows


def _own_fields(config: RobertaConfig) -> JsonObject:
    offset = config.position_offset
    problem = "roberta has no position_offset 0: train the model with 2 to export it"
    require(offset, problem, WeightsError)
    return {
        "pad_token_id": offset - 1,
        "max_position_embeddings": config.max_length + offset,
    }


def _in_generate(config: Config) -> Config:
    """Returns the configuration of a model whose positions start at 0.

    transformers' `generate` counts positions from 0. In the forward pass, both transformers and
    flaxzoo start after the unused rows.
    """
    longer = config.max_length + config.position_offset
    return dataclasses.replace(config, position_offset=0, max_length=longer)


def roberta_form(
    config: type[Config], model_type: str, name: str, **differences: Any
) -> EncoderForm[Config]:
    """Returns the conversion of RoBERTa, or of a family with the same tensors.

    Args:
      config: The configuration of the family.
      model_type: The name of the family in `config.json`.
      name: The prefix of the names of its classes in transformers.
      **differences: Fields of the conversion that differ from RoBERTa's.
    """
    usual: Settings = {
        "fields": ConfigMapping((IS_DECODER, *BERT_FIELDS), IGNORED),
        "token_logits": TokenLogits(
            "lm_head.dense", "lm_head.layer_norm", "lm_head.bias", "lm_head.decoder"
        ),
        "head_parts": {
            "sequence_classification": {
                "pooler": "classifier.dense",
                "classifier": "classifier.out_proj",
            }
        },
        "classifier_rates": {
            "sequence_classification": CLASSIFIER_RATE,
            "token_classification": CLASSIFIER_RATE,
        },
        "own_settings": _own_settings,
        "own_fields": _own_fields,
        "in_generate": _in_generate,
        "generation_defaults": {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1},
    }
    return EncoderForm(
        config=config,
        model_type=model_type,
        classes=head_classes(config, name),
        **{**usual, **differences},
    )


VOCABULARY = with_defaults(BERT_FIELDS, vocab_size=50265)
"""The fields of a BERT, with the default vocabulary size of RoBERTa."""
FORM = roberta_form(
    RobertaConfig, "roberta", "Roberta", fields=ConfigMapping((IS_DECODER, *VOCABULARY), IGNORED)
)
MAPPING = FORM.mapping()
