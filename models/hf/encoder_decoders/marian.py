"""Marian and Pegasus in the Hugging Face format.

A Pegasus model is a Marian model with pre-norm sublayers and one embedding for source, target and
output.
"""

from ....data.common.fields import require
from ....data.common.json_text import JsonObject
from ...encoder_decoders.transformer import EncoderDecoderConfig
from ..config_mapping import ConfigMapping, Field, FixedField, Settings
from ..equivalent_params import as_marian
from ..form import join_forms
from ..tensors.mapping import WeightsError
from .bart_form import ALIASES, IGNORED, SIZES, BartForm, type_fields

FIXED: Settings = {
    "attention_bias": True,
    "norm_eps": 1e-5,
    "positions": "sinusoidal",
    "position_base": 10_000.0,
    "position_layout": "halves",
}
"""Settings of the family that its `config.json` does not contain."""


def _own_settings(fields: JsonObject, settings: Settings, source: str) -> None:
    """Reads the sizes of the source and target vocabularies, which may be the same vocabulary."""
    source_size = fields.get("vocab_size", 58101)
    # In files without decoder_vocab_size, the source and target vocabularies have equal sizes.
    target_size = fields["decoder_vocab_size"] = fields.get("decoder_vocab_size") or source_size
    if not fields.get("share_encoder_decoder_embeddings", True):
        return
    require(
        source_size == target_size,
        f"{source}: decoder_vocab_size {target_size!r} is not vocab_size {source_size!r}, "
        "though share_encoder_decoder_embeddings is true: set it to false, or make the sizes "
        "equal",
        WeightsError,
    )
    if fields.get("tie_word_embeddings", True):
        settings["source_vocab_size"] = None


def _own_fields(config: EncoderDecoderConfig) -> JsonObject:
    return {
        "vocab_size": config.input_vocab_size,
        "pad_token_id": None,  # the default may be outside the vocabulary
    }


MARIAN = BartForm(
    config=EncoderDecoderConfig,
    model_type="marian",
    classes={"seq2seq_lm": "MarianMTModel", "none": "MarianModel"},
    fields=ConfigMapping(
        (
            *SIZES,
            Field("vocab_size", "source_vocab_size", 58101),
            Field("decoder_vocab_size", "vocab_size", 58101),
            Field("share_encoder_decoder_embeddings", "share_embeddings", True),
            Field("tie_word_embeddings", "tie_output", True),
            *type_fields(pre_norm=False, learned_positions=False),
        ),
        IGNORED,
        ALIASES,
    ),
    settings={**FIXED, "norm_position": "post"},
    learned_positions=False,
    own_settings=_own_settings,
    own_fields=_own_fields,
    generation_defaults={
        "decoder_start_token_id": 58100,
        "eos_token_id": 0,
        "forced_eos_token_id": 0,
        "pad_token_id": 58100,
    },
)
PEGASUS = BartForm(
    config=EncoderDecoderConfig,
    model_type="pegasus",
    classes={"seq2seq_lm": "PegasusForConditionalGeneration", "none": "PegasusModel"},
    fields=ConfigMapping(
        (
            *SIZES,
            Field("vocab_size", "vocab_size", 50265),
            FixedField("tie_word_embeddings", (True,)),
            *type_fields(pre_norm=True, learned_positions=False),
        ),
        IGNORED,
        ALIASES,
    ),
    allowed={"tie_output": (True,), "share_embeddings": (True,)},
    settings={**FIXED, "norm_position": "pre"},
    learned_positions=False,
    own_fields=_own_fields,
    generation_defaults={
        "decoder_start_token_id": 0,
        "eos_token_id": 1,
        "forced_eos_token_id": 1,
        "pad_token_id": 0,
    },
)
MAPPING = join_forms(
    (MARIAN, PEGASUS),
    lambda config: PEGASUS if config.norm_position == "pre" else MARIAN,
    to_hf_equivalent=as_marian,
    is_encoder_decoder=True,
)
