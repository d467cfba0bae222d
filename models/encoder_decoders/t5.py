"""T5: an encoder-decoder that reads every task as text and writes the answer as text.

- T5: Raffel et al. 2020, "Exploring the limits of transfer learning with a unified text-to-text
  transformer", section 2.1. Each sublayer is preceded by a norm without biases. Positions are
  represented by biases of the attention scores, one for each range of distances. All layers of the
  encoder share the biases, and so do all layers of the decoder. T5 has no other biases. Sections
  2.1 and 3.7 state the sizes, and section 3.1.2 states the dropout rate.
- T5 1.1: a T5 with feed-forward layers gated by GELU (Shazeer 2020, "GLU variants improve
  transformer"), a separate output matrix, and other widths.
- mT5: Xue et al. 2021, "mT5: a massively multilingual pre-trained text-to-text transformer": T5 1.1
  with a vocabulary of 250,112 tokens.
- Flan-T5: Chung et al. 2022, "Scaling instruction-finetuned language models": T5 1.1,
  trained further.

Details that the papers leave open follow the authors' code (Mesh TensorFlow). Attention scores are
not divided by √H. Instead, the initial queries are smaller by this factor. An output projection
that is tied to the embeddings is multiplied by 1 / √D.
"""

import dataclasses
from typing import ClassVar

import flax.linen as nn

from ...data.common.fields import Positive, Rate, require_default
from ..config import Activation, Depth, PositionKind, Settings, Size, TransformerConfig
from ..heads.outputs import Projection
from ..nn.attention import AttentionContext
from ..nn.cache import Cache, advance_cache
from ..nn.dropout import RowKeys, dropout
from ..nn.layers import Embedding, FeedForward, GatedFeedForward, RMSNorm
from ..nn.masks import AnyArray
from ..nn.parameter_axes import EMBEDDING_AXES, FINAL_NORM_AXES, LAYER_AXES
from ..nn.positions import make_positions
from ..nn.stack import Layer, LayerContext, LayerInputs, LayerOutputs, run_layers
from ..nn.typing import Array, Float, Int
from ..registry import Family, Preset
from .seq2seq_lm import Seq2SeqLM, Stack, one_token_each


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config(TransformerConfig):
    """The configuration of a T5; `num_layers` is the number of layers of the encoder.

    Raises:
      UserError: a size or a rate is out of range.
    """

    head: ClassVar[str] = "seq2seq_lm"
    use_bias: ClassVar[bool] = False  # pyright: ignore[reportIncompatibleMethodOverride]

    max_length: Size = 512
    """Longest source and longest target, in tokens, that commands read and write. The model itself
    has no limit, because its positions are distances."""
    d_head: Size | None = None
    """Size of each head, H. Defaults to D / N."""
    activation: Activation = "relu"
    """Non-linearity of the feed-forward layers; "gelu_tanh" in T5 1.1 and mT5."""
    gated: bool = False
    """Whether feed-forward layers are gated (T5 1.1, mT5)."""
    norm_eps: Positive = 1e-6
    """Added to the mean square in normalization."""
    scale_scores: bool = False
    """Whether attention scores are divided by √H; False in every published T5."""
    dropout_rate: Rate = 0.1
    """Dropout rate of embeddings, attention weights, the hidden layer of feed-forward blocks, the
    output of each sublayer, and the outputs of the encoder and of the decoder."""
    init_std: Positive | None = None
    """Standard deviation of the initial kernels that read the residual stream. If None, 1 / √D.
    For queries, the standard deviation is divided by √H. Other kernels use 1 / √(number of inputs),
    embeddings use 1, and a separate output matrix and distance biases use 1 / √D."""
    positions: PositionKind = "buckets"
    """The kind of positions; a T5 supports only buckets."""
    position_distance: Size | None = 128
    """The smallest distance in the last bucket. All larger distances share this bucket."""
    num_decoder_layers: Depth | None = None
    """Number of layers of the decoder. Defaults to `num_layers`."""
    tie_output: bool = True
    """Whether the output projection shares its matrix with the embedding. False in T5 1.1 and mT5.
    """
    scale_output: bool = True
    """Whether the decoder's output is multiplied by 1 / √D before the output projection. False in
    T5 1.1 and mT5."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_default(self, ["positions"], "must be buckets in a T5")

    @property
    def head_dim(self) -> int:
        """Size of each head, H."""
        return self.d_model // self.num_heads if self.d_head is None else self.d_head

    @property
    def query_init_std(self) -> float | None:
        """Standard deviation of the initial projection to queries."""
        return self.input_init_std * self.key_dim**-0.5

    @property
    def input_init_std(self) -> float:
        """Standard deviation of the initial kernels that read the residual stream."""
        return self.d_model**-0.5 if self.init_std is None else self.init_std

    @property
    def activation_dropout_rate(self) -> float:
        """Dropout rate inside the feed-forward layer."""
        return self.dropout_rate

    @property
    def decoder(self) -> "T5Config":
        """The configuration of the decoder, with its number of layers in `num_layers`."""
        return dataclasses.replace(
            self, num_layers=self.num_decoder_layers or self.num_layers, num_decoder_layers=None
        )


class T5EncoderLayer(Layer[T5Config]):
    """A pre-norm layer with a self-attention and a feed-forward sublayer (section 2.1)."""

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], inputs: LayerInputs, context: LayerContext
    ) -> tuple[Float[Array, "B T D"], LayerOutputs]:
        """Returns the residual stream after the layer, and the layer's additional outputs."""
        attn = context.self_attention(inputs)
        x, outputs = self.self_attend(x, attn)
        return self.transform(x, attn.rng), outputs

    def self_attend(
        self, x: Float[Array, "B T D"], attn: AttentionContext
    ) -> tuple[Float[Array, "B T D"], LayerOutputs]:
        """Adds the self-attention sublayer."""
        c, e = self.config, self.execution
        y = RMSNorm(c, e, name="attention_norm")(x)
        output_std = (c.num_heads * c.value_dim) ** -0.5
        y, cache, weights = self.attention(c, e, output_std, name="attention")(y, attn)
        x = self.add(x, y, "attention", attn.rng)
        return x, LayerOutputs(cache, weights)

    def transform(self, x: Float[Array, "B T D"], rng: RowKeys | None) -> Float[Array, "B T D"]:
        """Adds the feed-forward sublayer."""
        c, e = self.config, self.execution
        y = RMSNorm(c, e, name="feed_forward_norm")(x)
        block = GatedFeedForward if c.gated else FeedForward
        y = block(c, e, c.feed_forward_dim**-0.5, name="feed_forward")(y, rng)
        return self.add(x, y, "feed_forward", rng)


