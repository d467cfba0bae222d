"""Heads: modules that turn the output of the last layer into predictions.

- Masked tokens and next sentences: Devlin et al. 2019, "BERT", section 3.1 and appendix A.
- One label per sequence, one per token, answers, choices: section 4.

Classifiers apply dropout to their input, as in the authors' code: the pooled output, or the hidden
states in token classification. The other heads have no dropout. Question answering has it only if
the configuration sets a rate, as DistilBERT's does.
"""

import dataclasses
from collections.abc import Container, Mapping
from typing import Any, TypeAlias

import flax.linen as nn
import jax.numpy as jnp
from flax import struct

from ...data.common.errors import UserError
from ..config import Execution, TransformerConfig
from .cache import Cache
from .dropout import RowKeys, dropout
from .experts import RouterStatistics
from .layers import ACTIVATIONS, Embedding, LayerNorm, Linear, affine
from .masks import AnyArray
from .typing import Array, Float, Int

AttentionWeights: TypeAlias = Array | tuple[Array, ...] | None
"""Weights `[L, B, N, T, S]`, or a tuple of L arrays (separate layers); None if not requested."""


@struct.dataclass
class Projection:
    """Hidden states and the vocabulary matrix, whose product is the logits.

    Only `logits()` computes the product. A training loss computes the cross-entropy in chunks, so
    that `[B, T, V]` is never materialized.
    """

    hidden: Float[Array, "B T D"]
    kernel: Float[Array, "V D"]
    bias: Float[Array, " V"] | None = None
    cap: float | None = struct.field(pytree_node=False, default=None)
    """If given, logits z become cap · tanh(z / cap) (Gemma 2)."""

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
    """With the head `causal_lm_with_value`, the expected reward after each token."""
    router: RouterStatistics | None = None
    """Sums of a mixture of experts, `[L, B, …]`, for the losses of `models.nn.experts`."""

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
    """If the cache already holds the keys and values of the source, None."""
    cache: Cache | None = None
    encoder_attentions: AttentionWeights = None
    decoder_attentions: AttentionWeights = None
    cross_attentions: AttentionWeights = None
    """From the target's T tokens to the source's S tokens."""

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
    """Sums of a mixture of experts, `[L, B, …]`, for the losses of `models.nn.experts`."""


class _WithBody:
    """Gives the output of a head the fields of the body's output."""

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
        """Attention weights of every layer, if requested."""
        return self.body.attentions

    @property
    def router(self) -> RouterStatistics | None:
        """Sums of a mixture of experts, `[L, B, …]`."""
        return self.body.router


@struct.dataclass
class MaskedLMOutput(_WithBody):
    """Logits of the masked tokens, or of the tokens at all positions."""

    body: EncoderOutput
    projection: Projection
    """Hidden states of the `[B, M]` masked positions if they are given, else of all `[B, T]`."""

    @property
    def logits(self) -> Float[Array, "B T V"]:
        """Scores of every word of the vocabulary, float32; computed on access."""
        return self.projection.logits()


@struct.dataclass
class PretrainingOutput(_WithBody):
    """Logits of masked tokens and next sentences, BERT's two pretraining objectives."""

    body: EncoderOutput
    projection: Projection
    """Hidden states of the `[B, M]` masked positions if they are given, else of all `[B, T]`."""
    seq_relationship_logits: Float[Array, "B 2"]
    """float32. Index 0: the second part continues the first; 1: it is from another document."""

    @property
    def prediction_logits(self) -> Float[Array, "B T V"]:
        """Scores of every word of the vocabulary, float32; computed on access."""
        return self.projection.logits()


@struct.dataclass
class ClassifierOutput(_WithBody):
    """Logits of labels or choices. With choices, the first axis of `body` has size B · C."""

    body: EncoderOutput
    logits: Float[Array, "B *rest"]
    """float32: `[B, 2]` next sentence, `[B, L]` sequence, `[B, T, L]` token, `[B, C]` choice,
    `[B, T]` replaced tokens."""


