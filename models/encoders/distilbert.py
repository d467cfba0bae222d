"""DistilBERT: half the layers of a BERT, without token types.

Sanh et al. 2019, "DistilBERT, a distilled version of BERT". The pooler of DistilBERT's classifiers
has the activation relu instead of tanh, and a model without a head has no pooler. As in the
authors' code, training applies no dropout to the output of attention.
"""

import dataclasses
from typing import ClassVar

from ..registry import Family, Preset
from .encoder import ENCODER_AXES, Encoder, EncoderConfig, smallest_inputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistilBertConfig(EncoderConfig):
    """The configuration of a DistilBERT and its head.

    Raises:
      UserError: a size is out of range, or the head needs labels and has none.
    """

    pooler_activation: ClassVar[str] = "relu"

    def residual_dropout_rate(self, sublayer: str) -> float:
        """Returns the dropout rate of the output of a sublayer; 0 for attention."""
        return 0.0 if sublayer == "attention" else self.dropout_rate


class DistilBERT(Encoder):
    """The DistilBERT model with its head."""


PRESETS: dict[str, Preset] = {
    "distilbert-base": Preset(
        DistilBertConfig(vocab_size=30522, max_length=512, num_layers=6, d_model=768, num_heads=12),
        "Sanh et al. 2019",
        "66M",
        "computed from its sizes: 67M with the masked-word head, 66M without",
    ),
}

FAMILY = Family(
    config=DistilBertConfig,
    module=DistilBERT,
    presets=PRESETS,
    num_parameters={"distilbert-base": 66_985_530},
    smallest_inputs=smallest_inputs,
    parameter_axes=ENCODER_AXES,
    hf_module="encoders.distilbert",
)