class T5DecoderLayer(T5EncoderLayer):
    """A T5 layer that attends to the encoder's output between its two sublayers."""

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], inputs: LayerInputs, context: LayerContext
    ) -> tuple[Float[Array, "B T D"], LayerOutputs]:
        """Returns the residual stream after the layer, and the layer's additional outputs."""
        c, e = self.config, self.execution
        attn = context.self_attention(inputs)
        x, outputs = self.self_attend(x, attn)

        # Cross-attention: queries of the target, keys and values of the encoder's output.
        y = RMSNorm(c, e, name="cross_attention_norm")(x)
        output_std = (c.num_heads * c.value_dim) ** -0.5
        attention = self.attention(c, e, output_std, name="cross_attention")
        y, cross, weights = attention(y, context.cross_attention(inputs))
        x = self.add(x, y, "cross_attention", attn.rng)

        # Add the outputs of cross-attention to the record of self-attention.
        outputs = dataclasses.replace(outputs, cross=cross, cross_attentions=weights)
        return self.transform(x, attn.rng), outputs


class T5Stack(Stack[T5Config]):
    """The encoder or the decoder: distance biases, L layers, and a final norm."""

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        position_ids: Int[AnyArray, "#B #T"],
        cache: Cache | None,
        context: LayerContext,
    ) -> tuple[Float[Array, "B T D"], Cache | None, LayerOutputs]:
        """Maps embeddings to the stack's normalized output, and adds the tokens to the cache."""
        # The layers use `init_std` to initialize the kernels that read the residual stream.
        c, e = dataclasses.replace(self.config, init_std=self.config.input_init_std), self.execution
        # All layers of a stack share one table of biases.
        positions = make_positions(
            c,
            e,
            position_ids,
            x.shape[1],
            cache=cache,
            causal=self.causal,
            init_std=c.d_model**-0.5,
        )
        context = dataclasses.replace(context, positions=positions)
        x = dropout(x, c.dropout_rate, context.rng, "embedding")
        x, outputs = run_layers(self.layer, c, e, x, cache=cache, context=context)
        x = RMSNorm(c, e, name="final_norm")(x)
        x = dropout(x, c.dropout_rate, context.rng, "output")
        written = positions.key_positions
        x, cache = advance_cache(cache, outputs.cache, x, outputs.cross, positions=written)
        return x, cache, outputs


