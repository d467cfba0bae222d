"""ModernBERT: an encoder for long texts, with rotary positions and windows in most layers.

Warner et al. 2024, "Smarter, better, faster, longer: a modern bidirectional encoder", section 2.1.
Every third layer attends to all tokens, and the other layers attend to a window on both sides of
each token. The two kinds of layers have rotary positions with different bases. Each sublayer reads
a normalized input, and feed-forward layers are gated. Published models have biases only in the
logits. Every head begins with a linear map, an activation and a norm. Initial weights are normally
distributed, not truncated.
"""

import dataclasses
import math
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp

from ...data.common.fields import Positive, Rate
from ..config import Activation, Execution, PositionKind, Size, require_layers
from ..nn.cache import Cache
from ..nn.dropout import dropout
from ..nn.layers import GatedFeedForward, LayerNorm, standardized
from ..nn.masks import AnyArray
from ..nn.parameter_axes import FINAL_NORM_AXES
from ..nn.positions import Positions, make_positions
from ..nn.rotary import rotary_positions
from ..nn.stack import Layer, LayerContext, LayerInputs, LayerOutputs
from ..nn.typing import Array, Float, Int
from ..registry import Family, Preset, preset_maker
from ..rotary_scaling import RotaryScaling
from .encoder import ENCODER_AXES, Encoder, EncoderConfig, smallest_inputs

FULL_EVERY = 3
"""Every third layer attends to all tokens, beginning with the first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModernBertConfig(EncoderConfig):
    """The configuration of a ModernBERT and its head.

    Raises:
      UserError: a size is out of range, or the head needs labels and has none.
    """

    head_transform: ClassVar[bool] = True
    pooling_heads: ClassVar[tuple[str, ...]] = ("sequence_classification", "multiple_choice")

    norm_eps: Positive = 1e-5
    """Constant added to the variance in layer normalization."""
    dropout_rate: Rate = 0.0
    """Dropout rate of the embeddings."""
    activation_dropout_rate: Rate = 0.0  # pyright: ignore[reportIncompatibleMethodOverride]
    """Dropout rate inside the feed-forward layers, after the product with the gate."""
    attention_dropout: Rate | None = None
    """Dropout rate of attention weights and outputs. Defaults to `dropout_rate`."""
    positions: PositionKind = "rotary"
    """How the model represents positions; every published model uses rotary positions."""
    position_base: Positive = 160_000.0
    """Base of the rotary wavelengths in the layers that attend to all tokens."""
    rope_scaling: RotaryScaling | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """How the rotary frequencies are scaled in the layers that attend to all tokens."""
    windowed_position_base: Positive = 10_000.0
    """Base of the rotary wavelengths in the windowed layers."""
    window: Size = 65  # pyright: ignore[reportIncompatibleVariableOverride]
    """In windowed layers, tokens attend to tokens at a distance below `window`, on either side."""
    full_layers: tuple[int, ...] | None = None
    """Zero-based indices of the layers that attend to all tokens. If None, every third layer
    attends to all tokens, beginning with the first layer."""
    attention_bias: bool = False  # pyright: ignore[reportIncompatibleMethodOverride]
    """Whether the four attention projections have biases."""
    use_bias: bool = False  # pyright: ignore[reportIncompatibleMethodOverride]
    """Whether the linear maps of the feed-forward layers have biases."""
    norm_bias: bool = False  # pyright: ignore[reportIncompatibleVariableOverride]
    """Whether the norms have biases."""
    output_bias: bool = True  # pyright: ignore[reportIncompatibleVariableOverride]
    """Whether the logits of masked tokens have a bias."""
    transform_bias: bool = False  # pyright: ignore[reportIncompatibleVariableOverride]
    """Whether the linear map at the beginning of a head has a bias."""
    head_activation: Activation = "gelu"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Non-linearity at the beginning of a head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_layers("full_layers", self.full_layers, self.num_layers)

    @property
    def windowed_layers(self) -> tuple[bool, ...]:
        """Whether each layer attends only to the window."""
        every = range(0, self.num_layers, FULL_EVERY)
        full = every if self.full_layers is None else self.full_layers
        return tuple(i not in full for i in range(self.num_layers))

    @property
    def has_two_sided_windows(self) -> bool:
        """Whether a layer attends to a window on both sides of each token."""
        return any(self.windowed_layers)

    @property
    def output_init_std(self) -> float | None:
        """Standard deviation of the initial output projection of each sublayer: σ / √(2 L)."""
        return None if self.init_std is None else self.init_std / math.sqrt(2 * self.num_layers)

    @property
    def transform_init_std(self) -> float | None:
        """Standard deviation of the initial linear map at the beginning of a head."""
        return self.output_init_std

    @property
    def score_init_std(self) -> float | None:
        """Standard deviation of the initial linear maps to labels, 1 / √D."""
        return self.d_model**-0.5


class ModernBertLayer(Layer[ModernBertConfig]):
    """A pre-norm layer of self-attention and a gated feed-forward block."""

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], inputs: LayerInputs, context: LayerContext
    ) -> tuple[Float[Array, "B T D"], LayerOutputs]:
        """Returns the residual stream after the layer, and the layer's additional outputs."""
        c, e = self.config, self.execution
        attn = context.self_attention(inputs)

        # Self-attention. The embeddings, which the first layer reads, are already normalized.
        assert context.norm_scales is not None
        y = standardized(x, c.norm_eps) * context.norm_scales[inputs.index]
        if context.norm_biases is not None:
            y += context.norm_biases[inputs.index]
        y = jnp.where(inputs.index == 0, x, y.astype(e.dtype))
        y, cache, weights = self.attention(c, e, c.output_init_std, name="attention")(y, attn)
        x = x + dropout(y, c.attention_dropout_rate, attn.rng, "attention")

        # The gated feed-forward layer applies dropout only inside the layer.
        y = LayerNorm(c, e, name="feed_forward_norm")(x)
        x = x + GatedFeedForward(c, e, c.output_init_std, name="feed_forward")(y, attn.rng)
        return x, LayerOutputs(cache, weights)


