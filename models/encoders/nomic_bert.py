"""Nomic BERT: a BERT with rotary positions and gated feed-forward layers.

Nussbaum et al. 2024, "Nomic Embed: training a reproducible long context text embedder". As in the
authors' code, norms follow each residual sum, and the projections of a layer have no
biases. `gte.py` derives its layer from the layer of Nomic BERT.
"""

import dataclasses
from typing import Any, ClassVar

from ...data.common.fields import Positive, Rate
from ..config import Activation, Count, PositionKind
from ..nn.layers import GatedFeedForward
from ..registry import Family, Preset
from ..rotary_scaling import RotaryScaling
from .encoder import (
    ENCODER_AXES,
    Encoder,
    EncoderConfig,
    PostNormLayer,
    head_field,
    smallest_inputs,
)

HEADS = ("none", "masked_lm", "sequence_classification", "token_classification")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NomicBertConfig(EncoderConfig):
    """The configuration of a Nomic BERT and its head.

    Raises:
      UserError: a size is out of range, or the head needs labels and has none.
    """

    use_bias: ClassVar[bool] = False  # pyright: ignore[reportIncompatibleMethodOverride]

    activation: Activation = "silu"
    """Non-linearity of the gate in the feed-forward layers."""
    dropout_rate: Rate = 0.0
    """Dropout rate of embeddings, attention weights, the outputs of both sublayers, and the inputs
    of classifiers."""
    num_token_types: Count = 2  # pyright: ignore[reportIncompatibleVariableOverride]
    """Number of token types; token types distinguish the two segments of an input."""
    positions: PositionKind = "rotary"
    """How the model represents positions; every published model uses rotary positions."""
    position_base: Positive = 1_000.0
    """Base of the rotary wavelengths."""
    rope_scaling: RotaryScaling | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """How the rotary frequencies are scaled."""
    head: str = head_field(HEADS)


class GatedPostNormLayer(PostNormLayer):
    """A post-norm layer of self-attention and a gated feed-forward block."""

    feed_forward = GatedFeedForward


class NomicBERT(Encoder):
    """The Nomic BERT model with its head."""

    layer = GatedPostNormLayer


def _preset(**fields: Any) -> NomicBertConfig:
    return NomicBertConfig(
        vocab_size=30_528, num_layers=12, d_model=768, num_heads=12, d_ff=3072, **fields
    )


PRESETS: dict[str, Preset] = {
    "nomic-bert-2048": Preset(_preset(max_length=2048), "Nussbaum et al. 2024", "137M"),
    "nomic-embed-text-v1.5": Preset(
        _preset(max_length=8192, head="none"), "Nussbaum et al. 2024", "137M"
    ),
}

FAMILY = Family(
    config=NomicBertConfig,
    module=NomicBERT,
    presets=PRESETS,
    num_parameters={"nomic-bert-2048": 137_354_304, "nomic-embed-text-v1.5": 136_731_648},
    smallest_inputs=smallest_inputs,
    parameter_axes=ENCODER_AXES,
    hf_module="encoders.nomic_bert",
)
