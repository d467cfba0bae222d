"""XLM-R: a RoBERTa for 100 languages.

Conneau et al. 2020, "Unsupervised cross-lingual representation learning at scale". XLM-R has the
architecture of RoBERTa and a SentencePiece vocabulary. Many multilingual embedders and rerankers
are fine-tuned from XLM-R: multilingual E5 (Wang et al. 2024) and, with 8,192 positions, BGE-M3
(Chen et al. 2024).
"""

import dataclasses
from typing import Any

from ..registry import Family, Preset
from .encoder import ENCODER_AXES, smallest_inputs
from .roberta import RoBERTa, RobertaConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class XLMRobertaConfig(RobertaConfig):
    """The configuration of an XLM-R and its head.

    Raises:
      UserError: a size is out of range, or the head needs labels and has none.
    """


class XLMRoBERTa(RoBERTa):
    """The XLM-R model with its head."""


def _preset(published: str, paper: str, sizes: tuple[int, int], **fields: Any) -> Preset:
    """Builds a preset from the number of layers and the width; heads have size 64."""
    num_layers, d_model = sizes
    note = fields.pop("note", "")
    config = XLMRobertaConfig(
        vocab_size=250_002,
        max_length=fields.pop("max_length", 512),
        num_layers=num_layers,
        d_model=d_model,
        num_heads=d_model // 64,
        **fields,
    )
    return Preset(config, paper, published, note)


_BASE, _LARGE = (12, 768), (24, 1024)
_CONNEAU, _WANG = "Conneau et al. 2020", "Wang et al. 2024"

PRESETS: dict[str, Preset] = {
    "xlm-roberta-base": _preset("270M", _CONNEAU, _BASE, note="computed from its sizes: 278M"),
    "xlm-roberta-large": _preset("550M", _CONNEAU, _LARGE, note="computed from its sizes: 560M"),
    "multilingual-e5-base": _preset("278M", _WANG, _BASE, head="none"),
    "multilingual-e5-large": _preset("560M", _WANG, _LARGE, head="none"),
    "bge-m3": _preset("568M", "Chen et al. 2024", _LARGE, max_length=8192, head="none"),
}

# fmt: off
NUM_PARAMETERS = {
    "xlm-roberta-base": 278_295_186, "xlm-roberta-large": 560_142_482,
    "multilingual-e5-base": 278_043_648, "multilingual-e5-large": 559_890_432,
    "bge-m3": 567_754_752,
}
# fmt: on

FAMILY = Family(
    config=XLMRobertaConfig,
    module=XLMRoBERTa,
    presets=PRESETS,
    num_parameters=NUM_PARAMETERS,
    smallest_inputs=smallest_inputs,
    parameter_axes=ENCODER_AXES,
    hf_module="encoders.xlm_roberta",
)