class ModernBERT(Encoder):
    """The ModernBERT model with its head."""

    config: ModernBertConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    layer = ModernBertLayer

    def complete(self, context: LayerContext, x: Float[Array, "B T D"]) -> LayerContext:
        """Adds the norms before attention, with an unused row for the first layer."""
        del x
        c, init = self.config, nn.initializers
        rest = (max(c.num_layers - 1, 0), c.d_model), self.execution.param_dtype
        unused = (1, 0), (0, 0)
        scales, biases = self.param("attention_norms", init.ones, *rest), None
        if c.norm_bias:
            biases = jnp.pad(self.param("attention_norm_biases", init.zeros, *rest), unused)
        return dataclasses.replace(context, norm_scales=jnp.pad(scales, unused), norm_biases=biases)

    def finish(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns the normalized output of the last layer."""
        return LayerNorm(self.config, self.execution, name="final_norm")(x)

    @staticmethod
    def make_positions(  # pyright: ignore[reportIncompatibleVariableOverride]
        config: ModernBertConfig,
        execution: Execution,
        position_ids: Int[AnyArray, "#B #T"],
        length: Any,
        *,
        cache: Cache | None,
        causal: bool,
    ) -> Positions:
        """Returns the rotations of the tokens, with separate bases for the two kinds of layers."""
        windowed = rotary_positions(position_ids, config.rotated_dim, config.windowed_position_base)
        full = make_positions(config, execution, position_ids, length, cache=cache, causal=causal)
        return dataclasses.replace(full, windowed_rotary=windowed)


_SIZES = "num_layers", "d_model", "num_heads", "d_ff"
_preset = preset_maker(
    ModernBertConfig, "Warner et al. 2024", _SIZES, vocab_size=50368, max_length=8192
)

_NOTE = "computed from its sizes: {} with the masked-word head, {} without"
PRESETS: dict[str, Preset] = {
    "modernbert-base": _preset("149M", (22, 768, 12, 1152), note=_NOTE.format("150M", "149M")),
    "modernbert-large": _preset("395M", (28, 1024, 16, 2624), note=_NOTE.format("396M", "395M")),
}

FAMILY = Family(
    config=ModernBertConfig,
    module=ModernBERT,
    presets=PRESETS,
    num_parameters={"modernbert-base": 149_655_232, "modernbert-large": 395_881_664},
    smallest_inputs=smallest_inputs,
    parameter_axes={**ENCODER_AXES, **FINAL_NORM_AXES, r"attention_norm(s|_biases)": (None, None)},
    below_layers=rf"{Family.below_layers}|attention_norm(s|_biases)",
    hf_module="encoders.modernbert",
)
