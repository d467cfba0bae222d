"""The Transformer: an encoder-decoder, published for translation.

Vaswani et al. 2017, "Attention is all you need": section 3 for the model; section 5.4 for dropout;
table 3 for the variations. The equations in section 3 have biases in the feed-forward layers but
not in the projections of attention. Details that the paper leaves open follow the authors' code as
released in 2017 (tensor2tensor's `transformer_base`, later called `transformer_base_v1`):

- no dropout of attention weights or inside the feed-forward layers;
- initial kernels are uniform (Glorot and Bengio 2010). Initial embeddings are normal with standard
  deviation 1 / √D, so that embeddings have unit variance after the multiplication by √D, and the
  initial logits of a tied output have unit variance.

Where the authors' code and the paper differ, this module follows the paper: the code also has
biases in the projections of attention, puts all sines before the cosines, and adds a vector that
represents the kind of target to every token of the source. The authors' layer normalization adds
1e-6 to the variance; this module defaults to 1e-5 as in Marian, so that trained models can be
exported.

Options that are not in the paper come from Marian's models (Junczys-Dowmunt et al. 2018, "Marian:
fast neural machine translation in C++") and Pegasus (Zhang et al. 2020), which normalizes before
each sublayer. Pegasus has separate layer classes, so that the code of each layer follows its paper.
Flags within a layer are only for variations within one paper.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

import flax.linen as nn

from ...data.common.fields import Positive, Rate, require
from ..config import Activation, Depth, PositionKind, Size, TransformerConfig, divisors_of
from ..heads.outputs import Projection
from ..nn.cache import Cache, advance_cache
from ..nn.dropout import dropout
from ..nn.layers import Embedding, FeedForward, LayerNorm
from ..nn.masks import AnyArray
from ..nn.parameter_axes import EMBEDDING_AXES, FINAL_NORM_AXES, LAYER_AXES
from ..nn.positions import Positions, make_positions
from ..nn.stack import (
    Layer,
    LayerContext,
    LayerInputs,
    LayerOutputs,
    run_layers,
)
from ..nn.typing import Array, Float, Int
from ..registry import Family, Preset
from .seq2seq_lm import Seq2SeqLM, Stack, one_token_each
from .transformer_table3 import BASE, TABLE_3


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig(TransformerConfig):
    """An encoder-decoder. `num_layers`, `num_heads` and `d_ff` describe the encoder.

    Raises:
      UserError: a size is out of range, or options contradict each other.
    """

    head: ClassVar[str] = "seq2seq_lm"

    activation: Activation = "relu"
    """Non-linearity of the feed-forward layers."""
    norm_eps: Positive = 1e-5
    """Added to the variance in layer normalization."""
    dropout_rate: Rate = 0.1
    """Dropout rate of the sums of embeddings and positions, and of each sublayer's output."""
    init_std: Positive | None = None
    """Standard deviation of initial kernels. If None, each kernel is initialized uniformly, over an
    interval that depends on its sizes (Glorot and Bengio 2010, equation 16). The standard
    deviation of initial embeddings is always 1 / √D."""
    attention_dropout_rate: Rate = 0.0  # pyright: ignore[reportIncompatibleMethodOverride]
    """Dropout rate of attention weights."""
    activation_dropout_rate: Rate = 0.0  # pyright: ignore[reportIncompatibleMethodOverride]
    """Dropout rate inside the feed-forward layers, after the activation."""
    attention_bias: bool = False  # pyright: ignore[reportIncompatibleMethodOverride]
    """Whether the projections of attention have biases (Marian)."""
    num_decoder_layers: Depth | None = None
    """Number of layers of the decoder. Defaults to `num_layers`."""
    decoder_num_heads: Size | None = None
    """Number of attention heads of the decoder. Defaults to `num_heads`."""
    decoder_d_ff: Size | None = None
    """Width of the decoder's feed-forward layers. Defaults to `d_ff`."""
    norm_position: Literal["pre", "post"] = "post"
    """post: after each residual sum, as published. pre: before each sublayer, and once more after
    the last layer of the encoder and of the decoder."""
    positions: PositionKind = "sinusoidal"
    """The kind of positions of the encoder and the decoder; see `TransformerConfig`. Row E of table
    3 has learned positions."""
    scale_embedding: bool = True
    """Whether embeddings are multiplied by √D before positions are added."""
    share_embeddings: bool = True
    """Whether source and target share one embedding matrix. If False, the source has a separate
    matrix.
    """
    source_vocab_size: Size | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Vocabulary size of the source language, if its embedding is not shared. Defaults to
    `vocab_size`.
    """
    tie_output: bool = True
    """Whether the output projection shares its matrix with the target's embedding."""
    output_bias: bool = False
    """Whether logits have a bias (Marian's final_logits_bias)."""
    encoder_causal: bool = False
    """Whether source tokens attend only to themselves and earlier tokens."""

    embedding_norm: ClassVar[bool] = False
    """Whether the sums of embeddings and positions are normalized (BART)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.source_vocab_size is None or not self.share_embeddings,
            f"source_vocab_size {self.source_vocab_size} needs a separate table: "
            "set share_embeddings to false",
        )
        require(
            self.d_model % (self.decoder_num_heads or 1) == 0,
            f"d_model {self.d_model} is not divisible by decoder_num_heads "
            f"{self.decoder_num_heads}: choose from {divisors_of(self.d_model)}",
        )

    @property
    def embedding_init_std(self) -> float:
        """Standard deviation of initial embeddings of tokens and positions."""
        return self.d_model**-0.5

    @property
    def encoder(self) -> "EncoderDecoderConfig":
        """The configuration of the encoder."""
        return self

    @property
    def decoder(self) -> "EncoderDecoderConfig":
        """The configuration of the decoder, with its `num_layers`, `num_heads` and `d_ff`."""
        return dataclasses.replace(
            self,
            num_layers=self.num_decoder_layers or self.num_layers,
            num_heads=self.decoder_num_heads or self.num_heads,
            d_ff=self.decoder_d_ff or self.d_ff,
            num_decoder_layers=None,
            decoder_num_heads=None,
            decoder_d_ff=None,
        )


PRESETS: dict[str, Preset] = {
    f"transformer-{name}": Preset(
        EncoderDecoderConfig(**{**BASE, **row.fields}),
        "Vaswani et al. 2017",
        row.published,
        row.note,
    )
    for name, row in TABLE_3.items()
}


class EncoderLayer(Layer[EncoderDecoderConfig]):
    """A layer that normalizes the residual sum after each sublayer (section 3.1)."""

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], inputs: LayerInputs, context: LayerContext
    ) -> tuple[Float[Array, "B T D"], LayerOutputs]:
        """Returns the residual stream after the layer, and the layer's additional outputs."""
        c, e = self.config, self.execution
        attn = context.self_attention(inputs)

        # Self-attention among the tokens of the source, without a cache.
        y, _, weights = self.attention(c, e, c.init_std, name="attention")(x, attn)
        x = self.add(x, y, "attention", attn.rng)
        x = LayerNorm(c, e, name="attention_norm")(x)

        # Feed-forward, the same map for every token.
        y = FeedForward(c, e, c.init_std, name="feed_forward")(x, attn.rng)
        x = self.add(x, y, "feed_forward", attn.rng)
        x = LayerNorm(c, e, name="feed_forward_norm")(x)
        return x, LayerOutputs(None, weights)