@struct.dataclass
class QuestionAnsweringOutput(_WithBody):
    """Logits of each token, also padding, as start and end of the answer, in float32."""

    body: EncoderOutput
    start_logits: Float[Array, "B T"]
    end_logits: Float[Array, "B T"]


ModelOutput: TypeAlias = CausalLMOutput | EncoderOutput | _WithBody
"""The output of an encoder with any head."""


@struct.dataclass
class HeadInputs:
    """The inputs of a head."""

    body: EncoderOutput
    table: Float[Array, "V W"]
    """The token embeddings. The vocabulary projection shares them if `config.tie_output`."""
    masked_positions: Int[AnyArray, "B M"] | None
    rng: RowKeys | None
    num_choices: int = struct.field(pytree_node=False, default=1)

    @property
    def pooled(self) -> Float[Array, "B D"]:
        """The pooled first token; the body must have a pooler."""
        assert self.body.pooler_output is not None
        return self.body.pooler_output


class _Head(nn.Module):
    """Base of the heads: sizes are in `config`, precision in `execution`."""

    config: Any
    execution: Execution

    def _scores(
        self, name: str, number: int, x: Float[Array, "..."], *, use_bias: bool = True
    ) -> Float[Array, "..."]:
        std, e = self.config.score_init_std, self.execution
        # Losses and metrics need float32, whatever the precision of the body.
        scores = Linear((number,), std, use_bias=use_bias, execution=e, name=name)(x)
        return scores.astype(jnp.float32)

    def _transform(self, x: Float[Array, "... D"], width: int) -> Float[Array, "... {width}"]:
        """Applies a linear map to a width, an activation, and a norm."""
        c, e = self.config, self.execution
        std, bias = c.transform_init_std, c.transform_bias
        x = Linear((width,), std, use_bias=bias, execution=e, name="transform")(x)
        x = ACTIVATIONS[c.head_activation or c.activation](x)
        return LayerNorm(c, e, name="transform_norm")(x)

    def _read(self, x: Float[Array, "... D"], rng: RowKeys | None) -> Float[Array, "... D"]:
        """Returns the input of a classifier: transformed if the family does, and with dropout."""
        c = self.config
        x = self._transform(x, c.d_model) if c.head_transform else x
        return dropout(x, c.classifier_dropout_rate, rng, "classifier")

    def _projection(self, inputs: HeadInputs) -> Projection:
        """Applies the transform, and adds the head's bias to the (tied) vocabulary matrix."""
        c, e = self.config, self.execution
        x = inputs.body.last_hidden_state
        if inputs.masked_positions is not None:
            # As in the authors' code, only the masked positions are transformed.
            x = jnp.take_along_axis(x, inputs.masked_positions[..., None], axis=1)
        # The transform, [B, M, W] for embeddings of width W.
        width = inputs.table.shape[-1]
        x = self._transform(x, width)
        # The vocabulary's bias [V] belongs to the head, also if the matrix is tied.
        bias = self.param("bias", nn.initializers.zeros, (c.vocab_size,), e.param_dtype)
        table = inputs.table
        if not c.tie_output:
            own = Embedding(c.vocab_size, width, execution=e, name="output_embedding")
            table = own.embedding
        # Return the factors of the logits: the loss multiplies them in chunks, so that [B, M, V]
        # never exists.
        return Projection(x, table.astype(e.dtype), bias)


class MaskedLMHead(_Head):
    """Predicts the tokens at masked positions."""

    @nn.compact
    def __call__(self, inputs: HeadInputs) -> MaskedLMOutput:
        """Projects the masked positions, or all positions if none are given."""
        return MaskedLMOutput(inputs.body, self._projection(inputs))


