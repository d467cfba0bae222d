"""GPT-Neo: EleutherAI's GPT-3, with locally banded attention in every second layer.

Black et al. 2021, "GPT-Neo: large scale autoregressive language modeling with Mesh-Tensorflow".
Attention scores are not divided by √H, and the query, key and value projections have no biases.
"""

import dataclasses
from typing import ClassVar

from ....data.common.fields import PositiveInt, Rate
from ...config import require_layers
from ...nn.parameter_axes import EMBEDDING_AXES, FINAL_NORM_AXES, HEAD_AXES, LAYER_AXES
from ...registry import Family, Preset, preset_maker
from ..causal_lm import DECODER_HEADS, head_field
from .gpt import GPT, GPTConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTNeoConfig(GPTConfig):
    """A decoder-only transformer of the GPT-Neo family.

    Raises:
      UserError: a size or a rate is out of range.
    """

    attention_bias: ClassVar[bool] = False  # pyright: ignore[reportIncompatibleMethodOverride]
    attention_output_bias: ClassVar[bool] = True  # pyright: ignore[reportIncompatibleMethodOverride]

    dropout_rate: Rate = 0.0
    """Dropout rate of embeddings, attention weights and the outputs of both sublayers."""
    scale_scores: bool = False
    """Whether attention scores are divided by √d_k."""
    scale_residual_init: bool = False
    """Whether the initial kernels that project to the residual stream are multiplied by 1/√(2L)."""
    local_window: PositiveInt | None = 256
    """Number of tokens that a token attends to in local layers. If None, all layers attend to all
    tokens."""
    local_layers: tuple[int, ...] | None = None
    """Zero-based indices of the local layers. If None, every second layer is local."""
    classifier_dropout_rate: Rate = 0.1  # pyright: ignore[reportIncompatibleVariableOverride]
    """Dropout rate of the hidden states that token classification reads."""
    head: str = head_field(DECODER_HEADS)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_layers("local_layers", self.local_layers, self.num_layers)

    @property
    def windowed_layers(self) -> tuple[bool, ...]:
        """Whether each layer attends only to `local_window`; unused if `local_window` is None."""
        if self.local_layers is None:
            return super().windowed_layers
        return tuple(i in self.local_layers for i in range(self.num_layers))


class GPTNeo(GPT):
    """The GPT-Neo model with its head, built from GPT-2 layers."""


_preset = preset_maker(
    GPTNeoConfig,
    "Black et al. 2021",
    ("num_layers", "d_model", "num_heads"),
    vocab_size=50_257,
    max_length=2048,
)

PRESETS: dict[str, Preset] = {
    "gpt-neo-125m": _preset("125M", (12, 768, 12)),
    "gpt-neo-1.3b": _preset("1.3B", (24, 2048, 16)),
    "gpt-neo-2.7b": _preset("2.7B", (32, 2560, 20)),
}

NUM_PARAMETERS = {
    "gpt-neo-125m": 125_198_592,
    "gpt-neo-1.3b": 1_315_575_808,
    "gpt-neo-2.7b": 2_651_307_520,
}

FAMILY = Family(
    config=GPTNeoConfig,
    module=GPTNeo,
    presets=PRESETS,
    num_parameters=NUM_PARAMETERS,
    parameter_axes={**EMBEDDING_AXES, **LAYER_AXES, **FINAL_NORM_AXES, **HEAD_AXES},
    hf_module="decoders.gpt.gpt_neo",
)
