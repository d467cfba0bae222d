"""GTE: encoders of long texts in one or many languages.

Zhang et al. 2024, "mGTE: generalized long-context text representation and reranking models for
multilingual text retrieval", section 2. The layer is a Nomic BERT layer with biases in all maps
except for the gate and the up projection of the feed-forward layer.
"""

import dataclasses
from typing import ClassVar

from ...data.common.fields import Positive, Rate
from ..config import Activation, Count
from ..registry import Family, Preset
from ..rotary_scaling import RotaryScaling
from .encoder import ENCODER_AXES, smallest_inputs
from .nomic_bert import NomicBERT, NomicBertConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class GteConfig(NomicBertConfig):
    """The configuration of a GTE and its head.

    Raises:
      UserError: a size is out of range, or the head needs labels and has none.
    """

    attention_bias: ClassVar[bool] = True  # pyright: ignore[reportIncompatibleMethodOverride]
    feed_forward_output_bias: ClassVar[bool] = True  # pyright: ignore[reportIncompatibleMethodOverride]
    head_activation: ClassVar[Activation | None] = "gelu"

    activation: Activation = "gelu"
    """Non-linearity of the gate in the feed-forward layers."""
    dropout_rate: Rate = 0.1
    """Dropout rate of embeddings, attention weights, the product with the gate, the outputs of both
    sublayers, and the inputs of classifiers."""
    num_token_types: Count = 0
    """Number of token types; token types distinguish the two segments of an input."""
    position_base: Positive = 160_000.0
    """Base of the rotary wavelengths."""

    @property
    def activation_dropout_rate(self) -> float:
        """Dropout rate inside the feed-forward layer, after the product with the gate."""
        return self.dropout_rate


class GTE(NomicBERT):
    """The GTE model with its head."""


PRESETS: dict[str, Preset] = {
    "gte-multilingual-base": Preset(
        GteConfig(
            vocab_size=250_048,
            max_length=8192,
            num_layers=12,
            d_model=768,
            num_heads=12,
            d_ff=3072,
            num_token_types=1,
            attention_dropout=0.0,
            # The authors' "ntk" scaling by 8 multiplies the base by 8 and divides all frequencies.
            rope_scaling=RotaryScaling(kind="linear", factor=8 ** (2 / 64)),
            head="none",
        ),
        "Zhang et al. 2024",
        "305M",
    ),
}

FAMILY = Family(
    config=GteConfig,
    module=GTE,
    presets=PRESETS,
    num_parameters={"gte-multilingual-base": 305_368_320},
    smallest_inputs=smallest_inputs,
    parameter_axes=ENCODER_AXES,
    hf_module="encoders.gte",
)
