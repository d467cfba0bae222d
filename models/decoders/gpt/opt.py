"""OPT: Meta's reproduction of GPT-3, with ReLU.

Zhang et al. 2022, "OPT: open pre-trained transformer language models", section 2. The 350M model
normalizes after the residual sum and has narrower token embeddings.
"""

import dataclasses
from typing import ClassVar

from ....data.common.fields import Rate
from ...config import Activation, Size
from ...nn.parameter_axes import EMBEDDING_AXES, FINAL_NORM_AXES, HEAD_AXES, LAYER_AXES
from ...registry import Family, Preset, preset_maker
from .gpt import GPT, GPTConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class OPTConfig(GPTConfig):
    """A decoder-only transformer of the OPT family.

    Raises:
      UserError: a size or a rate is out of range.
    """

    position_offset: ClassVar[int] = 2

    norm_affine: bool = True  # pyright: ignore[reportIncompatibleVariableOverride]
    """Whether norms have learned scales and biases."""
    activation: Activation = "relu"
    """Non-linearity of the feed-forward layer."""
    embedding_dropout: Rate | None = 0.0
    """Dropout rate of the sum of token embeddings and positions. Defaults to `dropout_rate`."""
    attention_dropout: Rate | None = 0.0
    """Dropout rate of attention weights. Defaults to `dropout_rate`."""
    scale_residual_init: bool = True
    """Whether the initial kernels that project to the residual stream are multiplied by 1/√(2L)."""
    final_norm: bool = True  # pyright: ignore[reportIncompatibleVariableOverride]
    """Whether pre-norm models also normalize the last layer's output."""
    d_embedding: Size | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Width of the token embeddings. Defaults to D; linear maps project other widths to D and
    back."""


class OPT(GPT):
    """The OPT model with its head, built from layers of GPT-2 or of the first GPT."""


_preset = preset_maker(
    OPTConfig,
    "Zhang et al. 2022",
    ("num_layers", "d_model", "num_heads"),
    vocab_size=50_272,
    max_length=2048,
)

PRESETS: dict[str, Preset] = {
    "opt-125m": _preset("125M", (12, 768, 12)),
    "opt-350m": _preset("350M", (24, 1024, 16), norm_position="post", d_embedding=512),
    "opt-1.3b": _preset("1.3B", (24, 2048, 32)),
    "opt-2.7b": _preset("2.7B", (32, 2560, 32)),
    "opt-6.7b": _preset("6.7B", (32, 4096, 32)),
    "opt-13b": _preset("13B", (40, 5120, 40)),
    "opt-30b": _preset("30B", (48, 7168, 56)),
    "opt-66b": _preset("66B", (64, 9216, 72)),
    "opt-175b": _preset("175B", (96, 12_288, 96)),
}

# fmt: off
NUM_PARAMETERS = {
    "opt-125m": 125_239_296, "opt-350m": 331_196_416, "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800, "opt-6.7b": 6_658_473_984, "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288, "opt-66b": 65_719_701_504,
    "opt-175b": 174_604_468_224,
}
# fmt: on

FAMILY = Family(
    config=OPTConfig,
    module=OPT,
    presets=PRESETS,
    num_parameters=NUM_PARAMETERS,
    parameter_axes={
        **EMBEDDING_AXES,
        **LAYER_AXES,
        **FINAL_NORM_AXES,
        **HEAD_AXES,
        r"embedding_projection/kernel": (None, "model"),
        r"output_projection/kernel": ("model", None),
    },
    hf_module="decoders.gpt.opt",
)