class PretrainingHead(_Head):
    """Predicts masked tokens, and whether the second part continues the first."""

    @nn.compact
    def __call__(self, inputs: HeadInputs) -> PretrainingOutput:
        """Projects the masked positions, or all positions if none are given."""
        # [B, 2] from the pooled first token, in float32.
        pooled, c = inputs.pooled, self.config
        if c.pair_dropout:
            pooled = dropout(pooled, c.classifier_dropout_rate, inputs.rng, "classifier")
        relationship = self._scores("next_sentence", 2, pooled)
        return PretrainingOutput(inputs.body, self._projection(inputs), relationship)


class NextSentenceHead(_Head):
    """Predicts whether the second part continues the first."""

    @nn.compact
    def __call__(self, inputs: HeadInputs) -> ClassifierOutput:
        """Scores `[B, 2]`."""
        logits = self._scores("next_sentence", 2, inputs.pooled)
        return ClassifierOutput(inputs.body, logits)


class ClassificationHead(_Head):
    """Predicts labels or a score, per sequence or per token, or the right one of C choices.

    The head's `HeadSpec` determines which: `needs_pooler`, `needs_labels` and `takes_choices`.
    """

    @nn.compact
    def __call__(self, inputs: HeadInputs) -> ClassifierOutput:
        """Scores `[B, L]` or `[B, T, L]`; for choices `[B, C]`, from B · C sequences."""
        spec = HEADS[self.config.head]
        # [B, D] for a label of each sequence, [B, T, D] for a label of each token.
        x = inputs.pooled if spec.needs_pooler else inputs.body.last_hidden_state
        x = self._read(x, inputs.rng)
        number = len(self.config.labels) if spec.needs_labels else 1
        # [B, L] of pooled tokens, or [B, T, L] of all tokens.
        logits = self._scores("classifier", number, x)
        if spec.takes_choices:
            # [B · C, 1] to [B, C].
            logits = logits.reshape(-1, inputs.num_choices)
        return ClassifierOutput(inputs.body, logits)


class LastTokenClassificationHead(_Head):
    """Predicts labels or a score of a sequence from the last token of a causal model.

    The map has no bias, as in Hugging Face's `GPT2ForSequenceClassification`. A reward model has
    one label.
    """

    @nn.compact
    def __call__(
        self, body: EncoderOutput, attention_mask: Int[AnyArray, "B T"] | None
    ) -> ClassifierOutput:
        """Returns scores `[B, L]`.

        Args:
          body: The output of the layers.
          attention_mask: 1 for real tokens. If None, all are real. For a sequence without real
            tokens, the first position is used.
        """
        x = body.last_hidden_state
        last = jnp.full(x.shape[:1], x.shape[1] - 1)
        if attention_mask is not None:
            # The largest index of a real token, so that padding may be on either side.
            last = jnp.max(jnp.where(attention_mask != 0, jnp.arange(x.shape[1]), 0), axis=1)
        x = jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]  # [B, D]
        number = len(self.config.labels)
        return ClassifierOutput(body, self._scores("classifier", number, x, use_bias=False))


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
        """Scores `[B, T]`, above 0 for tokens that are probably replaced."""
        c, e = self.config, self.execution
        # Every token is scored, [B, T, D] to [B, T].
        x = Linear((c.d_model,), c.init_std, execution=e, name="dense")(
            inputs.body.last_hidden_state
        )
        scores = self._scores("score", 1, ACTIVATIONS[c.activation](x))
        return ClassifierOutput(inputs.body, scores[..., 0])


