"""The outputs of models, one class per kind of head."""

from typing import TypeAlias

import jax.numpy as jnp
from flax import struct

from ..nn.cache import Cache
from ..nn.experts import RouterStatistics
from ..nn.layers import affine
from ..nn.typing import Array, Float

AttentionWeights: TypeAlias = Array | tuple[Array, ...] | None
"""Attention weights `[L, B, N, T, S]`, or a tuple of L arrays (separate layers), or None if they
were not requested."""


@struct.dataclass
class Projection:
    """Hidden states and the vocabulary matrix. Their product is the logits.

    Only `logits()` computes the product of hidden states and vocabulary matrix. A training loss
    computes the cross-entropy in chunks, so that `[B, T, V]` is never materialized.
    """

    hidden: Float[Array, "B T D"]
    kernel: Float[Array, "V D"]
    bias: Float[Array, " V"] | None = None
    cap: float | None = struct.field(pytree_node=False, default=None)
    """If not None, logits z become cap · tanh(z / cap) (Gemma 2)."""

    def logits(self) -> Float[Array, "B T V"]:
        """Returns hidden · kernelᵀ + bias, in float32."""
        logits = affine(self.hidden, self.kernel, self.bias, jnp.float32)
        return logits if self.cap is None else self.cap * jnp.tanh(logits / self.cap)

    def uncapped(self, gradient: Array, logits: Float[Array, "B T V"]) -> Float[Array, "B T V"]:
        """Returns the gradient of the uncapped logits, given the gradient of `logits()`."""
        return gradient if self.cap is None else gradient * (1 - jnp.square(logits / self.cap))


@struct.dataclass
class CausalLMOutput:
    """The output of a causal language model."""

    last_hidden_state: Float[Array, "B T D"]
    projection: Projection
    cache: Cache | None = None
    attentions: AttentionWeights = None
    values: Float[Array, "B T"] | None = None
    """The expected reward after each token, for the head `causal_lm_with_value`."""
    router: RouterStatistics | None = None
    """Router statistics of a mixture of experts, `[L, B, …]`, for losses in `models.nn.experts`."""

    @property
    def logits(self) -> Float[Array, "B T V"]:
        """Logits of the next token, float32; computed on access."""
        return self.projection.logits()


@struct.dataclass
class Seq2SeqLMOutput:
    """The output of an encoder-decoder."""

    last_hidden_state: Float[Array, "B T D"]
    """The decoder's residual stream after the last layer."""
    projection: Projection
    encoder_last_hidden_state: Float[Array, "B S D"] | None
    """None if the cache already contains the keys and values of the source."""
    cache: Cache | None = None
    encoder_attentions: AttentionWeights = None
    decoder_attentions: AttentionWeights = None
    cross_attentions: AttentionWeights = None
    """Attention weights from the T tokens of the target to the S tokens of the source."""

    @property
    def logits(self) -> Float[Array, "B T V"]:
        """Logits of the next token, float32; computed on access."""
        return self.projection.logits()


@struct.dataclass
class EncoderOutput:
    """The output of an encoder without a head."""

    last_hidden_state: Float[Array, "B T D"]
    pooler_output: Float[Array, "B D"] | None = None
    attentions: AttentionWeights = None
    router: RouterStatistics | None = None
    """Router statistics of a mixture of experts, `[L, B, …]`, for losses in `models.nn.experts`."""


class _WithBody:
    """Base class of the outputs of heads, with the fields of the body's output as properties."""

    body: EncoderOutput

    @property
    def last_hidden_state(self) -> Float[Array, "B T D"]:
        """The residual stream after the last layer."""
        return self.body.last_hidden_state

    @property
    def pooler_output(self) -> Float[Array, "B D"] | None:
        """The pooled first token, or None if the head does not use it."""
        return self.body.pooler_output

    @property
    def attentions(self) -> AttentionWeights:
        """Attention weights of every layer, if they were requested."""
        return self.body.attentions

    @property
    def router(self) -> RouterStatistics | None:
        """Router statistics of a mixture of experts, `[L, B, …]`."""
        return self.body.router


@struct.dataclass
class MaskedLMOutput(_WithBody):
    """Logits of the masked tokens, or of the tokens at all positions."""

    body: EncoderOutput
    projection: Projection
    """Hidden states of the `[B, M]` masked positions, or of all `[B, T]` positions if
    `masked_positions` is None."""

    @property
    def logits(self) -> Float[Array, "B T V"]:
        """Scores of every word of the vocabulary, float32; computed on access."""
        return self.projection.logits()


@struct.dataclass
class PretrainingOutput(_WithBody):
    """Logits of BERT's two pretraining objectives: masked tokens and next sentences."""

    body: EncoderOutput
    projection: Projection
    """Hidden states of the `[B, M]` masked positions, or of all `[B, T]` positions if
    `masked_positions` is None."""
    seq_relationship_logits: Float[Array, "B 2"]
    """float32. Index 0: the second segment continues the first; index 1: it is from another
    document."""

    @property
    def prediction_logits(self) -> Float[Array, "B T V"]:
        """Scores of every word of the vocabulary, float32; computed on access."""
        return self.projection.logits()


@struct.dataclass
class ClassifierOutput(_WithBody):
    """Logits of labels or choices. With choices, the first axis of `body` has size B · C."""

    body: EncoderOutput
    logits: Float[Array, "B *rest"]
    """float32: `[B, 2]` for next sentences, `[B, L]` for sequences, `[B, T, L]` for tokens,
    `[B, C]` for choices, and `[B, T]` for replaced tokens."""


@struct.dataclass
class QuestionAnsweringOutput(_WithBody):
    """Logits of each token (including padding) as start and as end of the answer, in float32."""

    body: EncoderOutput
    start_logits: Float[Array, "B T"]
    end_logits: Float[Array, "B T"]


ModelOutput: TypeAlias = CausalLMOutput | EncoderOutput | _WithBody
"""The output of an encoder with any head."""
