"""The objective of causal language models: predict each next token."""

import dataclasses
import math

import jax.numpy as jnp

from ...data.dataset import DataSplit
from ...data.tasks.causal_lm import CausalLMData
from ..losses.cross_entropy import cross_entropy
from ..losses.eval_step import Evaluation
from ..losses.objective import Objective, packed_weights, select_inputs
from ..objective_config import ObjectiveConfig, Scores, entropy_baseline, perplexity


@dataclasses.dataclass(frozen=True, kw_only=True)
class CausalLMConfig(ObjectiveConfig[CausalLMData]):
    """Next-token prediction. It has no hyperparameters."""

    kind = "causal_lm"
    data_kinds = (CausalLMData,)
    progress_metrics = ("perplexity", "bits_per_byte")
    next_command = "generate {run} --prompt TEXT"

    def build(self, data: CausalLMData) -> Objective:
        """Returns `CAUSAL`."""
        del data
        return CAUSAL

    def metrics(self, evaluation: Evaluation, split: DataSplit, data: CausalLMData) -> Scores:
        """Returns perplexity, bits per byte, and the number of tokens."""
        del data
        tokens = int(evaluation.counts["next_token"])
        return {
            "perplexity": perplexity(evaluation.loss),
            # Bits per byte do not depend on the tokenizer.
            "bits_per_byte": evaluation.loss * tokens / (math.log(2) * split.content.num_bytes),
            "tokens": tokens,
        }

    def baseline(self, split: DataSplit) -> tuple[str, str, float]:
        """Returns the unigram entropy as the baseline of the loss."""
        return entropy_baseline("loss", split)


CAUSAL = Objective(
    coefficients={"next_token": 1.0},
    inputs=select_inputs("input_ids", "segment_ids", "position_ids"),
    # Padding has segment 0.
    counts=lambda batch: {"next_token": jnp.sum(packed_weights(batch["segment_ids"]))},
    terms=lambda outputs, batch: {
        "next_token": cross_entropy(
            outputs.projection, batch["labels"], packed_weights(batch["segment_ids"])
        ).loss
    },
)
"""Predict each next token of a document (Radford et al. 2018, equation 1)."""