class QuestionAnsweringHead(_Head):
    """Predicts where an answer begins and ends."""

    @nn.compact
    def __call__(self, inputs: HeadInputs) -> QuestionAnsweringOutput:
        """Scores `[B, T]` for each end."""
        x = self._read(inputs.body.last_hidden_state, inputs.rng)
        logits = self._scores("span", 2, x)
        return QuestionAnsweringOutput(inputs.body, logits[..., 0], logits[..., 1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """All properties of a head. A new head is a record in `HEADS`."""

    name: str
    """The name in `config.head`, which is Hugging Face's name of the task."""
    output: type
    """The class of the model's output."""
    output_names: tuple[str, ...] = ("logits",)
    """The arrays of the output, without the body's output."""
    module: type[nn.Module] | None = None
    """The module on top of an encoder. If None, the output is the body's, or the family projects
    it."""
    needs_pooler: bool = False
    """Whether the head reads the pooled first token."""
    needs_labels: bool = False
    """Whether `config.labels` must name at least one label."""
    predicts_masked: bool = False
    """Whether the head predicts masked tokens, at `masked_positions` if given."""
    takes_choices: bool = False
    """Whether inputs are `[B, C, T]`: C choices for each question."""
    generates: bool = False
    """Whether the head predicts next tokens, so that the model can generate text."""
    reads_decoder: bool = False
    """Whether an encoder-decoder with several heads (BART) supports it."""
    has_dropout: bool = True
    """Whether dropout before the head defaults to the rate of the body; else it defaults to 0."""
    own_params: tuple[str, ...] = ()
    """Maps below `head/` that can be reused only by the same head with the same labels."""
    hf_tensors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Maps below `head/`, without the vocabulary's, to their names in Hugging Face's BERT."""
    hf_class_suffix: str
    """The suffix of transformers' classes with this head, such as `ForMaskedLM`."""
    hub_task: str
    """The task on the Hugging Face hub (`pipeline_tag`)."""
    default_recipe: str
    """The recipe that provides the data settings of an imported model with this head."""
    peft_task: str | None = None
    """The name of the task in the library peft, or None if it has none."""

    @property
    def has_token_logits(self) -> bool:
        """Whether the output has a logit for each token of the vocabulary."""
        return self.predicts_masked or self.generates

    @property
    def hf_auto_class(self) -> str:
        """The class of transformers that loads a model with this head."""
        return f"AutoModel{self.hf_class_suffix.removeprefix('Model')}"


# Names of tensors that several heads share.
_CLASSIFIER = {"classifier": "classifier"}
_NEXT_SENTENCE = {"next_sentence": "cls.seq_relationship"}

HEADS: dict[str, HeadSpec] = {
    spec.name: spec
    for spec in (
        HeadSpec(
            name="none",
            output=EncoderOutput,
            output_names=(),
            needs_pooler=True,
            hf_class_suffix="Model",
            hub_task="feature-extraction",
            default_recipe="bert-quickstart",
            peft_task="FEATURE_EXTRACTION",
        ),
        HeadSpec(
            name="pretraining",
            module=PretrainingHead,
            output=PretrainingOutput,
            output_names=("prediction_logits", "seq_relationship_logits"),
            needs_pooler=True,
            predicts_masked=True,
            hf_tensors=_NEXT_SENTENCE,
            hf_class_suffix="ForPreTraining",
            hub_task="fill-mask",
            default_recipe="bert-quickstart",
        ),
        HeadSpec(
            name="masked_lm",
            module=MaskedLMHead,
            output=MaskedLMOutput,
            predicts_masked=True,
            hf_class_suffix="ForMaskedLM",
            hub_task="fill-mask",
            default_recipe="bert-quickstart",
        ),
        HeadSpec(
            name="causal_lm",
            module=MaskedLMHead,
            output=CausalLMOutput,
            generates=True,
            hf_class_suffix="ForCausalLM",
            hub_task="text-generation",
            default_recipe="quickstart",
            peft_task="CAUSAL_LM",
        ),
        HeadSpec(
            name="causal_lm_with_value",
            output=CausalLMOutput,
            output_names=("logits", "values"),
            generates=True,
            own_params=("value",),
            hf_class_suffix="ForCausalLM",
            hub_task="text-generation",
            default_recipe="quickstart",
            peft_task="CAUSAL_LM",
        ),
        HeadSpec(
            name="replaced_token_detection",
            module=ReplacedTokenHead,
            output=ClassifierOutput,
            own_params=("dense", "score"),
            hf_tensors={
                "dense": "discriminator_predictions.dense",
                "score": "discriminator_predictions.dense_prediction",
            },
            hf_class_suffix="ForPreTraining",
            hub_task="feature-extraction",
            default_recipe="bert-quickstart",
        ),
        HeadSpec(
            name="next_sentence",
            module=NextSentenceHead,
            output=ClassifierOutput,
            needs_pooler=True,
            hf_tensors=_NEXT_SENTENCE,
            hf_class_suffix="ForNextSentencePrediction",
            hub_task="text-classification",
            default_recipe="bert-quickstart",
        ),
        HeadSpec(
            name="sequence_classification",
            module=ClassificationHead,
            output=ClassifierOutput,
            needs_pooler=True,
            needs_labels=True,
            hf_class_suffix="ForSequenceClassification",
            hub_task="text-classification",
            default_recipe="bert-classify",
            reads_decoder=True,
            own_params=("classifier",),
            hf_tensors=_CLASSIFIER,
            peft_task="SEQ_CLS",
        ),
        HeadSpec(
            name="token_classification",
            module=ClassificationHead,
            output=ClassifierOutput,
            needs_labels=True,
            hf_class_suffix="ForTokenClassification",
            hub_task="token-classification",
            default_recipe="bert-tag",
            own_params=("classifier",),
            hf_tensors=_CLASSIFIER,
            peft_task="TOKEN_CLS",
        ),
        HeadSpec(
            name="multiple_choice",
            module=ClassificationHead,
            output=ClassifierOutput,
            needs_pooler=True,
            takes_choices=True,
            hf_class_suffix="ForMultipleChoice",
            hub_task="multiple-choice",
            default_recipe="bert-choice",
            own_params=("classifier",),
            hf_tensors=_CLASSIFIER,
        ),
        HeadSpec(
            name="question_answering",
            module=QuestionAnsweringHead,
            output=QuestionAnsweringOutput,
            output_names=("start_logits", "end_logits"),
            reads_decoder=True,
            has_dropout=False,
            own_params=("span",),
            hf_tensors={"span": "qa_outputs"},
            hf_class_suffix="ForQuestionAnswering",
            hub_task="question-answering",
            default_recipe="bert-span",
            peft_task="QUESTION_ANS",
        ),
        HeadSpec(
            name="seq2seq_lm",
            output=Seq2SeqLMOutput,
            generates=True,
            reads_decoder=True,
            hf_class_suffix="ForSeq2SeqLM",
            hub_task="translation",
            default_recipe="multi30k-en-de",
            peft_task="SEQ_2_SEQ_LM",
        ),
    )
}
"""Every head, by name."""


CAUSAL_HEADS = ("causal_lm", "causal_lm_with_value")
"""The heads of causal language models."""


def encoder_heads() -> tuple[str, ...]:
    """Returns the names of the heads that an encoder can have."""
    return tuple(name for name, spec in HEADS.items() if spec.module or name == "none")


def check_head(config: TransformerConfig) -> None:
    """Checks that a family supports the head of a configuration, and that the labels fit.

    Raises:
      UserError: The head is unknown, or labels are missing or not all different.
    """
    if config.head not in config.heads:
        raise UserError(f"head {config.head!r} is unknown: choose {', '.join(config.heads)}")
    if HEADS[config.head].needs_labels and not config.labels:
        raise UserError(f"head {config.head!r} has no labels: give at least one name")
    if len(set(config.labels)) < len(config.labels):
        raise UserError(f"labels {', '.join(config.labels)} are not all different")


def require_head(
    config: TransformerConfig, heads: Container[str], refusal: str, remedy: str
) -> None:
    """Checks that a model has one of the required heads.

    Args:
      config: the model's configuration.
      heads: names of the accepted heads.
      refusal: what a model with another head cannot do, for the message, such as "writes no text".
      remedy: what the user can do, for the message.

    Raises:
      UserError: the model has another head.
    """
    if config.head not in heads:
        raise UserError(f"a model with the head {config.head} {refusal}: {remedy}")