class T5(Seq2SeqLM[T5Config]):
    """A T5, which predicts the next token of a target, given a source.

    Attributes:
      config: sizes and options of the model.
      execution: how the model is run.
    """

    skip_padding = False  # distances count all tokens of a sequence, including padding

    def setup(self) -> None:
        """Declares the embedding tables and the two stacks of layers."""
        c, e = self.config, self.execution
        self.token_embedding = Embedding(c.vocab_size, c.d_model, 1.0, e)
        if not c.tie_output:
            self.output_embedding = Embedding(c.vocab_size, c.d_model, c.d_model**-0.5, e)
        self.encoder = T5Stack(c, e, T5EncoderLayer, causal=False)
        self.decoder = T5Stack(c.decoder, e, T5DecoderLayer, causal=True)

    def embed_source(self, ids: Int[AnyArray, "B S"]) -> Float[Array, "B S D"]:
        """Returns the embeddings of source tokens."""
        return self.token_embedding(ids)

    def embed_target(self, ids: Int[AnyArray, "B T"]) -> Float[Array, "B T D"]:
        """Returns the embeddings of target tokens."""
        return self.token_embedding(ids)

    def project(self, x: Float[Array, "B T D"]) -> Projection:
        """Returns the decoder's output and the vocabulary matrix, but does not multiply them."""
        c = self.config
        table = self.token_embedding if c.tie_output else self.output_embedding
        x = x * c.d_model**-0.5 if c.scale_output else x
        return Projection(x, table.embedding.astype(self.execution.dtype))


SIZES: dict[str, dict[str, tuple[str, int, int, int, int, int]]] = {
    "t5": {
        "small": ("60M", 6, 512, 8, 64, 2048),
        "base": ("220M", 12, 768, 12, 64, 3072),
        "large": ("770M", 24, 1024, 16, 64, 4096),
        "3b": ("2.8B", 24, 1024, 32, 128, 16_384),
        "11b": ("11B", 24, 1024, 128, 128, 65_536),
    },
    "t5-v1.1": {
        "small": ("80M", 8, 512, 6, 64, 1024),
        "base": ("250M", 12, 768, 12, 64, 2048),
        "large": ("780M", 24, 1024, 16, 64, 2816),
        "xl": ("3B", 24, 2048, 32, 64, 5120),
        "xxl": ("11B", 24, 4096, 64, 64, 10_240),
    },
    "mt5": {
        "small": ("300M", 8, 512, 6, 64, 1024),
        "base": ("580M", 12, 768, 12, 64, 2048),
        "large": ("1.2B", 24, 1024, 16, 64, 2816),
        "xl": ("3.7B", 24, 2048, 32, 64, 5120),
        "xxl": ("13B", 24, 4096, 64, 64, 10_240),
    },
}
"""The published sizes: the number of parameters in the paper, and L, D, N, H and F."""
_PAPERS = {
    "t5": "Raffel et al. 2020",
    "t5-v1.1": "Chung et al. 2022",
    "mt5": "Xue et al. 2021",
}
_LATER: Settings = {
    "activation": "gelu_tanh",
    "gated": True,
    "tie_output": False,
    "scale_output": False,
}


def _preset(kind: str, sizes: tuple[str, int, int, int, int, int]) -> Preset:
    published, num_layers, d_model, num_heads, d_head, d_ff = sizes
    config = T5Config(
        vocab_size=250_112 if kind == "mt5" else 32_128,
        num_layers=num_layers,
        d_model=d_model,
        num_heads=num_heads,
        d_head=d_head,
        d_ff=d_ff,
        **({} if kind == "t5" else _LATER),
    )
    note = "the sizes are those of Flan-T5, which is a T5 1.1" if kind == "t5-v1.1" else ""
    return Preset(config, _PAPERS[kind], published, note)


PRESETS: dict[str, Preset] = {
    f"{kind}-{name}": _preset(kind, sizes)
    for kind, named in SIZES.items()
    for name, sizes in named.items()
}

# fmt: off
NUM_PARAMETERS = {
    "t5-small": 60_506_624, "t5-base": 222_903_552, "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336, "t5-11b": 11_307_321_344,
    "t5-v1.1-small": 76_961_152, "t5-v1.1-base": 247_577_856, "t5-v1.1-large": 783_150_080,
    "t5-v1.1-xl": 2_849_757_184, "t5-v1.1-xxl": 11_135_332_352,
    "mt5-small": 300_176_768, "mt5-base": 582_401_280, "mt5-large": 1_229_581_312,
    "mt5-xl": 3_742_619_648, "mt5-xxl": 12_921_057_280,
}
# fmt: on

FAMILY = Family(
    config=T5Config,
    module=T5,
    presets=PRESETS,
    num_parameters=NUM_PARAMETERS,
    smallest_inputs=one_token_each,
    parameter_axes={**EMBEDDING_AXES, **LAYER_AXES, **FINAL_NORM_AXES},
    hf_module="encoder_decoders.t5",
)
