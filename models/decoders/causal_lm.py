"""The base classes of all decoder-only families, which map token ids to logits of tokens or labels.

`models.decoders.gpt.gpt` and `models.decoders.causal_decoder` derive from this module.
"""

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn

from ...data.common.fields import Rate, require
from ..config import Execution, TransformerConfig
from ..heads.modules import ClassificationHead, HeadInputs, LastTokenClassificationHead, ValueHead
from ..heads.outputs import CausalLMOutput, ClassifierOutput, EncoderOutput, Projection
from ..heads.specs import CAUSAL_HEADS, HEADS, HeadSpec, check_head
from ..nn.cache import Cache, advance_cache
from ..nn.dropout import RowKeys
from ..nn.experts import config_of_call, real_tokens, stack_statistics
from ..nn.layers import Embedding
from ..nn.masks import AnyArray
from ..nn.positions import Positions
from ..nn.stack import (
    Layer,
    check_one_sequence_per_row,
    make_layer_context,
    prepare_inputs,
    run_layers,
)
from ..nn.typing import Array, Bool, Float, Int

GPT_HEADS = (*CAUSAL_HEADS, "sequence_classification")
"""The heads that GPTs support."""
DECODER_HEADS = (*GPT_HEADS, "token_classification")
"""The heads of families that support token classification."""


def head_field(heads: tuple[str, ...]) -> Any:
    """Returns the config field `head` of a family that supports these heads."""
    return dataclasses.field(default="causal_lm", metadata={"choices": heads})


