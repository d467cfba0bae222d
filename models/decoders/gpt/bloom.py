"""BLOOM: a GPT without position embeddings; attention scores decrease with distance (ALiBi).

Scao et al. 2022, "BLOOM: a 176B-parameter open-access multilingual language model", section 3.2;
Press et al. 2022, "Train short, test long". Embeddings are normalized before the first layer.
"""

import dataclasses
from typing import ClassVar

from ....data.common.fields import Rate
from ...config import PositionKind
from ...nn.parameter_axes import EMBEDDING_AXES, FINAL_NORM_AXES, HEAD_AXES, LAYER_AXES
from ...registry import Family, Preset, preset_maker
from ..causal_lm import DECODER_HEADS, head_field
from .gpt import GPT, GPTConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class BloomConfig(GPTConfig):
    """A decoder-only transformer of the BLOOM family.

    Raises:
      UserError: a size or a rate is out of range.
    """

    embedding_norm: ClassVar[bool] = True

    positions: PositionKind = "alibi"
    """How the model represents positions."""
    dropout_rate: Rate = 0.0
    """Dropout rate of attention weights and the outputs of both sublayers."""
    embedding_dropout: Rate | None = 0.0
    """Dropout rate of the embeddings. Defaults to `dropout_rate`."""
    residual_of_norm: bool = False  # pyright: ignore[reportIncompatibleVariableOverride]
    """Whether a sublayer's output is added to its normalized input instead of its input."""
    classifier_dropout_rate: Rate = 0.0  # pyright: ignore[reportIncompatibleVariableOverride]
    """Dropout rate of the hidden states that token classification reads."""
    head: str = head_field(DECODER_HEADS)


class Bloom(GPT):
    """The BLOOM model with its head, built from GPT-2 layers."""


_preset = preset_maker(
    BloomConfig,
    "Scao et al. 2022",
    ("num_layers", "d_model", "num_heads"),
    vocab_size=250_880,
    max_length=2048,
)

PRESETS: dict[str, Preset] = {
    "bloom-560m": _preset("560M", (24, 1024, 16)),
    "bloom-1b1": _preset("1.1B", (24, 1536, 16)),
    "bloom-1b7": _preset("1.7B", (24, 2048, 16)),
    "bloom-3b": _preset("3B", (30, 2560, 32)),
    "bloom-7b1": _preset("7.1B", (30, 4096, 32)),
    "bloom-176b": _preset("176B", (70, 14_336, 112)),
}

# fmt: off
NUM_PARAMETERS = {
    "bloom-560m": 559_214_592, "bloom-1b1": 1_065_314_304, "bloom-1b7": 1_722_408_960,
    "bloom-3b": 3_002_557_440, "bloom-7b1": 7_069_016_064, "bloom-176b": 176_247_271_424,
}
# fmt: on

FAMILY = Family(
    config=BloomConfig,
    module=Bloom,
    presets=PRESETS,
    num_parameters=NUM_PARAMETERS,
    parameter_axes={
        **EMBEDDING_AXES,
        **LAYER_AXES,
        **FINAL_NORM_AXES,
        **HEAD_AXES,
        r"embedding_norm/(scale|bias)": (None,),
    },
    hf_module="decoders.gpt.bloom",
)
