"""The objective of encoder-decoders: predict each next token of a target from its source.

The objective is used for translation, for other text pairs, and for the denoising of T5 and BART,
where the targets contain the removed text.
"""

import dataclasses
from typing import ClassVar, cast

import jax.numpy as jnp

from ...data.common.fields import Rate
from ...data.dataset import DataSplit
from ...data.tasks.denoising import DenoisingData
from ...data.tasks.span_corruption import SpanCorruptionData, SpanCorruptionExamples
from ...data.tasks.translation import TextToTextData, TranslationData, TranslationExamples
from ..losses.cross_entropy import cross_entropy
from ..losses.eval_step import Evaluation
from ..losses.metrics import missing_rouge, text_scores, translation_scores
from ..losses.objective import Batch, Objective, Outputs, Terms, packed_weights, select_inputs
from ..objective_config import GenerationMetrics, ObjectiveConfig, Scores, perplexity

Seq2SeqData = TranslationData | SpanCorruptionData | DenoisingData


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seq2SeqConfig(ObjectiveConfig[Seq2SeqData]):
    """The settings of an encoder-decoder's loss."""

    kind = "seq2seq"
    data_kinds = (TranslationData, TextToTextData, SpanCorruptionData, DenoisingData)
    head_names = ("seq2seq_lm",)
    progress_metrics = ("nll", "perplexity", "accuracy")
    next_command = "translate {run} --input FILE"
    generation: ClassVar = {
        TranslationData.kind: GenerationMetrics(translation_scores),
        TextToTextData.kind: GenerationMetrics(text_scores, missing_rouge),
    }

    label_smoothing: Rate = 0.0
    """Fraction of a label's probability that is spread over all other tokens."""

    def build(self, data: Seq2SeqData) -> Objective:
        """Returns `seq2seq`."""
        del data
        return seq2seq(self)

    def metrics(self, evaluation: Evaluation, split: DataSplit, data: Seq2SeqData) -> Scores:
        """Returns the perplexity, the accuracy, and the numbers of tokens and of text pairs."""
        means, tokens = evaluation.means, int(evaluation.counts["nll"])
        scores = {"perplexity": perplexity(means["nll"]), "accuracy": means["accuracy"]}
        # The loss of text pairs may have label smoothing, so also report the loss without
        # smoothing.
        if data.kind in self.generation:
            pairs = len(cast(TranslationExamples, split.examples).pairs)
            return {"nll": means["nll"], **scores, "tokens": tokens, "pairs": pairs}
        texts = cast(SpanCorruptionExamples, split.examples).num_texts
        return {**scores, "tokens": tokens, "texts": texts}

    def loss_note(self, data: Seq2SeqData) -> str | None:
        """Returns a line that explains label smoothing, or None without smoothing."""
        del data
        if not self.label_smoothing:
            return None
        return (
            f"loss is smoothed (--objective.label-smoothing {self.label_smoothing:g}), as in "
            "training; nll is the loss without smoothing, and perplexity is the exponential of nll"
        )


def seq2seq(settings: Seq2SeqConfig = Seq2SeqConfig()) -> Objective:
    """Returns the loss of each next token of a target (Vaswani et al. 2017, section 5.4).

    The trained term has label smoothing; the loss without smoothing, `nll`, and the accuracy are
    only reported.

    Args:
        settings: the hyperparameters.
    """

    def counts(batch: Batch) -> Terms:
        # Padding of the target has segment 0 and is not counted.
        num_tokens = jnp.sum(packed_weights(batch["decoder_segment_ids"]))
        return {"target_token": num_tokens, "nll": num_tokens, "accuracy": num_tokens}

    def terms(outputs: Outputs, batch: Batch) -> Terms:
        weights = packed_weights(batch["decoder_segment_ids"])
        result = cross_entropy(
            outputs.projection, batch["labels"], weights, settings.label_smoothing
        )
        return {"target_token": result.loss, "nll": result.nll, "accuracy": result.correct}

    return Objective(
        coefficients={"target_token": 1.0},
        inputs=select_inputs(
            "input_ids",
            "segment_ids",
            "position_ids",
            "decoder_input_ids",
            "decoder_segment_ids",
            "decoder_position_ids",
        ),
        counts=counts,
        terms=terms,
    )
