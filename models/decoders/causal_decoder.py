"""The shared frame of the rotary decoders: everything around the layers.

The frame is a token embedding, layers with rotary positions, a final RMSNorm, and a head. A family
derives its configuration and its module from the two classes here, and writes its layer in the
order of its paper (`llama.py` is the shortest).
"""

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax.numpy as jnp

from ...data.common.fields import Positive, PositiveInt, Rate, require, require_default
from ..config import (
    Activation,
    Execution,
    PositionKind,
    RotatedFraction,
    Size,
    TransformerConfig,
    divisors_of,
    require_layers,
    require_pairs,
)
from ..nn.cache import Cache, advance_cache
from ..nn.dropout import RowKeys, dropout
from ..nn.experts import config_of_call, real_tokens, stack_statistics
from ..nn.heads import (
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
from ..nn.layers import Embedding, RMSNorm
from ..nn.masks import AnyArray
from ..nn.positions import Positions
from ..nn.rotary import rotary_positions
from ..nn.stack import (
    Layer,
    check_one_sequence_per_row,
    make_layer_context,
    prepare_inputs,
    run_layers,
)
from ..nn.typing import Bool, Float, Int
from ..rotary_scaling import RotaryScaling

DECODER_HEADS = (*CAUSAL_HEADS, "sequence_classification", "token_classification")
"""The supported heads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CausalDecoderConfig(TransformerConfig):
    """The fields that the rotary decoders share.

    Raises:
      UserError: a size or a rate is out of range.
    """

    use_bias: ClassVar[bool] = False  # pyright: ignore[reportIncompatibleMethodOverride]
    attention_bias: ClassVar[bool] = False  # pyright: ignore[reportIncompatibleMethodOverride]

    activation: Activation = "silu"
    """Non-linearity of the gate."""
    norm_eps: Positive = 1e-5
    """Added to the mean square in normalization."""
    dropout_rate: Rate = 0.0
    """Dropout rate of embeddings, attention weights and the outputs of both sublayers; the papers
    use no dropout."""
    attention_dropout: Rate | None = None
    """Dropout rate of attention weights, if not `dropout_rate`."""
    classifier_dropout: Rate | None = None
    """Dropout rate of the hidden states before token classification, if not 0.1."""
    num_kv_heads: Size | None = None
    """Number of key/value heads, K, if not `num_heads`."""
    d_head: Size | None = None
    """Size of one head, H, if not D / N."""
    rope_base: Positive = 10_000.0
    """Base of the rotary wavelengths (theta)."""
    rope_fraction: RotatedFraction = 1.0
    """The fraction of each head that is rotated: its first H · fraction dimensions."""
    rope_scaling: RotaryScaling | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """How rotary frequencies are scaled for sequences longer than the trained length."""
    positions: PositionKind = "rotary"
    """The kind of positions; these families support only rotary ones."""
    tie_output: bool = False
    """Whether the output projection is the token embedding; else it has its own matrix."""
    head: str = dataclasses.field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default="causal_lm", metadata={"choices": DECODER_HEADS}
    )
    """The output: next tokens (causal_lm), next tokens and their values for PPO
    (causal_lm_with_value), labels or a score of the sequence, read at its last real token
    (sequence_classification), or labels of every token (token_classification)."""
    labels: tuple[str, ...] = ()  # pyright: ignore[reportIncompatibleVariableOverride]
    """Names of the labels of a classifier, in order of their ids."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_head(self)
        require(
            self.num_heads % self.kv_heads == 0,
            f"num_heads {self.num_heads} is not divisible by num_kv_heads {self.kv_heads}: "
            f"choose num_kv_heads from {divisors_of(self.num_heads)}",
        )
        self._check_rotary()

    def _check_rotary(self) -> None:
        """Checks that the rotary options are consistent."""
        require_default(self, ["positions"], "differs from this family's, which are rotary")
        require_default(self, ["position_base"], "is named rope_base in this family")
        require_pairs(self.rotated_dim, self.key_dim, f"rope_fraction {self.rope_fraction}")
        for name in ("short_factors", "long_factors"):
            factors = getattr(self.rope_scaling, name, None)
            require(
                factors is None or len(factors) == self.rotated_dim // 2,
                f"rope_scaling {name} has {len(factors or ())} numbers for {self.rotated_dim} "
                f"rotated dimensions: give {self.rotated_dim // 2}",
            )

    def with_head(self, head: str, labels: tuple[str, ...]) -> "CausalDecoderConfig":
        """Returns the configuration of the same body with another head."""
        return dataclasses.replace(self, head=head, labels=labels)

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads, K; a divisor of `num_heads`."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Size of one head, H."""
        return self.d_model // self.num_heads if self.d_head is None else self.d_head

    @property
    def rotated_dim(self) -> int:
        """Number of dimensions of a head that are rotated, R."""
        return int(self.key_dim * self.rope_fraction)

    @property
    def attention_dropout_rate(self) -> float:
        """Dropout rate of attention weights."""
        return self.dropout_rate if self.attention_dropout is None else self.attention_dropout

    @property
    def classifier_dropout_rate(self) -> float:
        """Dropout rate of the hidden states before token classification."""
        return 0.1 if self.classifier_dropout is None else self.classifier_dropout

    # Properties that differ between families. A family whose models differ in one makes it a field.

    window: ClassVar[int | None] = None
    """Number of tokens that a token attends to in windowed layers, including itself, or None."""
    windowed_rope_base: ClassVar[float | None] = None
    """Base of the rotary wavelengths in windowed layers, if not `rope_base`; never scaled."""
    embedding_scale: ClassVar[float] = 1.0
    """Factor of the token embeddings."""
    logit_cap: ClassVar[float | None] = None
    """If given, logits z become cap · tanh(z / cap)."""

    @property
    def windowed_layers(self) -> tuple[bool, ...]:
        """Whether each layer attends to the window only; read only if there is a window."""
        return (True,) * self.num_layers

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Returns the window of each layer, which includes the token itself; None: all tokens."""
        return tuple(self.window if windowed else None for windowed in self.windowed_layers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowedDecoderConfig(CausalDecoderConfig):
    """A decoder whose layers may attend only to a window of tokens.

    Raises:
      UserError: a size or a rate is out of range.
    """

    window: PositiveInt | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Number of tokens that a token attends to, including itself. If None, all tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedDecoderConfig(WindowedDecoderConfig):
    """A decoder in which some layers attend to a window and the others to all tokens.

    Raises:
      UserError: a size or a rate is out of range.
    """

    full_layers: tuple[int, ...] | None = None
    """Indices, from 0, of the layers that attend to all tokens despite the window. If None, the
    family's default."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_layers("full_layers", self.full_layers, self.num_layers)

    @property
    def usual_full_layers(self) -> tuple[int, ...]:
        """The layers that attend to all tokens if `full_layers` is None."""
        return ()

    @property
    def windowed_layers(self) -> tuple[bool, ...]:
        """Whether each layer attends to the window only; read only if there is a window."""
        full = self.usual_full_layers if self.full_layers is None else self.full_layers
        return tuple(i not in full for i in range(self.num_layers))


class CausalDecoder(nn.Module):
    """A decoder with its head; a family sets `layer`.

    Attributes:
      config: sizes and options of the model.
      execution: how it is run.
    """

    config: CausalDecoderConfig
    execution: Execution = Execution()

    layer: ClassVar[type[Layer]]
    """The class of one layer."""

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
          UserError: `attention_mask` does not cover the tokens (or slots), it is
            `[B, T, S]` without `position_ids`, a cache is combined with packed
            sequences, or a sequence classifier gets a cache, packed sequences or a
            mask `[B, T, S]`.
        """
        c, e = self.config, self.execution
        # The classifier reads the last real token of a row, which these inputs do not determine.
        if c.head == "sequence_classification":
            check_one_sequence_per_row(c.head, attention_mask, segment_ids, cache)
        position_ids, mask = prepare_inputs(
            c,
            input_ids,
            attention_mask,
            position_ids=position_ids,
            segment_ids=segment_ids,
            cache=cache,
            causal=True,
        )
        embed = Embedding(c.vocab_size, c.d_model, execution=e, name="token_embedding")
        x = embed(input_ids)
        # The scale is rounded to the compute dtype first, as in the published code of Gemma.
        if c.embedding_scale != 1:
            x = x * jnp.asarray(c.embedding_scale, x.dtype)
        x = dropout(x, c.dropout_rate, rng, "embedding")
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
            positions=self._positions(position_ids),
            real=real_tokens(attention_mask, segment_ids, cache) if c.num_experts else None,
        )
        of_call = config_of_call(c, cache)
        # The layers and the final norm.
        x, outputs = run_layers(self.layer, of_call, e, x, cache=cache, context=context)
        x = RMSNorm(c, e, name="final_norm")(x)
        if cache is not None:
            # Store the new keys and values. Logits become NaN if the cache overflowed.
            assert outputs.cache is not None
            x, cache = advance_cache(cache, outputs.cache, x)
        # The head: classifiers return labels, language models the unmultiplied projection.
        router = stack_statistics(outputs.router)
        body = EncoderOutput(x, attentions=outputs.attentions, router=router)
        if c.head == "sequence_classification":
            return LastTokenClassificationHead(c, e, name="head")(body, attention_mask)
        if c.head == "token_classification":
            inputs = HeadInputs(body, embed.embedding, None, rng)
            return ClassificationHead(c, e, name="head")(inputs)
        if not c.tie_output:
            embed = Embedding(c.vocab_size, c.d_model, execution=e, name="output_embedding")
        projection = Projection(x, embed.embedding.astype(e.dtype), cap=c.logit_cap)
        values = ValueHead(c, e, name="head")(x) if c.head == "causal_lm_with_value" else None
        return CausalLMOutput(x, projection, cache, outputs.attentions, values, router)

    def _positions(self, position_ids: Int[AnyArray, "#B #T"]) -> Positions:
        """Returns the rotations of the tokens, separately for windowed layers if needed."""
        c = self.config
        full = rotary_positions(
            position_ids,
            c.rotated_dim,
            c.rope_base,
            scaling=c.rope_scaling,
            max_length=c.max_length,
        )
        if c.windowed_rope_base is None or c.window is None:
            return Positions(rotary=full)
        windowed = rotary_positions(position_ids, c.rotated_dim, c.windowed_rope_base)
        return Positions(rotary=full, windowed_rotary=windowed)
