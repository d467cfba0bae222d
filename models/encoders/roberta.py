"""RoBERTa: a BERT trained longer, without next-sentence prediction.

Liu et al. 2019, "RoBERTa: a robustly optimized BERT pretraining approach". A RoBERTa has one token
type. Positions begin at 2, because the authors' code reserved rows 0 and 1 of the position table
for padding.
"""

import dataclasses
from typing import ClassVar

from ...data.common.fields import Positive, require
from ..config import Activation, Count
from ..registry import Family, Preset
from .bert import BertConfig
from .encoder import ENCODER_AXES, ENCODER_HEADS, Encoder, head_field, smallest_inputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class RobertaConfig(BertConfig):
    """The configuration of a RoBERTa and its head.

    Raises:
      UserError: a size is out of range, or the head needs labels and has none.
    """

    classifier_drops_twice: ClassVar[bool] = True
    skips_padding: ClassVar[bool] = True
    head_activation: ClassVar[Activation | None] = "gelu"

    norm_eps: Positive = 1e-5
    """Constant added to the variance in layer normalization."""
    num_token_types: Count = 1
    """Number of token types."""
    position_offset: Count = 2  # pyright: ignore[reportIncompatibleVariableOverride]
    """Number of rows of the position table before the row of position 0."""
    head: str = head_field((*ENCODER_HEADS, "causal_lm"))

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not self.position_offset or self.positions == "learned",
            f"position_offset {self.position_offset} requires learned positions, but "
            f"positions are {self.positions!r}: set position_offset to 0",
        )


class RoBERTa(Encoder):
    """The RoBERTa model with its head."""


def _preset(published: str, num_layers: int, d_model: int) -> Preset:
    config = RobertaConfig(
        vocab_size=50265,
        max_length=512,
        num_layers=num_layers,
        d_model=d_model,
        num_heads=d_model // 64,
    )
    return Preset(config, "Liu et al. 2019", published)


PRESETS: dict[str, Preset] = {
    "roberta-base": _preset("125M", 12, 768),
    "roberta-large": _preset("355M", 24, 1024),
}

FAMILY = Family(
    config=RobertaConfig,
    module=RoBERTa,
    presets=PRESETS,
    num_parameters={"roberta-base": 124_697_433, "roberta-large": 355_412_057},
    smallest_inputs=smallest_inputs,
    parameter_axes=ENCODER_AXES,
    hf_module="encoders.roberta",
)
