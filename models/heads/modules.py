"""Heads: modules that turn the output of the last layer into predictions.

- Masked tokens and next sentences: Devlin et al. 2019, "BERT", section 3.1 and appendix A.
- Sequence labels, token labels, answers and choices: section 4 of the same paper.

Classifiers apply dropout to their input, as in the authors' code: the pooled output, or the hidden
states in token classification. Heads that are not classifiers have no dropout. The exception is
question answering, if the configuration sets a rate (DistilBERT).
"""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax import struct

from ..config import Execution
from ..nn.dropout import RowKeys, dropout
from ..nn.layers import ACTIVATIONS, Embedding, LayerNorm, Linear
from ..nn.masks import AnyArray
from ..nn.typing import Array, Float, Int
from .outputs import (
    ClassifierOutput,
    EncoderOutput,
    MaskedLMOutput,
    PretrainingOutput,
    Projection,
    QuestionAnsweringOutput,
)


@struct.dataclass
class HeadInputs:
    """The inputs of a head."""

    body: EncoderOutput
    table: Float[Array, "V W"]
    """The token embeddings, which are also the vocabulary matrix if `config.tie_output`."""
    masked_positions: Int[AnyArray, "B M"] | None
    rng: RowKeys | None
    num_choices: int = struct.field(pytree_node=False, default=1)

    @property
    def pooled(self) -> Float[Array, "B D"]:
        """The pooled first token. Requires a body with a pooler."""
        assert self.body.pooler_output is not None
        return self.body.pooler_output


class _Head(nn.Module):
    """The base class of the heads; `config` has the sizes, and `execution` the precision."""

    config: Any
    execution: Execution

    def _scores(
        self, name: str, num_scores: int, x: Float[Array, "..."], *, use_bias: bool = True
    ) -> Float[Array, "..."]:
        std, e = self.config.score_init_std, self.execution
        # Losses and metrics need float32, regardless of the precision of the body.
        scores = Linear((num_scores,), std, use_bias=use_bias, execution=e, name=name)(x)
        return scores.astype(jnp.float32)

    def _transform(self, x: Float[Array, "... D"], width: int) -> Float[Array, "... {width}"]:
        """Applies a linear map to `width` dimensions, an activation, and a norm."""
        c, e = self.config, self.execution
        std, bias = c.transform_init_std, c.transform_bias
        x = Linear((width,), std, use_bias=bias, execution=e, name="transform")(x)
        x = ACTIVATIONS[c.head_activation or c.activation](x)
        return LayerNorm(c, e, name="transform_norm")(x)

    def _read(self, x: Float[Array, "... D"], rng: RowKeys | None) -> Float[Array, "... D"]:
        """Returns the input of a classifier, after the family's transform (if any) and dropout."""
        c = self.config
        x = self._transform(x, c.d_model) if c.head_transform else x
        return dropout(x, c.classifier_dropout_rate, rng, "classifier")

    def _projection(self, inputs: HeadInputs) -> Projection:
        """Returns transformed hidden states, the (tied) vocabulary matrix and the head's bias."""
        c, e = self.config, self.execution
        x = inputs.body.last_hidden_state
        if inputs.masked_positions is not None:
            # As in the authors' code, only the masked positions are transformed.
            x = jnp.take_along_axis(x, inputs.masked_positions[..., None], axis=1)
        # The transform, [B, M, W] for embeddings of width W.
        width = inputs.table.shape[-1]
        x = self._transform(x, width)
        # The vocabulary bias [V] belongs to the head, even if the matrix is tied.
        bias, table = None, inputs.table
        if c.output_bias:
            bias = self.param("bias", nn.initializers.zeros, (c.vocab_size,), e.param_dtype)
        if not c.tie_output:
            output = Embedding(c.vocab_size, width, execution=e, name="output_embedding")
            table = output.embedding
        # Return hidden states and matrix. The loss multiplies them in chunks, so that the logits
        # [B, M, V] are never materialized.
        return Projection(x, table.astype(e.dtype), bias)


class MaskedLMHead(_Head):
    """Predicts the tokens at masked positions."""

    @nn.compact
    def __call__(self, inputs: HeadInputs) -> MaskedLMOutput:
        """Projects the masked positions, or all positions if `masked_positions` is None."""
        return MaskedLMOutput(inputs.body, self._projection(inputs))