class PreNormEncoderLayer(Layer[EncoderDecoderConfig]):
    """An encoder layer that normalizes the input of each sublayer (Pegasus)."""

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], inputs: LayerInputs, context: LayerContext
    ) -> tuple[Float[Array, "B T D"], LayerOutputs]:
        """Returns the residual stream after the layer, and the layer's additional outputs."""
        c, e = self.config, self.execution
        attn = context.self_attention(inputs)

        # Self-attention; the residual stream itself is not normalized.
        y = LayerNorm(c, e, name="attention_norm")(x)
        y, _, weights = self.attention(c, e, c.init_std, name="attention")(y, attn)
        x = self.add(x, y, "attention", attn.rng)

        # Feed-forward, the same map for every token.
        y = LayerNorm(c, e, name="feed_forward_norm")(x)
        y = FeedForward(c, e, c.init_std, name="feed_forward")(y, attn.rng)
        x = self.add(x, y, "feed_forward", attn.rng)
        return x, LayerOutputs(None, weights)


class DecoderLayer(Layer[EncoderDecoderConfig]):
    """A layer that attends to the encoder's output between its two sublayers (section 3.1)."""

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], inputs: LayerInputs, context: LayerContext
    ) -> tuple[Float[Array, "B T D"], LayerOutputs]:
        """Returns the residual stream after the layer, and the layer's additional outputs."""
        c, e = self.config, self.execution
        attn = context.self_attention(inputs)

        # Self-attention to the target so far, including cached tokens.
        y, cache, weights = self.attention(c, e, c.init_std, name="attention")(x, attn)
        x = self.add(x, y, "attention", attn.rng)
        x = LayerNorm(c, e, name="attention_norm")(x)

        # Cross-attention: queries of the target, keys and values of the encoder's output.
        attention = self.attention(c, e, c.init_std, name="cross_attention")
        y, cross, cross_weights = attention(x, context.cross_attention(inputs))
        x = self.add(x, y, "cross_attention", attn.rng)
        x = LayerNorm(c, e, name="cross_attention_norm")(x)

        # Feed-forward, the same map for every token.
        y = FeedForward(c, e, c.init_std, name="feed_forward")(x, attn.rng)
        x = self.add(x, y, "feed_forward", attn.rng)
        x = LayerNorm(c, e, name="feed_forward_norm")(x)
        return x, LayerOutputs(cache, weights, cross, cross_weights)


