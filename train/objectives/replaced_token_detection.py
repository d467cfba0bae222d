"""Replaced-token detection: a generator replaces masked tokens, and the model detects them.

Clark et al. 2020, "ELECTRA: pre-training text encoders as discriminators rather than generators",
section 2. The generator learns to predict masked tokens. The generator's samples replace the masked
tokens, and the model of the run, the discriminator, learns which tokens are replaced. A
sample that equals the original token counts as original, not as replaced. No gradient flows through
the samples.

The two models may also share embeddings as in He et al. 2021, "DeBERTaV3", section 3.2.

As in the paper, the loss is the loss of masked tokens plus 50 times the binary cross-entropy,
averaged over all real tokens. Unlike in the authors' code, the generator reads tokens that are
masked as in BERT (80 % [MASK], 10 % random tokens, 10 % unchanged).
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from ...data.common.fields import Positive, Range, field_names, require
from ...data.dataset import DataSplit
from ...data.tasks.bert_pretraining import PretrainingData
from ...models.config import Execution, TransformerConfig
from ...models.heads.outputs import Projection
from ...models.init import init_params
from ...models.nn.typing import Array, Float, Int, Params
from ...models.registry import create
from ..losses.eval_step import Evaluation
from ..losses.objective import (
    AuxiliaryModel,
    Batch,
    Objective,
    Outputs,
    RunModel,
    Terms,
    select_inputs,
)
from ..objective_config import ObjectiveConfig, Scores, entropy_baseline, perplexity
from .masked_lm import MASKED, masked_counts, masked_terms

INPUTS = select_inputs("input_ids", "attention_mask", "token_type_ids", "segment_ids")
GENERATOR = "generator"
EMBEDDINGS = ("token_embedding", "position_embedding", "token_type_embedding")
"""The names of the embedding tables that both models may share."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplacedTokenConfig(ObjectiveConfig[PretrainingData]):
    """Replaced-token detection (ELECTRA)."""

    kind = "replaced_token_detection"
    data_kinds = (PretrainingData,)
    head_names = ("replaced_token_detection",)
    progress_metrics = ("masked_token", "replaced_token", "detection_accuracy")
    next_command = "train bert-classify --init-from {run} --data.source tsv:train.tsv"

    generator_size: Annotated[float, Range(above=0, most=1)] = 0.25
    """The generator's number of heads, width and feed-forward width, relative to the discriminator.
    Both models have the same number of layers. (Clark et al., section 3.2, recommend 1/4 to
    1/2.)"""
    detection_weight: Positive = 50.0
    """The weight of the detection loss, λ."""
    embeddings: Literal["shared", "disentangled", "separate"] = "shared"
    """How the models share the embeddings of tokens, positions and token types. shared: both models
    train the same tables. disentangled: the discriminator adds a learned difference, which is
    initially 0, to the generator's tables, and does not train these tables (DeBERTaV3). separate:
    each model has its own tables."""

    def build(self, data: PretrainingData) -> Objective:
        """Returns the objective without its generator, which `with_models` adds."""
        del data
        return Objective(
            coefficients={"masked_token": 1.0, "replaced_token": self.detection_weight},
            inputs=INPUTS,
            counts=_counts,
            terms=_terms,
        )

    def with_models(
        self, objective: Objective, model: TransformerConfig, execution: Execution
    ) -> Objective:
        """Returns the objective with its generator."""
        generator = create(generator_config(model, self.generator_size), execution)
        shapes = jax.eval_shape(lambda: init_params(generator, jax.random.key(0)))
        # A model family may lack some of the tables, such as token types.
        tables = tuple(filter(shapes.__contains__, EMBEDDINGS))
        shared = tables if self.embeddings == "shared" else ()
        followed = tables if self.embeddings == "disentangled" else ()

        def init(rng: Array) -> Params:
            params = init_params(generator, rng)
            return {name: x for name, x in params.items() if name not in shared}

        auxiliary = AuxiliaryModel(
            generator.apply, init, trained=True, shared=shared, followed=followed
        )
        return dataclasses.replace(
            objective,
            models={GENERATOR: auxiliary},
            forward=_forward_with_types(model.num_token_types > 1),
            samples=True,
        )

    def check(self, data: PretrainingData) -> None:
        """Checks that the data has no pairs of segments."""
        require(
            not data.next_sentence,
            "data.next_sentence is not used by the objective replaced_token_detection: give "
            "--data.no-next-sentence",
        )

    def metrics(self, evaluation: Evaluation, split: DataSplit, data: PretrainingData) -> Scores:
        """Returns the mean of each term, the generator's perplexity, and numbers of tokens."""
        del split, data
        means, counts = evaluation.means, evaluation.counts
        counted = {name: int(counts[name]) for name in ("masked_token", "replaced_token")}
        numbers = {"masked_tokens": counted["masked_token"], "tokens": counted["replaced_token"]}
        return {**means, "perplexity": perplexity(means["masked_token"]), **numbers}

    def loss_note(self, data: PretrainingData) -> str | None:
        """Returns a line that explains the terms of the loss."""
        del data
        return (
            f"loss is masked_token, the generator's loss of masked tokens, plus "
            f"{self.detection_weight:g} times replaced_token, the loss of detecting its samples"
        )

    def baseline(self, split: DataSplit) -> tuple[str, str, float]:
        """Returns the unigram entropy as the baseline of `masked_token`."""
        return entropy_baseline("masked_token", split)