class PretrainingHead(_Head):
    """Predicts masked tokens, and whether the second segment of an input continues the first."""

    @nn.compact
    def __call__(self, inputs: HeadInputs) -> PretrainingOutput:
        """Projects the masked positions, or all positions if `masked_positions` is None."""
        # Scores [B, 2] of the pooled first token, in float32.
        pooled, c = inputs.pooled, self.config
        if c.pair_dropout:
            pooled = dropout(pooled, c.classifier_dropout_rate, inputs.rng, "classifier")
        relationship = self._scores("next_sentence", 2, pooled)
        return PretrainingOutput(inputs.body, self._projection(inputs), relationship)


class NextSentenceHead(_Head):
    """Predicts whether the second segment of an input continues the first."""

    @nn.compact
    def __call__(self, inputs: HeadInputs) -> ClassifierOutput:
        """Returns scores `[B, 2]`."""
        logits = self._scores("next_sentence", 2, inputs.pooled)
        return ClassifierOutput(inputs.body, logits)


class ClassificationHead(_Head):
    """Predicts labels or a score, per sequence or per token, or the correct one of C choices.

    The `HeadSpec` of the head determines the kind of prediction: `needs_pooler`, `needs_labels` and
    `takes_choices`.
    """

    @nn.compact
    def __call__(self, inputs: HeadInputs) -> ClassifierOutput:
        """Returns scores: `[B, L]` or `[B, T, L]`; for choices `[B, C]`, from B · C sequences."""
        spec = self.config.head_spec
        # Hidden states [B, D] to label sequences, or [B, T, D] to label tokens.
        x = inputs.pooled if spec.needs_pooler else inputs.body.last_hidden_state
        x = self._read(x, inputs.rng)
        num_scores = len(self.config.labels) if spec.needs_labels else 1
        # Logits [B, L] of pooled tokens, or [B, T, L] of all tokens.
        logits = self._scores("classifier", num_scores, x)
        if spec.takes_choices:
            # [B · C, 1] to [B, C].
            logits = logits.reshape(-1, inputs.num_choices)
        return ClassifierOutput(inputs.body, logits)


class LastTokenClassificationHead(_Head):
    """Predicts labels or a score of a sequence from the last token of a causal model.

    The linear map has no bias, as in Hugging Face's `GPT2ForSequenceClassification`. A reward model
    has one label.
    """

    @nn.compact
    def __call__(
        self, body: EncoderOutput, attention_mask: Int[AnyArray, "B T"] | None
    ) -> ClassifierOutput:
        """Returns scores `[B, L]`.

        Args:
          body: The output of the layers.
          attention_mask: 1 for real tokens. If None, all tokens are real. For a sequence without
            real tokens, the first position is used.
        """
        x = body.last_hidden_state
        last = jnp.full(x.shape[:1], x.shape[1] - 1)
        if attention_mask is not None:
            # The largest index of a real token, so that padding may be on either side.
            last = jnp.max(jnp.where(attention_mask != 0, jnp.arange(x.shape[1]), 0), axis=1)
        x = jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]  # [B, D]
        num_scores = len(self.config.labels)
        return ClassifierOutput(body, self._scores("classifier", num_scores, x, use_bias=False))


class ValueHead(_Head):
    """Predicts the expected reward after each token of a causal model, for PPO."""

    @nn.compact
    def __call__(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T"]:
        """Returns values `[B, T]`, in float32."""
        return self._scores("value", 1, hidden, use_bias=False)[..., 0]


class ReplacedTokenHead(_Head):
    """Predicts which tokens a generator has replaced (ELECTRA, section 2)."""

    @nn.compact
    def __call__(self, inputs: HeadInputs) -> ClassifierOutput:
        """Returns scores `[B, T]`, which are above 0 for tokens that were probably replaced."""
        c, e = self.config, self.execution
        # Score every token: [B, T, D] to [B, T].
        x = Linear((c.d_model,), c.init_std, execution=e, name="dense")(
            inputs.body.last_hidden_state
        )
        scores = self._scores("score", 1, ACTIVATIONS[c.activation](x))
        return ClassifierOutput(inputs.body, scores[..., 0])


class QuestionAnsweringHead(_Head):
    """Predicts where an answer begins and ends."""

    @nn.compact
    def __call__(self, inputs: HeadInputs) -> QuestionAnsweringOutput:
        """Returns the scores of each token as the start and as the end of the answer, `[B, T]`."""
        x = self._read(inputs.body.last_hidden_state, inputs.rng)
        logits = self._scores("span", 2, x)
        return QuestionAnsweringOutput(inputs.body, logits[..., 0], logits[..., 1])
