"""GPT, GPT-2 and GPT-3: the decoder-only transformers of three papers.

- GPT: Radford et al. 2018, "Improving language understanding by generative
  pre-training", section 4.1. GPT normalizes each residual sum.
- GPT-2: Radford et al. 2019, "Language models are unsupervised multitask learners", section 2.3.
  GPT-2 normalizes before each sublayer and after the last layer; the initial kernels that project
  to the residual stream are multiplied by 1/√(2L).
- GPT-3: Brown et al. 2020, "Language models are few-shot learners", section 2.1
  and table 2.1. In GPT-3, layers with dense attention alternate with layers with locally banded
  attention.

The width of GPT-3's bands is not published. This module uses 256, the width of GPT-Neo.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import flax.linen as nn

from ....data.common.fields import PositiveInt, Rate, require
from ...config import Activation, Execution, MixtureConfig
from ...nn.cache import Cache
from ...nn.dropout import RowKeys, dropout
from ...nn.experts import Experts, RouterStatistics
from ...nn.layers import Embedding, FeedForward, LayerNorm, Linear
from ...nn.masks import AnyArray
from ...nn.parameter_axes import EMBEDDING_AXES, FINAL_NORM_AXES, HEAD_AXES, LAYER_AXES
from ...nn.positions import Positions, make_positions
from ...nn.stack import Layer, LayerContext, LayerInputs, LayerOutputs
from ...nn.typing import Array, Float, Int
from ...registry import Family, Preset
from ..causal_lm import GPT_HEADS, CausalLM, CausalLMConfig, head_field


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig(MixtureConfig, CausalLMConfig):  # pyright: ignore[reportIncompatibleVariableOverride]
    """A decoder-only transformer.

    Raises:
      UserError: a size or a rate is out of range.
    """

    gated_experts: ClassVar[bool] = False
    """Whether experts are gated. The experts of a GPT are plain feed-forward layers without
    biases."""

    # Properties that differ between the derived families (`models.decoders.gpt`). The defaults are
    # the values for GPT; a family that a docstring names in parentheses sets a different value.

    embedding_norm: ClassVar[bool] = False
    """Whether embeddings are normalized before the first layer (BLOOM)."""
    residual_of_norm: ClassVar[bool] = False
    """Whether a sublayer's output is added to its normalized input instead of its input (BLOOM)."""
    final_norm: ClassVar[bool] = True
    """Whether pre-norm models also normalize the last layer's output (OPT)."""
    d_embedding: ClassVar[int | None] = None
    """Width of the token embeddings. Defaults to D; linear maps project other widths to D and back
    (OPT)."""

    activation: Activation = "gelu_tanh"
    """Non-linearity of the feed-forward layer; GPTs use the tanh approximation of GELU."""
    dropout_rate: Rate = 0.1
    """Dropout rate of embeddings, attention weights and the outputs of both sublayers."""
    embedding_dropout: Rate | None = None
    """Dropout rate of the sum of token embeddings and positions. Defaults to `dropout_rate`."""
    norm_position: Literal["pre", "post"] = "pre"
    """Where norms are applied. pre: before each sublayer, and once more after the last layer
    (GPT-2, GPT-3). post: after each residual sum (GPT).
    """
    use_bias: bool = True  # pyright: ignore[reportIncompatibleMethodOverride]
    """Whether the affine maps have biases."""
    causal: bool = True  # pyright: ignore[reportIncompatibleVariableOverride]
    """Whether a token attends only to itself and earlier tokens. Without the causal mask, the model
    reads the token that it predicts, so its training is meaningless and it cannot generate text.
    """
    local_window: PositiveInt | None = None
    """If not None, every second layer attends only to the last `local_window` tokens (GPT-3)."""
    scale_residual_init: bool = True
    """Whether the initial kernels that project to the residual stream are multiplied by 1/√(2L)
    (GPT-2, GPT-3)."""
    scale_scores_by_layer: bool = False
    """Whether the attention scores of layer i, counted from 1, are also divided by i (Mistral's
    replicas of GPT-2)."""
    head: str = head_field(GPT_HEADS)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.causal or self.local_window is None,
            f"local_window {self.local_window} is a band of earlier tokens: set causal to true",
        )

    @property
    def embedding_dropout_rate(self) -> float:
        """Dropout rate of the first layer's input."""
        return self.dropout_rate if self.embedding_dropout is None else self.embedding_dropout

    @property
    def window(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Number of tokens that a token attends to in windowed layers, `local_window`."""
        return self.local_window

    @property
    def windowed_layers(self) -> tuple[bool, ...]:
        """Whether each layer attends only to the window; unused if `local_window` is None."""
        return tuple(i % 2 == 1 for i in range(self.num_layers))

    def score_scale(self, layer: int | Int[Array, ""]) -> float | Float[Array, ""]:
        """Returns the attention scale of a layer; the first layer has the index 0."""
        scale = super().score_scale(layer)
        return scale / (layer + 1) if self.scale_scores_by_layer else scale

    @property
    def output_init_std(self) -> float | None:
        """Standard deviation of the initial kernels that project back to the residual stream."""
        if self.init_std is None or not self.scale_residual_init:
            return self.init_std
        return self.init_std / math.sqrt(2 * self.num_layers)


def feed_forward(
    c: GPTConfig,
    e: Execution,
    x: Float[Array, "B T D"],
    *,
    context: LayerContext,
    rng: RowKeys | None,
) -> tuple[Float[Array, "B T D"], RouterStatistics | None]:
    """Returns the output of the feed-forward layer or the experts, and router statistics."""
    if not c.num_experts:
        return FeedForward(c, e, c.output_init_std, name="feed_forward")(x, rng), None
    return Experts(c, e, c.output_init_std, name="experts")(x, context.real, rng)


class PreNormLayer(Layer[GPTConfig]):
    """A layer of GPT-2 and GPT-3, which normalizes the input of each sublayer."""

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], inputs: LayerInputs, context: LayerContext
    ) -> tuple[Float[Array, "B T D"], LayerOutputs]:
        """Returns the residual stream after the layer, and the layer's additional outputs."""
        c, e = self.config, self.execution
        attn = context.self_attention(inputs)

        # Self-attention. BLOOM may add to `normed` instead of x, so keep both arrays.
        normed = LayerNorm(c, e, name="attention_norm")(x)
        y, cache, weights = self.attention(c, e, c.output_init_std, name="attention")(normed, attn)
        x = self.add(normed if c.residual_of_norm else x, y, "attention", attn.rng)

        # Feed-forward or a mixture of experts.
        normed = LayerNorm(c, e, name="feed_forward_norm")(x)
        y, router = feed_forward(c, e, normed, context=context, rng=attn.rng)
        x = self.add(normed if c.residual_of_norm else x, y, "feed_forward", attn.rng)
        return x, LayerOutputs(cache, weights, router=router)


class PostNormLayer(Layer[GPTConfig]):
    """A layer of the first GPT, which normalizes each residual sum."""

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], inputs: LayerInputs, context: LayerContext
    ) -> tuple[Float[Array, "B T D"], LayerOutputs]:
        """Returns the residual stream after the layer, and the layer's additional outputs."""
        c, e = self.config, self.execution
        attn = context.self_attention(inputs)

        # Self-attention. The residual sum is normalized, so the next sublayer reads a normalized
        # input.
        y, cache, weights = self.attention(c, e, c.output_init_std, name="attention")(x, attn)
        x = self.add(x, y, "attention", attn.rng)
        x = LayerNorm(c, e, name="attention_norm")(x)

        # Feed-forward or a mixture of experts.
        y, router = feed_forward(c, e, x, context=context, rng=attn.rng)
        x = self.add(x, y, "feed_forward", attn.rng)
        x = LayerNorm(c, e, name="feed_forward_norm")(x)
        return x, LayerOutputs(cache, weights, router=router)


