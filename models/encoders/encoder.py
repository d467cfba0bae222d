"""The base classes of all encoders: embeddings, a stack of layers, a pooler and a head.

The sum of the embeddings (tokens, positions, token types) is normalized. In the layers, every token
attends to all other tokens. A head reads the output of the last layer. A family derives its
configuration from `EncoderConfig` and its module from `Encoder`, and overrides the properties that
differ. `electra.py` is an example.

The layer follows Devlin et al. 2019, "BERT: Pre-training of deep bidirectional transformers for
language understanding", section 3, and normalizes each residual sum. Unlike in the papers, initial
weights are normally distributed, not truncated.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ...data.common.fields import Positive, Range, Rate, require
from ..config import Activation, Execution, TransformerConfig
from ..heads.modules import HeadInputs
from ..heads.outputs import CausalLMOutput, EncoderOutput, ModelOutput
from ..heads.specs import HEADS, HeadSpec, check_head
from ..nn.cache import Cache, advance_cache
from ..nn.dropout import RowKeys, dropout, row_keys
from ..nn.layers import (
    ACTIVATIONS,
    Embedding,
    FeedForward,
    GatedFeedForward,
    LayerNorm,
    Linear,
)
from ..nn.masks import AnyArray, is_per_query
from ..nn.parameter_axes import EMBEDDING_AXES, HEAD_AXES, LAYER_AXES
from ..nn.pooling import pool
from ..nn.positions import Positions, make_positions
from ..nn.stack import (
    Layer,
    LayerContext,
    LayerInputs,
    LayerOutputs,
    make_layer_context,
    prepare_inputs,
    run_layers,
)
from ..nn.typing import Array, Bool, Float, Int
from ..registry import AxisRules, one_token

POOLING_HEAD = "sequence_classification"
"""The only head that can pool all tokens, instead of the first token, in every family."""
POOLERS = {**ACTIVATIONS, "tanh": jnp.tanh}
"""The non-linearities that a pooler can have."""
ENCODER_HEADS = (
    *("none", "masked_lm", "sequence_classification", "token_classification"),
    *("multiple_choice", "question_answering"),
)
"""The heads that every encoder supports."""


def head_field(heads: tuple[str, ...], default: str = "masked_lm") -> Any:
    """Returns the config field `head` of a family that supports these heads."""
    return dataclasses.field(default=default, metadata={"choices": heads})


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig(TransformerConfig):
    """The fields that the encoders share.

    Raises:
      UserError: a size is out of range, or the head needs labels and has none.
    """

    num_layers: Annotated[int, Range(least=0, most=2**13)]
    """Number of layers, L. With 0 layers, a model has only the embeddings."""

    norm_eps: Positive = 1e-12
    """Constant added to the variance in layer normalization."""
    dropout_rate: Rate = 0.1
    """Dropout rate of embeddings, attention weights, the outputs of both sublayers, and the inputs
    of classifiers."""
    attention_dropout: Rate | None = None
    """Dropout rate of attention weights. Defaults to `dropout_rate`."""
    classifier_dropout: Rate | None = None
    """Dropout rate of the inputs of classifiers. Defaults to `dropout_rate`, and to 0 for question
    answering."""
    tie_output: bool = True
    """Whether heads that predict tokens use the token embedding as the vocabulary matrix. If False,
    they have a separate matrix.
    """
    pooling: Literal["cls", "mean", "max"] = "cls"
    """The vector that sequence classification reads. cls: the first token, after the pooler. mean,
    max: the mean or the maximum of the hidden states of all real tokens, without a pooler."""
    head: str = head_field(ENCODER_HEADS)  # pyright: ignore[reportIncompatibleVariableOverride]
    """The predictions of the head: masked tokens (masked_lm), next sentences (next_sentence) or
    both (pretraining); replaced tokens (replaced_token_detection); labels (sequence_classification,
    token_classification); an answer (question_answering); one of several choices (multiple_choice);
    next tokens (causal_lm); or nothing (none). The choices depend on the family."""
    labels: tuple[str, ...] = ()  # pyright: ignore[reportIncompatibleVariableOverride]
    """Names of the labels of a classification head, in order of their ids; for question answering,
    the name of the label "no answer" if some questions have no answer."""

    # Properties that differ between families. If a property differs between the models of one
    # family, that family declares it as a field.

    d_embedding: ClassVar[int | None] = None
    """Width of the embeddings. Defaults to D; a linear map projects other widths to D (ELECTRA)."""
    projects_before_norm: ClassVar[bool] = False
    """Whether the map from `d_embedding` to D precedes the norm, and has no bias (DeBERTa)."""
    body_pooler: ClassVar[bool] = False
    """Whether a model without a head also returns the pooled first token (BERT)."""
    pooler_activation: ClassVar[str] = "tanh"
    """Non-linearity of the pooler: a name in `POOLERS`."""
    classifier_drops_twice: ClassVar[bool] = False
    """Whether sequence classification also applies dropout before the pooler (RoBERTa, ELECTRA)."""
    pooler_dropout: ClassVar[float] = 0.0
    """Dropout rate before the pooler of other classifiers (DeBERTa)."""
    skips_padding: ClassVar[bool] = False
    """Whether default positions count only real tokens (RoBERTa). If False, they count padding as
    well.
    """
    head_activation: ClassVar[Activation | None] = None
    """Non-linearity before the vocabulary matrix. Defaults to `activation`."""
    output_bias: ClassVar[bool] = True
    """Whether the logits of tokens have a bias."""
    projects_embeddings: ClassVar[bool] = False
    """Whether embeddings are projected even if their width is D (ALBERT)."""
    pair_dropout: ClassVar[bool] = False
    """Whether the head "pretraining" applies dropout to the pooled token (ALBERT)."""
    inner_layers: ClassVar[int] = 1
    """Number of inner layers in each layer of a group (ALBERT)."""
    pooling_heads: ClassVar[tuple[str, ...]] = (POOLING_HEAD,)
    """The heads that can pool all tokens instead of the first token."""
    window: ClassVar[int | None] = None
    """In windowed layers, tokens attend to tokens at a distance below `window`. If None, the layers
    have no window.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_head(self)
        problem = f"head {self.head!r} does not predict tokens: leave tie_output out"
        require(self.tie_output or self.head_spec.has_token_logits, problem)
        require(
            self.pooling == "cls" or self.keeps_pooling(self.head),
            f"pooling {self.pooling!r} requires the head {POOLING_HEAD}: leave it out with "
            f"head {self.head!r}",
        )
        require(
            self.d_embedding != self.d_model or self.projects_embeddings,
            f"d_embedding {self.d_embedding} is the width of the layers, d_model: leave it out",
        )
        problem = "num_layers 0 leaves nothing to cache: choose at least 1"
        require(self.num_layers or self.head != "causal_lm", problem)

    @property
    def attention_dropout_rate(self) -> float:
        """Dropout rate of attention weights."""
        return self.dropout_rate if self.attention_dropout is None else self.attention_dropout

    @property
    def classifier_dropout_rate(self) -> float:
        """Dropout rate of the inputs of classifiers."""
        usual = self.dropout_rate if self.head_spec.has_dropout else 0.0
        return usual if self.classifier_dropout is None else self.classifier_dropout

    @property
    def head_spec(self) -> HeadSpec:
        """The properties of the model's head."""
        return HEADS[self.head]

    @property
    def position_dim(self) -> int:
        """Width of the position vectors, which are added before the map to D."""
        return self.d_embedding or self.d_model

    def with_head(self, head: str, labels: tuple[str, ...]) -> "EncoderConfig":
        """Returns the configuration of the same body with a different head."""
        return dataclasses.replace(
            self,
            head=head,
            labels=labels,
            pooling=self.pooling if self.keeps_pooling(head) else "cls",
            tie_output=self.tie_output or not HEADS[head].has_token_logits,
        )

    @classmethod
    def keeps_pooling(cls, head: str) -> bool:
        """Returns whether `pooling` may be set for a model with this head.

        A published ModernBERT sets `pooling` with every head, and fine-tuning replaces the head.
        """
        return cls.head_transform or head in cls.pooling_heads

    @property
    def has_pooler(self) -> bool:
        """Whether the model pools its first token."""
        pools = self.body_pooler if self.head == "none" else self.head_spec.needs_pooler
        return pools and self.pooling == "cls" and not self.head_transform

    @property
    def windowed_layers(self) -> tuple[bool, ...]:
        """Whether each layer attends only to a window; unused if `window` is None."""
        return (True,) * self.num_layers


