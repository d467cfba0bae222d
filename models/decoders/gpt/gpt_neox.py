"""GPT-NeoX and Pythia: attention and feed-forward in parallel, each with a separate norm.

Black et al. 2022, "GPT-NeoX-20B: an open-source autoregressive language model", section 2.1;
Biderman et al. 2023, "Pythia". A quarter of each head is rotated.
"""

import dataclasses

import flax.linen as nn

from ....data.common.fields import Rate, require
from ...config import Activation, PositionKind, RotatedFraction, Settings, require_pairs
from ...nn.layers import FeedForward, LayerNorm
from ...nn.parameter_axes import EMBEDDING_AXES, FINAL_NORM_AXES, HEAD_AXES, LAYER_AXES
from ...nn.stack import Layer, LayerContext, LayerInputs, LayerOutputs
from ...nn.typing import Array, Float
from ...registry import Family, Preset
from ...rotary_scaling import RotaryScaling
from ..causal_lm import DECODER_HEADS, head_field
from .gpt import GPT, GPTConfig, PreNormLayer


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTNeoXConfig(GPTConfig):
    """A decoder-only transformer of the GPT-NeoX family.

    Raises:
      UserError: a size or a rate is out of range.
    """

    activation: Activation = "gelu"
    """Non-linearity of the feed-forward layer."""
    positions: PositionKind = "rotary"
    """How the model represents positions."""
    rope_fraction: RotatedFraction = 0.25
    """The fraction of each head's dimensions that is rotated: the first H · fraction dimensions."""
    rope_scaling: RotaryScaling | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """How rotary frequencies are scaled for sequences longer than the trained length."""
    parallel_residual: bool = True
    """Whether both sublayers read the same residual stream. If False, they run in sequence."""
    attention_bias: bool = True  # pyright: ignore[reportIncompatibleMethodOverride]
    """Whether the four attention projections have biases."""
    dropout_rate: Rate = 0.0
    """Dropout rate of embeddings, attention weights and the outputs of both sublayers."""
    scale_residual_init: bool = False
    """Whether the initial kernels that project to the residual stream are multiplied by 1/√(2L)."""
    tie_output: bool = False
    """Whether the output projection shares its matrix with the token embedding."""
    classifier_dropout_rate: Rate = 0.1  # pyright: ignore[reportIncompatibleVariableOverride]
    """Dropout rate of the hidden states that token classification reads."""
    head: str = head_field(DECODER_HEADS)

    def __post_init__(self) -> None:
        super().__post_init__()
        rotated, scaling = self.rotated_dim, self.rope_scaling
        # An odd number of rotated dimensions is rounded up to an even number. The wavelengths are
        # nevertheless computed from the odd number.
        require_pairs(rotated + rotated % 2, self.key_dim, f"rope_fraction {self.rope_fraction}")
        require(
            rotated % 2 == 0 or scaling is None or scaling.kind != "yarn",
            f"rope_fraction {self.rope_fraction} rotates {rotated} of {self.key_dim} dimensions: "
            "choose an even number of them for yarn",
        )

    @property
    def rotated_dim(self) -> int:
        """Number of rotated dimensions of each head, R; if R is odd, R + 1 are rotated."""
        return int(self.key_dim * self.rope_fraction)


class ParallelLayer(Layer[GPTNeoXConfig]):
    """A layer that computes x + attention(norm₁(x)) + feed-forward(norm₂(x))."""

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], inputs: LayerInputs, context: LayerContext
    ) -> tuple[Float[Array, "B T D"], LayerOutputs]:
        """Returns the residual stream after the layer, and the layer's additional outputs."""
        c, e = self.config, self.execution
        attn = context.self_attention(inputs)

        # Both sublayers read x, and then both outputs are added.
        y = LayerNorm(c, e, name="attention_norm")(x)
        y, cache, weights = self.attention(c, e, c.output_init_std, name="attention")(y, attn)
        z = LayerNorm(c, e, name="feed_forward_norm")(x)
        z = FeedForward(c, e, c.output_init_std, name="feed_forward")(z, attn.rng)
        x = self.add_parallel(x, y, z, attn.rng)
        return x, LayerOutputs(cache, weights)


class GPTNeoX(GPT):
    """The GPT-NeoX model with its head."""

    config: GPTNeoXConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def layer(self) -> type[Layer]:
        """The class of the model's layers."""
        return ParallelLayer if self.config.parallel_residual else PreNormLayer


def _pythia(published: str, vocab_size: int, *sizes: int) -> Preset:
    names = "num_layers", "d_model", "num_heads"
    settings: Settings = dict(zip(names, sizes, strict=True))
    config = GPTNeoXConfig(vocab_size=vocab_size, max_length=2048, **settings)
    return Preset(config, "Biderman et al. 2023", published)


PRESETS: dict[str, Preset] = {
    "pythia-70m": _pythia("70M", 50_304, 6, 512, 8),
    "pythia-160m": _pythia("160M", 50_304, 12, 768, 12),
    "pythia-410m": _pythia("410M", 50_304, 24, 1024, 16),
    "pythia-1b": _pythia("1B", 50_304, 16, 2048, 8),
    "pythia-1.4b": _pythia("1.4B", 50_304, 24, 2048, 16),
    "pythia-2.8b": _pythia("2.8B", 50_304, 32, 2560, 32),
    "pythia-6.9b": _pythia("6.9B", 50_432, 32, 4096, 32),
    "pythia-12b": _pythia("12B", 50_688, 36, 5120, 40),
    "gpt-neox-20b": Preset(
        GPTNeoXConfig(
            vocab_size=50_432,
            max_length=2048,
            num_layers=44,
            d_model=6144,
            num_heads=64,
            activation="gelu_tanh",
        ),
        "Black et al. 2022",
        "20B",
    ),
}

# fmt: off
NUM_PARAMETERS = {
    "pythia-70m": 70_426_624, "pythia-160m": 162_322_944, "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632, "pythia-1.4b": 1_414_647_808, "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016, "pythia-12b": 11_846_072_320, "gpt-neox-20b": 20_554_567_680,
}
# fmt: on

FAMILY = Family(
    config=GPTNeoXConfig,
    module=GPTNeoX,
    presets=PRESETS,
    num_parameters=NUM_PARAMETERS,
    parameter_axes={**EMBEDDING_AXES, **LAYER_AXES, **FINAL_NORM_AXES, **HEAD_AXES},
    hf_module="decoders.gpt.gpt_neox",
)
