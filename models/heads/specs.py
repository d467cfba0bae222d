"""Records that describe the heads: the module, the output, and the names in other libraries."""

import dataclasses
from collections.abc import Container, Mapping

import flax.linen as nn

from ...data.common.fields import require
from ..config import TransformerConfig
from .modules import (
    ClassificationHead,
    MaskedLMHead,
    NextSentenceHead,
    PretrainingHead,
    QuestionAnsweringHead,
    ReplacedTokenHead,
)
from .outputs import (
    CausalLMOutput,
    ClassifierOutput,
    EncoderOutput,
    MaskedLMOutput,
    PretrainingOutput,
    QuestionAnsweringOutput,
    Seq2SeqLMOutput,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """All properties of a head. To add a head, add a record to `HEADS`."""

    name: str
    """The name in `config.head`, which is Hugging Face's name of the task."""
    output: type
    """The class of the model's output."""
    output_names: tuple[str, ...] = ("logits",)
    """The names of the arrays that the head adds to the body's output."""
    module: type[nn.Module] | None = None
    """The module on top of an encoder. If None, the model returns the output of the body, or the
    family's module projects this output.
    """
    needs_pooler: bool = False
    """Whether the head reads the pooled first token."""
    needs_labels: bool = False
    """Whether `config.labels` must name at least one label."""
    predicts_masked: bool = False
    """Whether the head predicts masked tokens, at `masked_positions` if this is not None."""
    takes_choices: bool = False
    """Whether inputs are `[B, C, T]`: C choices for each question."""
    generates: bool = False
    """Whether the head predicts next tokens, so that the model can generate text."""
    reads_decoder: bool = False
    """Whether an encoder-decoder with several heads (BART) supports the head."""
    has_dropout: bool = True
    """Whether the dropout rate before the head defaults to the rate of the body. If False, it
    defaults to 0."""
    own_params: tuple[str, ...] = ()
    """Linear maps below `head/` whose parameters only the same head with the same labels can reuse.
    """
    hf_tensors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The name that each linear map below `head/` has in Hugging Face's BERT. The map to the
    vocabulary is not included.
    """
    hf_class_suffix: str
    """The suffix of transformers classes with this head, such as `ForMaskedLM`."""
    hub_task: str
    """The task on the Hugging Face hub (`pipeline_tag`)."""
    default_recipe: str
    """The recipe that provides the data settings of an imported model with this head."""
    peft_task: str | None = None
    """The name of the task in the library peft, or None if peft lacks the task."""

    @property
    def has_token_logits(self) -> bool:
        """Whether the output has a logit for each token of the vocabulary."""
        return self.predicts_masked or self.generates

    @property
    def hf_auto_class(self) -> str:
        """The class of transformers that loads a model with this head."""
        return f"AutoModel{self.hf_class_suffix.removeprefix('Model')}"


# Tensor names that several heads have in common.
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
    problem = f"head {config.head!r} is unknown: choose {', '.join(config.heads)}"
    require(config.head in config.heads, problem)
    problem = f"head {config.head!r} has no labels: give at least one name"
    require(not HEADS[config.head].needs_labels or config.labels, problem)
    problem = f"labels {', '.join(config.labels)} are not all different"
    require(len(set(config.labels)) == len(config.labels), problem)


def require_head(
    config: TransformerConfig, heads: Container[str], refusal: str, remedy: str
) -> None:
    """Checks that a model has one of the required heads.

    Args:
      config: the model's configuration.
      heads: names of the accepted heads.
      refusal: the clause of the message that says what other models cannot do, such as "cannot
        generate text".
      remedy: the clause of the message that says what the user can do.

    Raises:
      UserError: the model has a different head.
    """
    require(config.head in heads, f"a model with the head {config.head} {refusal}: {remedy}")