@dataclasses.dataclass(frozen=True, kw_only=True)
class CausalLMConfig(TransformerConfig):
    """The fields that the decoder-only families share.

    Raises:
      UserError: a size or a rate is out of range.
    """

    attention_dropout: Rate | None = None
    """Dropout rate of attention weights. Defaults to `dropout_rate`."""
    tie_output: bool = True
    """Whether the output projection shares its matrix with the token embedding."""
    head: str = head_field(DECODER_HEADS)  # pyright: ignore[reportIncompatibleVariableOverride]
    """The model's output: logits of the next token (causal_lm); the same logits with a value for
    PPO (causal_lm_with_value); labels or a score of the sequence, computed at its last real token
    (sequence_classification); or labels of each token (token_classification). The choices depend on
    the family."""
    labels: tuple[str, ...] = ()  # pyright: ignore[reportIncompatibleVariableOverride]
    """Names of the labels of a classifier, in order of their ids."""

    # Properties that differ between families. If a property differs between the models of one
    # family, that family declares it as a field.

    classifier_dropout_rate: ClassVar[float] = 0.0
    """Dropout rate of the hidden states that token classification reads."""
    window: ClassVar[int | None] = None
    """Number of tokens that a token attends to in windowed layers, including itself. If None, no
    layer has a window."""
    output_bias: ClassVar[bool] = False
    """Whether the logits have a bias (GPT-J)."""
    logit_divisor: ClassVar[float] = 1.0
    """The logits are divided by this value before they are capped (Granite)."""
    logit_cap: ClassVar[float | None] = None
    """If not None, logits z become cap · tanh(z / cap)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_head(self)

    def with_head(self, head: str, labels: tuple[str, ...]) -> "CausalLMConfig":
        """Returns the configuration of the same body with a different head."""
        return dataclasses.replace(self, head=head, labels=labels)

    @property
    def head_spec(self) -> HeadSpec:
        """The properties of the model's head."""
        return HEADS[self.head]

    @property
    def attention_dropout_rate(self) -> float:
        """Dropout rate of attention weights."""
        return self.dropout_rate if self.attention_dropout is None else self.attention_dropout

    @property
    def windowed_layers(self) -> tuple[bool, ...]:
        """Whether each layer attends only to a window; unused if `window` is None."""
        return (True,) * self.num_layers

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The window of each layer, which includes the token itself, or None for all tokens."""
        return tuple(self.window if windowed else None for windowed in self.windowed_layers)


class CausalLM(nn.Module):
    """A decoder with its head.

    A family sets `layer`, the class of its layers, and defines `embed` and `finish`.

    Attributes:
      config: sizes and options of the model.
      execution: how the model is run.
    """

    config: CausalLMConfig
    execution: Execution = Execution()

    layer: ClassVar[type[Layer]]
    """The class of the model's layers."""

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
        """Computes the logits of the next token at every position, or the logits of labels.

        Args:
          input_ids: token ids.
          attention_mask: 1 for the tokens that other tokens may attend to. If there is a cache, the
            mask covers all S slots of the cache, including the slots that this call writes. A mask
            `[B, T, S]` specifies for each token all tokens that it may attend to, including itself.
          position_ids: position of each token. Defaults to the index of the token among the real
            tokens of its sequence or, in a packed sequence, of its document.
          segment_ids: for each token of a packed sequence, the id of its document; 0 for padding.
            Documents do not attend to each other.
          cache: keys and values of earlier calls; `input_ids` continue these sequences. If the
            tokens do not fit into the cache, all logits are NaN.
          rng: one random key for each sequence (`models.row_keys`). If None, dropout is off.
          output_attentions: whether to return the attention weights.
          head_mask: factor that multiplies the attention weights of each head, `[N]`, or `[L, N]`
            with one row per layer. A factor of 0 disables a head.

        Raises:
          UserError: T exceeds the rows of a table of positions (`max_length`), `attention_mask`
            does not have an entry for each token (or slot), a mask `[B, T, S]` is passed without
            `position_ids`, a cache is combined with packed sequences, or a sequence classifier gets
            a cache, packed sequences or a mask `[B, T, S]`.
        """
        c, e = self.config, self.execution
        require(
            cache is None or c.causal,
            "a model with causal=False sees later tokens and cannot continue a cache: train "
            "a model with causal=True",
        )
        # The classifier reads the last real token of a row. This token is unknown if there is a
        # cache, segments or a mask [B, T, S].
        if c.head == "sequence_classification":
            check_one_sequence_per_row(c.head, attention_mask, segment_ids, cache)
        # Compute positions and the mask from padding, documents and the cache.
        position_ids, mask = prepare_inputs(
            c,
            input_ids,
            attention_mask,
            position_ids=position_ids,
            segment_ids=segment_ids,
            cache=cache,
            causal=c.causal,
        )
        x, positions, table = self.embed(input_ids, position_ids, cache, rng)  # x: [B, T, D]
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
            real=real_tokens(attention_mask, segment_ids, cache) if c.num_experts else None,
        )
        # Experts have no maximum capacity in a call with a cache.
        of_call = config_of_call(c, cache)
        x, outputs = run_layers(self.layer, of_call, e, x, cache=cache, context=context)
        x = self.finish(x)
        # Store the new keys and values. Logits become NaN if the cache overflowed.
        x, cache = advance_cache(cache, outputs.cache, x, positions=positions.key_positions)
        router = stack_statistics(outputs.router)
        body = EncoderOutput(x, attentions=outputs.attentions, router=router)
        # Apply the head. Classifiers return the logits of labels. Language models return the hidden
        # states and the vocabulary matrix, and do not multiply them.
        if c.head == "sequence_classification":
            return LastTokenClassificationHead(c, e, name="head")(body, attention_mask)
        if c.head == "token_classification":
            inputs = HeadInputs(body, table.embedding, None, rng)
            return ClassificationHead(c, e, name="head")(inputs)
        projection = self._projection(x, table)
        values = ValueHead(c, e, name="head")(x) if c.head == "causal_lm_with_value" else None
        return CausalLMOutput(x, projection, cache, outputs.attentions, values, router)

    def _projection(self, x: Float[Array, "B T W"], table: Embedding) -> Projection:
        """Returns the hidden states and the vocabulary matrix, without computing their product."""
        c, e = self.config, self.execution
        if not c.tie_output:
            table = Embedding(c.vocab_size, table.features, execution=e, name="output_embedding")
        bias = None
        if c.output_bias:
            zeros = nn.initializers.zeros
            bias = self.param("output_bias", zeros, (c.vocab_size,), e.param_dtype)
        # Dividing hidden states takes less time than dividing logits.
        read = x if c.logit_divisor == 1 else x / c.logit_divisor
        return Projection(read, table.embedding.astype(e.dtype), bias, c.logit_cap)

    def embed(
        self,
        input_ids: Int[AnyArray, "B T"],
        position_ids: Int[AnyArray, "#B #T"],
        cache: Cache | None,
        rng: RowKeys | None,
    ) -> tuple[Float[Array, "B T D"], Positions, Embedding]:
        """Returns the input of the first layer, the positions, and the token embedding matrix."""
        raise NotImplementedError

    def finish(self, x: Float[Array, "B T D"]) -> Float[Array, "B T W"]:
        """Returns the hidden states for the head, computed from the output of the last layer."""
        raise NotImplementedError