class PreNormDecoderLayer(DecoderLayer):
    """A decoder layer that normalizes the input of each sublayer (Pegasus)."""

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], inputs: LayerInputs, context: LayerContext
    ) -> tuple[Float[Array, "B T D"], LayerOutputs]:
        """Returns the residual stream after the layer, and the layer's additional outputs."""
        c, e = self.config, self.execution
        attn = context.self_attention(inputs)

        # Self-attention to the target so far, including cached tokens.
        y = LayerNorm(c, e, name="attention_norm")(x)
        y, cache, weights = self.attention(c, e, c.init_std, name="attention")(y, attn)
        x = self.add(x, y, "attention", attn.rng)

        # Cross-attention: queries of the target, keys and values of the encoder's output.
        y = LayerNorm(c, e, name="cross_attention_norm")(x)
        attention = self.attention(c, e, c.init_std, name="cross_attention")
        y, cross, cross_weights = attention(y, context.cross_attention(inputs))
        x = self.add(x, y, "cross_attention", attn.rng)

        # Feed-forward, the same map for every token.
        y = LayerNorm(c, e, name="feed_forward_norm")(x)
        y = FeedForward(c, e, c.init_std, name="feed_forward")(y, attn.rng)
        x = self.add(x, y, "feed_forward", attn.rng)
        return x, LayerOutputs(cache, weights, cross, cross_weights)


class TransformerStack(Stack[EncoderDecoderConfig]):
    """The encoder or the decoder: positions, L layers, and a final norm in pre-norm models."""

    make_positions: ClassVar[Callable[..., Positions]] = staticmethod(make_positions)
    """The function that makes the positions of the tokens."""

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        position_ids: Int[AnyArray, "#B #T"],
        cache: Cache | None,
        context: LayerContext,
    ) -> tuple[Float[Array, "B T D"], Cache | None, LayerOutputs]:
        """Maps embeddings to the stack's output (section 3.1), and adds the tokens to the cache."""
        c, e = self.config, self.execution
        positions = self.make_positions(
            c,
            e,
            position_ids,
            x.shape[1],
            cache=cache,
            causal=self.causal,
            init_std=c.embedding_init_std,
        )
        # Before the layers: add the positions, normalize (BART only), and apply dropout.
        x = positions.at_input(x)
        context = dataclasses.replace(context, positions=positions)
        if c.embedding_norm:
            x = LayerNorm(c, e, name="embedding_norm")(x)
        x = dropout(x, c.dropout_rate, context.rng, "embedding")
        x, outputs = run_layers(self.layer, c, e, x, cache=cache, context=context)
        if c.norm_position == "pre":
            x = LayerNorm(c, e, name="final_norm")(x)
        written = positions.key_positions
        x, cache = advance_cache(cache, outputs.cache, x, outputs.cross, positions=written)
        return x, cache, outputs


