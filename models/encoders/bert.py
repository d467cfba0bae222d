"""BERT: a bidirectional encoder, trained to predict masked words and next sentences.

- Devlin et al. 2019, "BERT: Pre-training of deep bidirectional transformers for language
  understanding", section 3. BERT has token types, exact GELU, and a pooler over the first token.
  BERT normalizes the embeddings and each residual sum.
- Turc et al. 2019, "Well-read students learn better", table 1, published the small sizes.
- Wang et al. 2024, "Multilingual E5 text embeddings", published an embedder with the vocabulary of
  XLM-R.
"""

import dataclasses

from ..config import Count
from ..registry import Family, Preset
from .encoder import (
    ENCODER_AXES,
    ENCODER_HEADS,
    Encoder,
    EncoderConfig,
    head_field,
    smallest_inputs,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertConfig(EncoderConfig):
    """The configuration of a BERT and its head.

    Raises:
      UserError: a size is out of range, or the head needs labels and has none.
    """

    num_token_types: Count = 2  # pyright: ignore[reportIncompatibleVariableOverride]
    """Number of token types; token types distinguish the two segments of an input."""
    body_pooler: bool = True  # pyright: ignore[reportIncompatibleVariableOverride]
    """Whether a model without a head also returns the pooled first token."""
    head: str = head_field(
        (*ENCODER_HEADS, "pretraining", "next_sentence", "causal_lm"), default="pretraining"
    )


class BERT(Encoder):
    """The BERT model with its head."""


def _preset(paper: str, published: str, sizes: tuple[int, int], note: str = "") -> Preset:
    """Builds a preset from the number of layers and the width; heads have size 64."""
    num_layers, d_model = sizes
    config = BertConfig(
        vocab_size=30522,
        max_length=512,
        num_layers=num_layers,
        d_model=d_model,
        num_heads=d_model // 64,
    )
    return Preset(config, paper, published, note)


_DEVLIN, _TURC = "Devlin et al. 2019", "Turc et al. 2019"

PRESETS: dict[str, Preset] = {
    "bert-tiny": _preset(_TURC, "4.4M", (2, 128)),
    "bert-mini": _preset(_TURC, "11.3M", (4, 256)),
    "bert-small": _preset(_TURC, "29.1M", (4, 512)),
    "bert-medium": _preset(_TURC, "41.7M", (8, 512)),
    "bert-base": _preset(_DEVLIN, "110M", (12, 768)),
    "bert-large": _preset(
        _DEVLIN, "340M", (24, 1024), "computed from its sizes: 336M with both heads, 335M without"
    ),
    "multilingual-e5-small": Preset(
        BertConfig(
            vocab_size=250_037,
            max_length=512,
            num_layers=12,
            d_model=384,
            num_heads=12,
            head="none",
        ),
        "Wang et al. 2024",
        "118M",
    ),
}

# fmt: off
NUM_PARAMETERS = {
    "bert-tiny": 4_433_468, "bert-mini": 11_267_900, "bert-small": 29_058_876,
    "bert-medium": 41_668_412, "bert-base": 110_106_428, "bert-large": 336_226_108,
    "multilingual-e5-small": 117_653_760,
}
# fmt: on

FAMILY = Family(
    config=BertConfig,
    module=BERT,
    presets=PRESETS,
    num_parameters=NUM_PARAMETERS,
    smallest_inputs=smallest_inputs,
    parameter_axes=ENCODER_AXES,
    hf_module="encoders.bert",
)
