"""ELECTRA: a BERT that learns to distinguish replaced tokens from original tokens.

Clark et al. 2020, "ELECTRA: pre-training text encoders as discriminators rather than generators",
section 2 and table 6. A small generator (an ELECTRA with the head `masked_lm`) fills in masked
words, and the discriminator finds the tokens that the generator replaced. Embeddings may be
narrower than the layers. As in the authors' code, the body has no pooler; classifiers pool the
first token with gelu.
"""

import dataclasses
from typing import ClassVar

from ..config import Activation, Count, Size
from ..registry import Family, Preset, preset_maker
from .encoder import (
    ENCODER_AXES,
    ENCODER_HEADS,
    Encoder,
    EncoderConfig,
    head_field,
    smallest_inputs,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElectraConfig(EncoderConfig):
    """The configuration of an ELECTRA and its head.

    Raises:
      UserError: a size is out of range, or the head needs labels and has none.
    """

    pooler_activation: ClassVar[str] = "gelu"
    classifier_drops_twice: ClassVar[bool] = True
    head_activation: ClassVar[Activation | None] = "gelu"

    num_token_types: Count = 2  # pyright: ignore[reportIncompatibleVariableOverride]
    """Number of token types; token types distinguish the two segments of an input."""
    d_embedding: Size | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Width of the embeddings. Defaults to D; a linear map projects other widths to D."""
    head: str = head_field(
        (*ENCODER_HEADS, "replaced_token_detection", "causal_lm"),
        default="replaced_token_detection",
    )


class ELECTRA(Encoder):
    """The ELECTRA model with its head."""


_preset = preset_maker(
    ElectraConfig,
    "Clark et al. 2020",
    ("num_layers", "d_model", "num_heads"),
    vocab_size=30522,
    max_length=512,
)

PRESETS: dict[str, Preset] = {
    "electra-small": _preset("14M", (12, 256, 4), d_embedding=128),
    "electra-base": _preset(
        "110M", (12, 768, 12), note="the paper says 110M, computed from its sizes: 109M"
    ),
    "electra-large": _preset("335M", (24, 1024, 16)),
}

# fmt: off
NUM_PARAMETERS = {
    "electra-small": 13_549_057, "electra-base": 109_483_009, "electra-large": 335_142_913,
}
# fmt: on

FAMILY = Family(
    config=ElectraConfig,
    module=ELECTRA,
    presets=PRESETS,
    num_parameters=NUM_PARAMETERS,
    smallest_inputs=smallest_inputs,
    parameter_axes=ENCODER_AXES,
    hf_module="encoders.electra",
)