class EncoderDecoder(Seq2SeqLM[EncoderDecoderConfig]):
    """A Transformer that predicts the next token of a target, given a source.

    Attributes:
      config: sizes and options of the model.
      execution: how the model is run.
    """

    stack: ClassVar[type[TransformerStack]] = TransformerStack
    """The class of the encoder and the decoder."""
    layers: ClassVar[Mapping[str, tuple[type[Layer], type[Layer]]]] = {
        "post": (EncoderLayer, DecoderLayer),
        "pre": (PreNormEncoderLayer, PreNormDecoderLayer),
    }
    """The classes of encoder and decoder layers, for each value of `norm_position`."""

    def setup(self) -> None:
        """Declares the embedding tables and the two stacks of layers."""
        c, e = self.config, self.execution

        def table(size: int) -> Embedding:
            return Embedding(size, c.d_model, c.embedding_init_std, e)

        # The target has an embedding table. The source and the output share this table, or have
        # separate tables.
        self.token_embedding = table(c.vocab_size)
        if not c.share_embeddings:
            self.source_embedding = table(c.input_vocab_size)
        if not c.tie_output:
            self.output_embedding = table(c.vocab_size)
        if c.output_bias:
            zeros = nn.initializers.zeros
            self.output_bias = self.param("output_bias", zeros, (c.vocab_size,), e.param_dtype)
        # The encoder and the decoder.
        encoder_layer, decoder_layer = self.layers[c.norm_position]
        self.encoder = self.stack(c.encoder, e, encoder_layer, causal=c.encoder_causal)
        self.decoder = self.stack(c.decoder, e, decoder_layer, causal=True)

    def embed_source(self, ids: Int[AnyArray, "B S"]) -> Float[Array, "B S D"]:
        """Returns the embeddings of source tokens, multiplied by √D (section 3.4)."""
        c = self.config
        x = (self.token_embedding if c.share_embeddings else self.source_embedding)(ids)
        return x * c.d_model**0.5 if c.scale_embedding else x

    def embed_target(self, ids: Int[AnyArray, "B T"]) -> Float[Array, "B T D"]:
        """Returns the embeddings of target tokens, multiplied by √D."""
        x = self.token_embedding(ids)
        return x * self.config.d_model**0.5 if self.config.scale_embedding else x

    def project(self, x: Float[Array, "B T D"]) -> Projection:
        """Returns the decoder's output and the vocabulary matrix, but does not multiply them."""
        c = self.config
        table = self.token_embedding if c.tie_output else self.output_embedding
        bias = self.output_bias if c.output_bias else None
        return Projection(x, table.embedding.astype(self.execution.dtype), bias)


# fmt: off
NUM_PARAMETERS = {
    "transformer-base": 63_045_632, "transformer-big": 214_171_648,
    "transformer-1-head": 63_045_632, "transformer-4-heads": 63_045_632,
    "transformer-16-heads": 63_045_632, "transformer-32-heads": 63_045_632,
    "transformer-keys-16": 55_967_744, "transformer-keys-32": 58_327_040,
    "transformer-2-layers": 33_644_544, "transformer-4-layers": 48_345_088,
    "transformer-8-layers": 77_746_176, "transformer-d-256": 26_816_512,
    "transformer-d-1024": 163_815_424, "transformer-ff-1024": 50_450_432,
    "transformer-ff-4096": 88_236_032, "transformer-learned": 64_094_208,
}
# fmt: on

FAMILY = Family(
    config=EncoderDecoderConfig,
    module=EncoderDecoder,
    presets=PRESETS,
    num_parameters=NUM_PARAMETERS,
    smallest_inputs=one_token_each,
    parameter_axes={**EMBEDDING_AXES, **LAYER_AXES, **FINAL_NORM_AXES},
    hf_module="encoder_decoders.marian",
)