def generator_config(model: TransformerConfig, size: float) -> TransformerConfig:
    """Returns the configuration of the generator that belongs to a discriminator.

    Args:
        model: the configuration of the discriminator.
        size: the number of heads and the widths of the generator, relative to the discriminator.

    Raises:
        UserError: the model family requires embeddings that are as wide as its layers.
    """
    # Each head has the same size as in the discriminator, so the number of heads determines the
    # width.
    heads = max(1, round(model.num_heads * size))
    width, embedded = heads * model.head_dim, model.position_dim
    narrow = "d_embedding" in field_names(model)
    require(
        narrow or width == embedded,
        f"objective.generator_size {size} needs embeddings of width {embedded} for layers of "
        f"width {width}, but {type(model).__name__} has no d_embedding: choose 1, or an ELECTRA or "
        "a DeBERTa",
    )
    changes: dict[str, Any] = {
        "num_heads": heads,
        "d_model": width,
        "d_ff": max(1, round(model.feed_forward_dim * size)),
    }
    # Both models have embeddings of the same width, so that they can share them.
    if narrow:
        changes["d_embedding"] = None if width == embedded else embedded
    return dataclasses.replace(model, **changes).with_head("masked_lm", ())


@struct.dataclass
class DetectionOutputs:
    """The outputs of the generator and the discriminator."""

    projection: Projection
    """The generator's hidden states `[B, M, W]` at the masked tokens, and its vocabulary matrix."""
    logits: Float[Array, "B T"]
    """The discriminator's logits, which are above 0 for tokens that are probably replaced."""
    replaced: Float[Array, "B T"]
    """Whether each token differs from the original text: 1 or 0."""


def _forward_with_types(types: bool) -> Callable[..., DetectionOutputs]:
    """Returns the `forward` of the objective, with or without token types."""

    def forward(run: Mapping[str, RunModel], batch: Batch, keys: Array) -> DetectionOutputs:
        # The generator reads the masked text and predicts the masked tokens.
        arrays = {name: x for name, x in batch.items() if types or name != "token_type_ids"}
        projection = run[GENERATOR](**MASKED.inputs(arrays)).projection  # pyright: ignore[reportCallIssue]
        samples = sampled_tokens(jax.lax.stop_gradient(projection), keys)
        # Restore the masked tokens, then replace them with the samples.
        original = _at_masked(batch, batch["masked_labels"])
        ids = _at_masked({**batch, "input_ids": original}, samples)
        inputs = {**INPUTS(arrays), "input_ids": ids}
        logits = run["model"](**inputs).logits
        return DetectionOutputs(projection, logits, (ids != original).astype(jnp.float32))

    return forward


def sampled_tokens(projection: Projection, keys: Array) -> Int[Array, "B M"]:
    """Samples a token for each masked token, at temperature 1.

    Each iteration samples one masked token per row, which avoids an array `[B, M, V]`.

    Args:
        projection: hidden states `[B, M, W]` and the vocabulary matrix.
        keys: one key per row, `[B]`.
    """

    def one(index: Array, hidden: Float[Array, "B W"]) -> Int[Array, " B"]:
        logits = dataclasses.replace(projection, hidden=hidden[:, None]).logits()[:, 0]  # [B, V]
        drawn = jax.vmap(lambda key: jax.random.fold_in(key, index))(keys)
        return jax.vmap(jax.random.categorical)(drawn, logits).astype(jnp.int32)

    hidden = jnp.moveaxis(projection.hidden, 1, 0)  # [M, B, W]
    samples = jax.lax.map(lambda each: one(*each), (jnp.arange(hidden.shape[0]), hidden))
    # [M, B] to [B, M].
    return jnp.moveaxis(samples, 0, 1)


def _at_masked(batch: Batch, tokens: Int[Array, "B M"]) -> Int[Array, "B T"]:
    """Returns the tokens of a batch with replacements at the masked positions."""
    ids = batch["input_ids"]
    # Unused slots for masked tokens have weight 0. Set their index to T, which is out of range, so
    # that the update drops them.
    targets = jnp.where(batch["masked_weights"] > 0, batch["masked_positions"], ids.shape[1])
    rows = jnp.arange(ids.shape[0])[:, None]
    return jnp.asarray(ids).at[rows, targets].set(tokens, mode="drop")


def _counts(batch: Batch) -> Terms:
    real = jnp.sum(batch["attention_mask"]).astype(jnp.float32)
    detection = dict.fromkeys(("replaced_token", "detection_accuracy", "replaced"), real)
    return {**masked_counts(batch), **detection}


def _terms(outputs: Outputs, batch: Batch) -> Terms:
    real = batch["attention_mask"].astype(jnp.float32)
    # The binary cross-entropy, log(1 + exp(z)) - y z.
    loss = jax.nn.softplus(outputs.logits) - outputs.replaced * outputs.logits
    correct = (outputs.logits > 0) == (outputs.replaced > 0)
    return {
        **masked_terms(outputs, batch),
        "replaced_token": jnp.sum(real * loss),
        "detection_accuracy": jnp.sum(real * correct),
        "replaced": jnp.sum(real * outputs.replaced),
    }
