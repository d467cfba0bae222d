"""DeBERTa: a BERT with disentangled attention.

He et al. 2021, "DeBERTa: decoding-enhanced BERT with disentangled attention" (version 1; the
authors' code also contains version 2), and He et al. 2021, "DeBERTaV3: improving DeBERTa using
ELECTRA-style pre-training with gradient-disentangled embedding sharing". `disentangled.py`
implements the attention. The large models of version 2 add a convolution over tokens to the output
of the first layer. As in the authors' code, the body has no pooler.
"""

import dataclasses
from typing import Any, ClassVar, cast

import flax.linen as nn
import jax.numpy as jnp
from flax import struct

from ....data.common.fields import Positive, Rate
from ...config import Count, Size
from ...nn.stack import LayerContext, LayerInputs, LayerOutputs
from ...nn.typing import Array, Float
from ...registry import Family, Preset
from ..encoder import (
    ENCODER_AXES,
    ENCODER_HEADS,
    Encoder,
    PostNormLayer,
    head_field,
    smallest_inputs,
)
from .convolution import Convolution, ConvolutionConfig, FirstLayerTerm, Pooler
from .disentangled import (
    DisentangledAttention,
    DistancePositions,
    make_distance_positions,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DebertaConfig(ConvolutionConfig):
    """The configuration of a DeBERTa and its head.

    Raises:
      UserError: a size is out of range, options contradict each other, or the head needs labels and
        has none.
    """

    projects_before_norm: ClassVar[bool] = True

    norm_eps: Positive = 1e-7
    """Constant added to the variance in layer normalization."""
    num_token_types: Count = 0  # pyright: ignore[reportIncompatibleVariableOverride]
    """Number of token types; token types distinguish the two segments of an input."""
    d_embedding: Size | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Width of the embeddings. Defaults to D; a linear map projects other widths to D."""
    pooler_dropout: Rate = 0.0  # pyright: ignore[reportIncompatibleVariableOverride]
    """Dropout rate before the pooler of classifiers."""
    pooler_activation: Pooler = "gelu"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Non-linearity of the pooler of classifiers."""
    head: str = head_field((*ENCODER_HEADS, "replaced_token_detection"))


@struct.dataclass
class DebertaPositions(DistancePositions):
    """The positions of a batch, and the result of the convolution of its embeddings."""

    first_layer: FirstLayerTerm | None = None


class DebertaLayer(PostNormLayer):
    """A BERT layer with disentangled attention; the first layer may add the convolution."""

    attention = DisentangledAttention

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], inputs: LayerInputs, context: LayerContext
    ) -> tuple[Float[Array, "B T D"], LayerOutputs]:
        """Returns the residual stream after the layer, and the layer's additional outputs."""
        x, outputs = super().__call__(x, inputs, context)
        term = getattr(context.positions, "first_layer", None)
        if term is not None:
            x = jnp.where(inputs.index == 0, term.to(x, self.config.norm_eps), x)
        return x, outputs


class DeBERTa(Encoder):
    """The DeBERTa model with its head."""

    layer = DebertaLayer
    make_positions = staticmethod(make_distance_positions)

    def complete(self, context: LayerContext, x: Float[Array, "B T D"]) -> LayerContext:
        """Adds the convolution of the embeddings to the context, if the model has a convolution."""
        c = cast(DebertaConfig, self.config)
        if c.convolution_size is None:
            return context
        convolution = Convolution(c, self.execution, name="convolution")
        term = convolution(x, context.mask, context.rng)
        positions = DebertaPositions(**vars(context.positions), first_layer=term)
        return dataclasses.replace(context, positions=positions)


V2 = {"position_buckets": 256, "share_projections": True, "norm_distances": True}
CONVOLVED = {**V2, "convolution_size": 3, "convolution_activation": "gelu"}
OLD = {"key_bias": False}
_NOTE = "without embeddings; computed from its sizes: {} with them"
V1, V3 = "He et al. 2021", "He et al. 2021 (v3)"


def _preset(
    paper: str,
    published: str,
    vocab_size: int,
    sizes: tuple[int, int, int],
    *,
    note: str = "",
    **fields: Any,
) -> Preset:
    """Builds a preset from the number of layers, the width, and the number of heads.

    The published number of parameters excludes the head.
    """
    names = "num_layers", "d_model", "num_heads"
    fields |= dict(zip(names, sizes, strict=True))
    config = DebertaConfig(vocab_size=vocab_size, max_length=512, **fields)
    return Preset(config, paper, published, note)


PRESETS: dict[str, Preset] = {
    "deberta-base": _preset(V1, "100M", 50265, (12, 768, 12), note=_NOTE.format("139M"), **OLD),
    "deberta-large": _preset(V1, "350M", 50265, (24, 1024, 16), note=_NOTE.format("405M"), **OLD),
    "deberta-v2-xlarge": _preset(
        V1, "900M", 128100, (24, 1536, 24), note="computed from its sizes: 885M", **CONVOLVED
    ),
    "deberta-v2-xxlarge": _preset(
        V1, "1.5B", 128100, (48, 1536, 24), note="computed from its sizes: 1.6B", **CONVOLVED
    ),
    "deberta-v3-xsmall": _preset(
        V3, "70M", 128100, (12, 384, 6), note="computed from its sizes: 71M", **V2
    ),
    "deberta-v3-small": _preset(
        V3, "142M", 128100, (6, 768, 12), note="computed from its sizes: 141M", **V2
    ),
    "deberta-v3-base": _preset(V3, "184M", 128100, (12, 768, 12), **V2),
    "deberta-v3-large": _preset(
        V3, "435M", 128100, (24, 1024, 16), note="computed from its sizes: 434M", **V2
    ),
    "mdeberta-v3-base": _preset(
        V3, "276M", 251000, (12, 768, 12), note="computed from its sizes: 278M", **V2
    ),
}

# fmt: off
NUM_PARAMETERS = {
    "deberta-base": 139_244_121, "deberta-large": 406_264_921,
    "deberta-v2-xlarge": 887_085_156, "deberta-v2-xxlarge": 1_567_041_636,
    "deberta-v3-xsmall": 70_958_820, "deberta-v3-small": 142_024_548,
    "deberta-v3-base": 184_551_780, "deberta-v3-large": 435_191_908,
    "mdeberta-v3-base": 279_061_880,
}
# fmt: on

FAMILY = Family(
    config=DebertaConfig,
    module=DeBERTa,
    presets=PRESETS,
    num_parameters=NUM_PARAMETERS,
    smallest_inputs=smallest_inputs,
    parameter_axes={
        **ENCODER_AXES,
        r"distance_embedding/embedding": (None, "model"),
        r"(distance_norm|convolution)/(scale|bias)": (None,),
        r"convolution/taps/kernel": (None, None, "model"),
        r"convolution/taps/bias": (None,),
        r"layers/attention/position_(query|key)/kernel": ("layers", "model", "heads", None),
        r"layers/attention/position_(query|key)/bias": ("layers", "heads", None),
    },
    below_layers=r"(token|position|token_type|distance)_embedding|(embedding|distance)_norm"
    r"|embedding_projection|convolution",
    hf_module="encoders.deberta.deberta",
)
