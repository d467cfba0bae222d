"""The GPTs: decoder-only transformers of three papers.

- GPT: Radford et al. 2018, "Improving language understanding by generative
  pre-training", section 4.1. Normalization after the residual sum.
- GPT-2: Radford et al. 2019, "Language models are unsupervised multitask
  learners", section 2.3. Normalization before each sublayer and once more at
  the end; residual projections are initialized smaller by 1/√(2L).
- GPT-3: Brown et al. 2020, "Language models are few-shot learners", section 2.1
  and table 2.1.  Dense and locally banded attention in alternating layers.

Difference from the papers: the width of GPT-3's bands is not published; here it
is 256, the width of GPT-Neo.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import flax.linen as nn

from ....data.common.errors import UserError
from ....data.common.fields import PositiveInt, Rate, require
from ...config import Activation, Execution, MixtureConfig, TransformerConfig
from ...nn.cache import Cache, advance_cache
from ...nn.dropout import RowKeys, dropout
from ...nn.experts import (
    Experts,
    RouterStatistics,
    config_of_call,
    real_tokens,
    stack_statistics,
)
from ...nn.heads import (
    CAUSAL_HEADS,
    CausalLMOutput,
    ClassificationHead,
    ClassifierOutput,
    EncoderOutput,
    HeadInputs,
    LastTokenClassificationHead,
    Projection,
    ValueHead,
    check_head,
)
from ...nn.layers import Embedding, FeedForward, LayerNorm, Linear
from ...nn.masks import AnyArray
from ...nn.parameter_axes import EMBEDDING_AXES, FINAL_NORM_AXES, HEAD_AXES, LAYER_AXES
from ...nn.positions import Positions, make_positions
from ...nn.stack import (
    Layer,
    LayerContext,
    LayerInputs,
    LayerOutputs,
    check_one_sequence_per_row,
    make_layer_context,
    prepare_inputs,
    run_layers,
)
from ...nn.typing import Array, Bool, Float, Int
from ...registry import Family, Preset

GPT_HEADS = (*CAUSAL_HEADS, "sequence_classification")
"""The supported heads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig(MixtureConfig, TransformerConfig):  # pyright: ignore[reportIncompatibleVariableOverride]
    """A decoder-only transformer.

    Raises:
      UserError: a size or a rate is out of range.
    """

    gated_experts: ClassVar[bool] = False
    """Experts are the usual feed-forward layers without biases."""

    # Properties that differ between the derived families (`models.decoders.gpt`).

    embedding_norm: ClassVar[bool] = False
    """Whether embeddings are normalized before the first layer (BLOOM)."""
    residual_of_norm: ClassVar[bool] = False
    """Whether a sublayer's output is added to its normalized input instead of its input (BLOOM)."""
    final_norm: ClassVar[bool] = True
    """Whether the last layer's output is normalized, if norms precede sublayers (OPT)."""
    d_embedding: ClassVar[int | None] = None
    """Width of the token embeddings, if not D; linear maps project to D and back (OPT)."""
    output_bias: ClassVar[bool] = False
    """Whether the logits have a bias (GPT-J)."""
    classifier_dropout_rate: ClassVar[float] = 0.0  # pyright: ignore[reportIncompatibleMethodOverride]
    """Dropout rate of the hidden states before token classification."""

    activation: Activation = "gelu_tanh"
    """Non-linearity of the feed-forward layer; GPTs use the tanh form of GELU."""
    dropout_rate: Rate = 0.1
    """Dropout rate of embeddings, attention weights and the outputs of both sublayers."""
    embedding_dropout: Rate | None = None
    """Dropout rate of the embeddings plus positions, if not `dropout_rate`."""
    attention_dropout: Rate | None = None
    """Dropout rate of attention weights, if not `dropout_rate`."""
    norm_position: Literal["pre", "post"] = "pre"
    """pre: before each sublayer, and a final one (GPT-2, GPT-3). post: after the sum (GPT)."""
    use_bias: bool = True  # pyright: ignore[reportIncompatibleMethodOverride]
    """Whether the affine maps have biases."""
    causal: bool = True  # pyright: ignore[reportIncompatibleVariableOverride]
    """Whether a token attends only to itself and earlier tokens. Without this mask the model sees
    the token that it predicts, so it learns nothing and cannot generate."""
    local_window: PositiveInt | None = None
    """If given, every second layer attends only to the last `local_window` tokens (GPT-3)."""
    scale_residual_init: bool = True
    """Whether residual projections start smaller by 1/√(2L) (GPT-2, GPT-3)."""
    scale_scores_by_layer: bool = False
    """Whether the scores of layer i, counted from 1, are also divided by i (Mistral's replicas of
    GPT-2)."""
    tie_output: bool = True
    """Whether the output projection is the token embedding; else it has its own matrix."""
    head: str = dataclasses.field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default="causal_lm", metadata={"choices": GPT_HEADS}
    )
    """The output: next tokens (causal_lm), next tokens and their values for PPO
    (causal_lm_with_value), or labels or a score of the sequence, read at its last real token
    (sequence_classification)."""
    labels: tuple[str, ...] = ()  # pyright: ignore[reportIncompatibleVariableOverride]
    """Names of the labels of sequence classification, in order of their ids."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_head(self)
        require(
            self.causal or self.local_window is None,
            f"local_window {self.local_window} is a band of earlier tokens: set causal to true",
        )

    def with_head(self, head: str, labels: tuple[str, ...]) -> "GPTConfig":
        """Returns the configuration of the same body with another head."""
        return dataclasses.replace(self, head=head, labels=labels)

    @property
    def embedding_dropout_rate(self) -> float:
        """Dropout rate of the first layer's input."""
        return self.dropout_rate if self.embedding_dropout is None else self.embedding_dropout

    @property
    def attention_dropout_rate(self) -> float:
        """Dropout rate of attention weights."""
        return self.dropout_rate if self.attention_dropout is None else self.attention_dropout

    @property
    def windowed_layers(self) -> tuple[bool, ...]:
        """Whether each layer attends to `local_window` only; read only if it is set."""
        return tuple(i % 2 == 1 for i in range(self.num_layers))

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Returns the window of each layer, which includes the token itself; None: all tokens."""
        return tuple(self.local_window if local else None for local in self.windowed_layers)

    def score_scale(self, layer: int | Int[Array, ""]) -> float | Float[Array, ""]:
        """Returns the factor of the attention scores of a layer, counted from 0."""
        scale = super().score_scale(layer)
        return scale / (layer + 1) if self.scale_scores_by_layer else scale

    @property
    def output_init_std(self) -> float | None:
        """Standard deviation of the initial projections back to the residual stream."""
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
    """Returns the output of the second sublayer, and the statistics of a mixture of experts."""
    if not c.num_experts:
        return FeedForward(c, e, c.output_init_std, name="feed_forward")(x, rng), None
    return Experts(c, e, c.output_init_std, name="experts")(x, context.real, rng)


class PreNormLayer(Layer[GPTConfig]):
    """A layer of GPT-2 and GPT-3, which normalize the input of each sublayer."""

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], inputs: LayerInputs, context: LayerContext
    ) -> tuple[Float[Array, "B T D"], LayerOutputs]:
        """Returns the residual stream after the layer, and the other outputs."""
        c, e = self.config, self.execution
        own = context.self_attention(inputs)

        # BLOOM may add to `normed` instead of x, so both are kept.
        normed = LayerNorm(c, e, name="attention_norm")(x)
        y, cache, weights = self.attention(c, e, c.output_init_std, name="attention")(normed, own)
        x = self.add(normed if c.residual_of_norm else x, y, "attention", own.rng)

        normed = LayerNorm(c, e, name="feed_forward_norm")(x)
        y, router = feed_forward(c, e, normed, context=context, rng=own.rng)
        x = self.add(normed if c.residual_of_norm else x, y, "feed_forward", own.rng)
        return x, LayerOutputs(cache, weights, router=router)


class PostNormLayer(Layer[GPTConfig]):
    """A layer of the first GPT, which normalizes each residual sum."""

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], inputs: LayerInputs, context: LayerContext
    ) -> tuple[Float[Array, "B T D"], LayerOutputs]:
        """Returns the residual stream after the layer, and the other outputs."""
        c, e = self.config, self.execution
        own = context.self_attention(inputs)

        y, cache, weights = self.attention(c, e, c.output_init_std, name="attention")(x, own)
        x = self.add(x, y, "attention", own.rng)
        x = LayerNorm(c, e, name="attention_norm")(x)

        y, router = feed_forward(c, e, x, context=context, rng=own.rng)
        x = self.add(x, y, "feed_forward", own.rng)
        x = LayerNorm(c, e, name="feed_forward_norm")(x)
        return x, LayerOutputs(cache, weights, router=router)


class GPT(nn.Module):
    """A GPT with its head.

    Attributes:
      config: sizes and options of the model.
      execution: how it is run.
    """

    config: GPTConfig
    execution: Execution = Execution()

    make_positions: ClassVar[Callable[..., Positions]] = staticmethod(make_positions)
    """Makes the positions of the tokens."""

    def layer(self) -> type[Layer]:
        """Returns the class of one layer."""
        return PreNormLayer if self.config.norm_position == "pre" else PostNormLayer

    @nn.compact
    def __call__(
        self,
        input_ids: Int[AnyArray, "B T"],
        attention_mask: Int[AnyArray, "B S"] | Bool[AnyArray, "B T S"] | None = None,
        *,
        position_ids: Int[AnyArray, "#B #T"] | None = None,
        segment_ids: Int[AnyArray, "B T"] | None = None,
        cache: Cache | None = None,
        rng: RowKeys | None = None,
        output_attentions: bool = False,
        head_mask: Float[AnyArray, "*L N"] | None = None,
    ) -> CausalLMOutput | ClassifierOutput:
        """Computes the logits of every next token, or of the labels.

        Args:
          input_ids: token ids.
          attention_mask: 1 for the tokens that may be attended to. With a cache
            it covers the S slots of the cache, including the slots that this call
            writes. A mask `[B, T, S]` states for each token all tokens that it
            may attend to, including itself.
          position_ids: position of each token. Defaults to its index among the real
            tokens of its sequence, or of its document if packed.
          segment_ids: number of the document that each token of a packed sequence
            belongs to, 0 for padding. Documents do not attend to each other.
          cache: keys and values of earlier calls, continued by `input_ids`.
            Beyond its last slot all logits are NaN.
          rng: one key per sequence (`models.row_keys`). If None, dropout is off.
          output_attentions: whether to return the attention weights.
          head_mask: factor of the attention weights of each head, `[N]`, or `[L, N]` with one
            row per layer; 0 removes a head.

        Raises:
          UserError: T is longer than a table of positions (`max_length`), `attention_mask` does not
            cover the tokens (or slots), it is `[B, T, S]` without `position_ids`, a cache is
            combined with packed sequences, or a classifier gets a cache, packed sequences or a
            mask `[B, T, S]`.
        """
        c, e = self.config, self.execution
        if cache is not None and not c.causal:
            raise UserError(
                "a model with causal=False sees later tokens and cannot continue a cache: train "
                "one with causal=True"
            )
        # Classifiers read a row as one sequence, which these inputs do not determine.
        if c.head not in CAUSAL_HEADS:
            check_one_sequence_per_row(c.head, attention_mask, segment_ids, cache)
        position_ids, mask = prepare_inputs(
            c,
            input_ids,
            attention_mask,
            position_ids=position_ids,
            segment_ids=segment_ids,
            cache=cache,
            causal=c.causal,
        )
        # Embeddings and positions.
        width = c.d_embedding or c.d_model
        embed = Embedding(c.vocab_size, width, execution=e, name="token_embedding")
        positions = self.make_positions(
            c, e, position_ids, input_ids.shape[1], cache=cache, causal=c.causal
        )
        x = embed(input_ids)
        if c.d_embedding is not None:
            linear = functools.partial(Linear, init_std=c.init_std, use_bias=False, execution=e)
            x = linear((c.d_model,), name="embedding_projection")(x)
        x = positions.at_input(x)
        if c.embedding_norm:
            x = LayerNorm(c, e, name="embedding_norm")(x)
        x = dropout(x, c.embedding_dropout_rate, rng, "embedding")
        context = make_layer_context(
            c,
            e,
            mask,
            cache=cache,
            rng=rng,
            output_attentions=output_attentions,
            window=c.local_window,
            windowed_layers=c.windowed_layers,
            head_mask=head_mask,
            positions=positions,
            real=real_tokens(attention_mask, segment_ids, cache) if c.num_experts else None,
        )
        # The layers, and the final norm of pre-norm models.
        of_call = config_of_call(c, cache)
        x, outputs = run_layers(self.layer(), of_call, e, x, cache=cache, context=context)
        if c.norm_position == "pre" and c.final_norm:
            x = LayerNorm(c, e, name="final_norm")(x)
        if cache is not None:
            # Store the new keys and values. Logits become NaN if the cache overflowed.
            assert outputs.cache is not None
            x, cache = advance_cache(cache, outputs.cache, x, positions=positions.key_positions)
        if c.d_embedding is not None:
            linear = functools.partial(Linear, init_std=c.init_std, use_bias=False, execution=e)
            x = linear((c.d_embedding,), name="output_projection")(x)
        # The head: classifiers return labels, language models the unmultiplied projection.
        router = stack_statistics(outputs.router)
        body = EncoderOutput(x, attentions=outputs.attentions, router=router)
        if c.head == "token_classification":
            inputs = HeadInputs(body, embed.embedding, None, rng)
            return ClassificationHead(c, e, name="head")(inputs)
        if c.head == "sequence_classification":
            return LastTokenClassificationHead(c, e, name="head")(body, attention_mask)
        if not c.tie_output:
            embed = Embedding(c.vocab_size, width, execution=e, name="output_embedding")
        bias = None
        if c.output_bias:
            zeros = nn.initializers.zeros
            bias = self.param("output_bias", zeros, (c.vocab_size,), e.param_dtype)
        projection = Projection(x, embed.embedding.astype(e.dtype), bias)
        values = ValueHead(c, e, name="head")(x) if c.head == "causal_lm_with_value" else None
        return CausalLMOutput(x, projection, cache, outputs.attentions, values, router)


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
    "gpt3-medium": _gpt3("350M", 24, 1024, 16, note="table 2.1 says 350M, its sizes make 356M"),
    "gpt3-large": _gpt3("760M", 24, 1536, 16),
    "gpt3-xl": _gpt3(
        "1.3B", 24, 2048, 16, note="table 2.1 says 24 heads of 128, which is not 2,048"
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