class GPT(CausalLM):
    """The GPT model with its head.

    Attributes:
      config: sizes and options of the model.
      execution: how the model is run.
    """

    config: GPTConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    make_positions: ClassVar[Callable[..., Positions]] = staticmethod(make_positions)
    """The function that computes the positions of the tokens."""

    @property
    def layer(self) -> type[Layer]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The class of the model's layers."""
        return PreNormLayer if self.config.norm_position == "pre" else PostNormLayer

    def embed(
        self,
        input_ids: Int[AnyArray, "B T"],
        position_ids: Int[AnyArray, "#B #T"],
        cache: Cache | None,
        rng: RowKeys | None,
    ) -> tuple[Float[Array, "B T D"], Positions, Embedding]:
        """Returns the embeddings with positions added, the positions, and the embedding matrix."""
        c, e = self.config, self.execution
        width = c.d_embedding or c.d_model
        table = Embedding(c.vocab_size, width, execution=e, name="token_embedding")
        positions = self.make_positions(
            c, e, position_ids, input_ids.shape[1], cache=cache, causal=c.causal
        )
        x = table(input_ids)
        # Project narrow embeddings to D first, because position vectors have size D.
        if c.d_embedding is not None:
            x = self._project(x, c.d_model, "embedding_projection")
        x = positions.at_input(x)
        if c.embedding_norm:
            x = LayerNorm(c, e, name="embedding_norm")(x)
        return dropout(x, c.embedding_dropout_rate, rng, "embedding"), positions, table

    def finish(self, x: Float[Array, "B T D"]) -> Float[Array, "B T W"]:
        """Returns the output of the last layer, normalized in pre-norm models.

        If the width W of the token embeddings is not D, the output is projected to W.
        """
        c = self.config
        if c.norm_position == "pre" and c.final_norm:
            x = LayerNorm(c, self.execution, name="final_norm")(x)
        if c.d_embedding is not None:
            x = self._project(x, c.d_embedding, "output_projection")
        return x

    def _project(self, x: Float[Array, "B T _"], width: int, name: str) -> Float[Array, "B T W"]:
        std, e = self.config.init_std, self.execution
        return Linear((width,), std, use_bias=False, execution=e, name=name)(x)


