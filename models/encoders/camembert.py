"""CamemBERT: a RoBERTa for French.

Martin et al. 2020, "CamemBERT: a tasty French language model". CamemBERT has the architecture of
RoBERTa and a SentencePiece vocabulary.
"""

import dataclasses

from ..registry import Family, Preset
from .encoder import ENCODER_AXES, smallest_inputs
from .roberta import RoBERTa, RobertaConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class CamembertConfig(RobertaConfig):
    """The configuration of a CamemBERT and its head.

    Raises:
      UserError: a size is out of range, or the head needs labels and has none.
    """


class CamemBERT(RoBERTa):
    """The CamemBERT model with its head."""


def _preset(published: str, note: str, num_layers: int, d_model: int) -> Preset:
    config = CamembertConfig(
        vocab_size=32_005,
        max_length=512,
        num_layers=num_layers,
        d_model=d_model,
        num_heads=d_model // 64,
    )
    return Preset(config, "Martin et al. 2020", published, note)


PRESETS: dict[str, Preset] = {
    "camembert-base": _preset("110M", "computed from its sizes: 111M", 12, 768),
    "camembert-large": _preset("335M", "computed from its sizes: 337M", 24, 1024),
}

FAMILY = Family(
    config=CamembertConfig,
    module=CamemBERT,
    presets=PRESETS,
    num_parameters={"camembert-base": 110_655_493, "camembert-large": 336_695_557},
    smallest_inputs=smallest_inputs,
    parameter_axes=ENCODER_AXES,
    hf_module="encoders.camembert",
)