class PostNormLayer(Layer[EncoderConfig]):
    """A layer of self-attention and feed-forward, which normalizes each residual sum.

    A family with additional score terms (relative biases, products with distance vectors) derives
    its own layer, and sets `attention` to a class whose `score_terms` computes these terms. A
    family with gated feed-forward layers sets `feed_forward`.
    """

    feed_forward: ClassVar[type[FeedForward] | type[GatedFeedForward]] = FeedForward
    """The feed-forward block of the layer."""

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], inputs: LayerInputs, context: LayerContext
    ) -> tuple[Float[Array, "B T D"], LayerOutputs]:
        """Returns the residual stream after the layer, and the layer's additional outputs."""
        c, e = self.config, self.execution
        attn = context.self_attention(inputs)

        # Self-attention (only a causal model has a cache).
        y, cache, weights = self.attention(c, e, c.init_std, name="attention")(x, attn)
        x = self.add(x, y, "attention", attn.rng)
        x = LayerNorm(c, e, name="attention_norm")(x)

        # The feed-forward block applies the same map to every token.
        y = self.feed_forward(c, e, c.init_std, name="feed_forward")(x, attn.rng)
        x = self.add(x, y, "feed_forward", attn.rng)
        x = LayerNorm(c, e, name="feed_forward_norm")(x)
        return x, LayerOutputs(cache, weights)