def _preset(paper: str, published: str, note: str = "", **fields: Any) -> Preset:
    return Preset(GPTConfig(**fields), paper, published, note)


def _gpt2(published: str, num_layers: int, d_model: int, num_heads: int) -> Preset:
    return _preset(
        "Radford et al. 2019",
        published,
        "the paper's counts are wrong, as its authors later said (124M, 355M, 774M, 1558M)",
        vocab_size=50257,
        max_length=1024,
        num_layers=num_layers,
        d_model=d_model,
        num_heads=num_heads,
    )


def _gpt3(
    published: str, num_layers: int, d_model: int, num_heads: int, *, note: str = ""
) -> Preset:
    return _preset(
        "Brown et al. 2020",
        published,
        note,
        vocab_size=50257,
        max_length=2048,
        num_layers=num_layers,
        d_model=d_model,
        num_heads=num_heads,
        local_window=256,
    )


PRESETS: dict[str, Preset] = {
    "gpt": _preset(
        "Radford et al. 2018",
        "117M",
        vocab_size=40478,
        max_length=512,
        num_layers=12,
        d_model=768,
        num_heads=12,
        norm_position="post",
        scale_residual_init=False,
    ),
    "gpt2": _gpt2("117M", 12, 768, 12),
    "gpt2-medium": _gpt2("345M", 24, 1024, 16),
    "gpt2-large": _gpt2("762M", 36, 1280, 20),
    "gpt2-xl": _gpt2("1542M", 48, 1600, 25),
    "gpt3-small": _gpt3("125M", 12, 768, 12),
    "gpt3-medium": _gpt3(
        "350M", 24, 1024, 16, note="table 2.1 says 350M, computed from its sizes: 356M"
    ),
    "gpt3-large": _gpt3("760M", 24, 1536, 16),
    "gpt3-xl": _gpt3(
        "1.3B", 24, 2048, 16, note="table 2.1 says 24 heads of 128, which make 3,072, not 2,048"
    ),
    "gpt3-2.7b": _gpt3("2.7B", 32, 2560, 32),
    "gpt3-6.7b": _gpt3("6.7B", 32, 4096, 32),
    "gpt3-13b": _gpt3(
        "13B", 40, 5120, 40, note="table 2.1 says width 5,140, which is not 40 × 128"
    ),
    "gpt3-175b": _gpt3("175B", 96, 12288, 96),
}

# fmt: off
NUM_PARAMETERS = {
    "gpt": 116_534_784, "gpt2": 124_439_808, "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200, "gpt3-small": 125_226_240,
    "gpt3-medium": 355_871_744, "gpt3-large": 760_300_032, "gpt3-xl": 1_315_723_264,
    "gpt3-2.7b": 2_651_553_280, "gpt3-6.7b": 6_658_404_352, "gpt3-13b": 12_853_386_240,
    "gpt3-175b": 174_604_259_328,
}
# fmt: on

FAMILY = Family(
    config=GPTConfig,
    module=GPT,
    presets=PRESETS,
    num_parameters=NUM_PARAMETERS,
    parameter_axes={**EMBEDDING_AXES, **LAYER_AXES, **FINAL_NORM_AXES, **HEAD_AXES},
    hf_module="decoders.gpt.gpt",
)
