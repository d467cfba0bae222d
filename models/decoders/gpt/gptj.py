"""GPT-J: attention and feed-forward in parallel, with the same normalized input.

Wang and Komatsuzaki 2021, "GPT-J-6B: a 6 billion parameter autoregressive language model".
Neighboring pairs of the first 64 dimensions of each head are rotated. Attention has no biases, but
the logits have a bias.
"""

import dataclasses
from typing import ClassVar

import flax.linen as nn

from ....data.common.fields import Rate
from ...config import PositionKind, Size, require_pairs
from ...nn.layers import FeedForward, LayerNorm
from ...nn.parameter_axes import EMBEDDING_AXES, FINAL_NORM_AXES, HEAD_AXES, LAYER_AXES
from ...nn.stack import Layer, LayerContext, LayerInputs, LayerOutputs
from ...nn.typing import Array, Float
from ...registry import Family, Preset
from .gpt import GPT, GPTConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTJConfig(GPTConfig):
    """A decoder-only transformer of the GPT-J family.

    Raises:
      UserError: a size or a rate is out of range.
    """

    attention_bias: ClassVar[bool] = False  # pyright: ignore[reportIncompatibleMethodOverride]
    rotary_interleaved: ClassVar[bool] = True

    positions: PositionKind = "rotary"
    """How the model represents positions."""
    rotary_dim: Size | None = 64
    """Number of rotated dimensions of each head, an even number. If None, all dimensions are
    rotated.
    """
    dropout_rate: Rate = 0.0
    """Dropout rate of embeddings, attention weights and the outputs of both sublayers."""
    scale_residual_init: bool = False
    """Whether the initial kernels that project to the residual stream are multiplied by 1/√(2L)."""
    tie_output: bool = False
    """Whether the output projection shares its matrix with the token embedding."""
    output_bias: bool = True  # pyright: ignore[reportIncompatibleVariableOverride]
    """Whether the logits have a bias."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions == "rotary":
            require_pairs(self.rotated_dim, self.key_dim, f"rotary_dim {self.rotary_dim}")

    @property
    def rotated_dim(self) -> int:
        """Number of rotated dimensions of each head, R."""
        return self.key_dim if self.rotary_dim is None else self.rotary_dim


class GPTJLayer(Layer[GPTJConfig]):
    """A layer that computes x + attention(norm(x)) + feed-forward(norm(x)), with the same norm."""

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], inputs: LayerInputs, context: LayerContext
    ) -> tuple[Float[Array, "B T D"], LayerOutputs]:
        """Returns the residual stream after the layer, and the layer's additional outputs."""
        c, e = self.config, self.execution
        attn = context.self_attention(inputs)

        # Both sublayers read the same normalized input.
        normed = LayerNorm(c, e, name="attention_norm")(x)
        y, cache, weights = self.attention(c, e, c.output_init_std, name="attention")(normed, attn)
        z = FeedForward(c, e, c.output_init_std, name="feed_forward")(normed, attn.rng)
        x = self.add_parallel(x, y, z, attn.rng)
        return x, LayerOutputs(cache, weights)


class GPTJ(GPT):
    """The GPT-J model with its head."""

    @property
    def layer(self) -> type[Layer]:
        """The class of the model's layers."""
        return GPTJLayer


PRESETS: dict[str, Preset] = {
    "gpt-j-6b": Preset(
        GPTJConfig(vocab_size=50_400, max_length=2048, num_layers=28, d_model=4096, num_heads=16),
        "Wang and Komatsuzaki 2021",
        "6B",
    )
}

NUM_PARAMETERS = {"gpt-j-6b": 6_050_882_784}

FAMILY = Family(
    config=GPTJConfig,
    module=GPTJ,
    presets=PRESETS,
    num_parameters=NUM_PARAMETERS,
    parameter_axes={**EMBEDDING_AXES, **LAYER_AXES, **FINAL_NORM_AXES, **HEAD_AXES},
    hf_module="decoders.gpt.gptj",
)