class Encoder(nn.Module):
    """An encoder with its head. A family may set a different class of layers.

    Attributes:
      config: sizes and options of the model.
      execution: how the model is run.
    """

    config: EncoderConfig
    execution: Execution = Execution()

    layer: ClassVar[type[Layer]] = PostNormLayer
    """The class of the model's layers."""
    make_positions: ClassVar[Callable[..., Positions]] = staticmethod(make_positions)
    """The function that computes the positions of the tokens."""

    @nn.compact
    def __call__(
        self,
        input_ids: Int[AnyArray, "B *choices T"],
        attention_mask: Int[AnyArray, "B *choices S"] | Bool[AnyArray, "B T S"] | None = None,
        token_type_ids: Int[AnyArray, "B *choices T"] | None = None,
        *,
        position_ids: Int[AnyArray, "#B *choices #T"] | None = None,
        segment_ids: Int[AnyArray, "B *choices T"] | None = None,
        masked_positions: Int[AnyArray, "B M"] | None = None,
        cache: Cache | None = None,
        rng: RowKeys | None = None,
        output_attentions: bool = False,
        head_mask: Float[AnyArray, "*L N"] | None = None,
    ) -> ModelOutput:
        """Computes the output of the head that `config.head` names.

        Args:
          input_ids: token ids; `[B, C, T]` for head "multiple_choice".
          attention_mask: 1 for the tokens that other tokens may attend to. If there is a cache, the
            mask covers all S slots of the cache, including the slots that this call writes. A mask
            `[B, T, S]` specifies for each token all tokens that it may attend to, including itself.
          token_type_ids: 0 in the first segment of a sequence, 1 in the second. Defaults to 0.
          position_ids: position of each token, from 0. The model adds `position_offset`. Defaults
            to the index of the token in the sequence; in a packed sequence, to its index in the
            document. By default, head "causal_lm" and RoBERTa count only real tokens.
          segment_ids: for each token of a packed sequence, the id of its document; 0 for padding.
            Documents do not attend to each other.
          masked_positions: the positions whose logits are computed. Defaults to all positions.
          cache: with head "causal_lm", keys and values of earlier calls; `input_ids` continue these
            sequences. If the tokens do not fit into the cache, all logits are NaN.
          rng: one random key for each sequence (`models.row_keys`). If None, dropout is off.
          output_attentions: whether to return the attention weights.
          head_mask: factor that multiplies the attention weights of each head, `[N]`, or `[L, N]`
            with one row per layer. A factor of 0 disables a head.

        Raises:
          UserError: T is longer than a table of positions (`max_length`), a token type does not
            exist, or the head does not support one of the inputs.
        """
        self._check(
            input_ids=input_ids,
            token_type_ids=token_type_ids,
            segment_ids=segment_ids,
            masked_positions=masked_positions,
            cache=cache,
        )
        # The body reads the choices of an example as separate rows.
        num_choices = 1
        if input_ids.ndim == 3:
            num_choices = input_ids.shape[1]
            # [B, C, T] to [B · C, T]; inputs that are None remain None.
            arrays = input_ids, attention_mask, token_type_ids, position_ids, segment_ids
            input_ids, attention_mask, token_type_ids, position_ids, segment_ids = jax.tree.map(
                lambda x: x.reshape(-1, x.shape[-1]), arrays
            )
        # Give each choice a separate dropout key.
        if rng is not None and num_choices > 1:
            rng = jax.vmap(lambda key: row_keys(key, num_choices))(rng).reshape(-1)

        c, e = self.config, self.execution
        causal = c.head == "causal_lm"
        # A mask per query does not show which tokens are real, so positions count all tokens.
        per_query = is_per_query(attention_mask)
        position_ids, mask = prepare_inputs(
            c,
            input_ids,
            attention_mask,
            position_ids=position_ids,
            segment_ids=segment_ids,
            cache=cache,
            causal=causal,
            skip_padding=causal or (c.skips_padding and not per_query),
        )
        # Run the embeddings and the layers.
        positions = self.make_positions(
            c, e, position_ids, input_ids.shape[1], cache=cache, causal=causal
        )
        x, table = self._embed(input_ids, token_type_ids, positions, rng)
        context = make_layer_context(
            c,
            e,
            mask,
            cache=cache,
            rng=rng,
            output_attentions=output_attentions,
            window=c.window,
            windowed_layers=c.windowed_layers,
            head_mask=head_mask,
            positions=positions,
        )
        context = self.complete(context, x)
        order = c.layer_order
        # each stored layer is declared once, even if it runs several times
        if self.is_initializing():
            order = range(max(order, default=-1) + 1)
        x, outputs = run_layers(self.layer, c, e, x, cache=cache, context=context, order=order)
        x = self.finish(x)
        # Store the new keys and values. Logits become NaN if the cache overflowed.
        x, cache = advance_cache(cache, outputs.cache, x, positions=positions.key_positions)
        # Apply the head. A model without a head returns the body's output.
        body = EncoderOutput(x, self._pool(x, attention_mask, rng), outputs.attentions)
        inputs = HeadInputs(body, table, masked_positions, rng, num_choices)
        if c.head_spec.module is None:
            return body
        output = c.head_spec.module(c, e, name="head")(inputs)
        if c.head == "causal_lm":
            return CausalLMOutput(x, output.projection, cache, body.attentions)
        return output

    def complete(self, context: LayerContext, x: Float[Array, "B T D"]) -> LayerContext:
        """Adds the inputs that are specific to a family to the inputs that all layers share.

        Args:
          context: the inputs that every family has.
          x: the embeddings.
        """
        del x
        return context

    def finish(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns the hidden states for the head, computed from the output of the last layer."""
        return x

    def _check(
        self,
        *,
        input_ids: AnyArray,
        token_type_ids: AnyArray | None,
        segment_ids: AnyArray | None,
        masked_positions: AnyArray | None,
        cache: Cache | None,
    ) -> None:
        """Raises UserError if the head does not support one of the inputs."""
        head, spec = self.config.head, self.config.head_spec
        axes = "[B, C, T]" if spec.takes_choices else "[B, T]"
        problem = f"head {head!r} takes input_ids {axes}, not {list(input_ids.shape)}"
        require((input_ids.ndim == 3) == spec.takes_choices, problem)
        problem = f"head {head!r} does not predict masked tokens: leave masked_positions out"
        require(masked_positions is None or spec.predicts_masked, problem)
        problem = f"head {head!r} does not support a cache: choose head 'causal_lm'"
        require(cache is None or head == "causal_lm", problem)
        problem = f"head {head!r} requires one text per row: leave segment_ids out"
        require(segment_ids is None or head == "none" or not spec.needs_pooler, problem)
        if token_type_ids is not None:
            num_types = self.config.num_token_types
            require(num_types != 0, "the model has no token types: leave token_type_ids out")
            if isinstance(token_type_ids, Tracer) or token_type_ids.size == 0:
                # In a compiled call, the values are unknown, and a type out of range gives NaN.
                return
            # A type out of range gives NaN, so check the values if they are known. Use numpy, which
            # can read a constant even in a compiled call, where jax would trace it.
            types = np.asarray(token_type_ids)
            low, high = int(types.min()), int(types.max())
            problem = f"token_type_ids contain {low} to {high}: the model has 0 to {num_types - 1}"
            require(0 <= low <= high < num_types, problem)

    def _embed(
        self,
        input_ids: Int[AnyArray, "B T"],
        token_type_ids: Int[AnyArray, "B T"] | None,
        positions: Positions,
        rng: RowKeys | None,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "V W"]]:
        """Returns the normalized sum of the embeddings, and the token embedding matrix."""
        c, e = self.config, self.execution
        width = c.d_embedding or c.d_model
        tokens = Embedding(c.vocab_size, width, execution=e, name="token_embedding")
        # The sum of token, position and type embeddings, [B, T, W].
        x = positions.at_input(tokens(input_ids))
        if c.num_token_types > 0:
            types = Embedding(c.num_token_types, width, execution=e, name="token_type_embedding")
            x += types(np.zeros((1, 1), np.int32) if token_type_ids is None else token_type_ids)
        # Map narrow embeddings [B, T, W] to [B, T, D], before or after norm and dropout.
        if c.projects_before_norm:
            x = self._to_width(x)
        x = LayerNorm(c, e, name="embedding_norm")(x)
        x = dropout(x, c.dropout_rate, rng, "embedding")
        if not c.projects_before_norm:
            x = self._to_width(x)
        return x, tokens.embedding

    def _to_width(self, x: Float[Array, "B T W"]) -> Float[Array, "B T D"]:
        """Maps narrow embeddings to the width of the layers."""
        c, bias = self.config, not self.config.projects_before_norm
        if c.d_embedding is None:
            return x
        name = "embedding_projection"
        return Linear((c.d_model,), c.init_std, 1, bias, self.execution, name=name)(x)

    def _pool(
        self, x: Float[Array, "B T D"], attention_mask: AnyArray | None, rng: RowKeys | None
    ) -> Float[Array, "B D"] | None:
        """Returns the pooled vector for the head, or None if the head does not need one."""
        c, e = self.config, self.execution
        # Heads with a transform and all pooling modes except cls pool the hidden states without a
        # pooler.
        reads_tokens = c.head_transform and c.head_spec.needs_pooler and c.head != "none"
        if (c.pooling != "cls" and c.head in c.pooling_heads) or reads_tokens:
            # Without a mask every token is real.
            if attention_mask is None:
                attention_mask = jnp.ones(x.shape[:2], jnp.int32)
            require(
                attention_mask.ndim != 3,
                f"attention_mask [B, T, S] does not say which tokens are real: pooling "
                f"{c.pooling!r} needs [B, T]",
            )
            return pool(x, attention_mask, (c.pooling,)).astype(e.dtype)
        if not c.has_pooler:
            return None
        first = x[:, 0]  # [B, D]
        drops_twice = c.classifier_drops_twice and c.head == POOLING_HEAD
        rate = c.classifier_dropout_rate if drops_twice else c.pooler_dropout
        first = dropout(first, rate, rng, "pooler")
        pooled = Linear((c.d_model,), c.init_std, execution=e, name="pooler")(first)
        return POOLERS[c.pooler_activation](pooled)


def smallest_inputs(config: EncoderConfig) -> dict[str, np.ndarray]:
    """Returns inputs with a single token, and a single choice for multiple choice."""
    if not config.head_spec.takes_choices:
        return one_token(config)
    return {"input_ids": np.zeros((1, 1, 1), np.int32)}


ENCODER_AXES: AxisRules = {
    **EMBEDDING_AXES,
    **LAYER_AXES,
    **HEAD_AXES,
    r"embedding_norm/(scale|bias)": (None,),
    r"embedding_projection/kernel": (None, "model"),
    r"embedding_projection/bias": (None,),
    r"pooler/kernel": ("model", None),
    r"pooler/bias": (None,),
}
"""The logical axes of the parameters of every encoder."""
