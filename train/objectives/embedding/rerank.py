"""The objective of rerankers, which read a query with a document and score the document."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal, cast

import jax.numpy as jnp

from ....data.common.fields import Positive, require
from ....data.dataset import DataSplit
from ....data.embedding.rerank_data import RerankData
from ....models.nn.typing import Array, Bool, Float
from ...losses import ranking
from ...losses.cross_entropy import sigmoid_cross_entropy
from ...losses.eval_step import Evaluation
from ...losses.objective import Batch, Objective, Outputs, Terms
from ...losses.pairs import pair_inputs
from ...objective_config import ObjectiveConfig, Scores

Loss = Literal["binary", "contrast", "list_net", "lambda", "rank_net", "margin_mse"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RerankConfig(ObjectiveConfig[RerankData]):
    """The settings of a reranker's loss."""

    kind = "rerank"
    data_kinds = (RerankData,)
    head_names = ("sequence_classification",)
    progress_metrics = ("ndcg@10", "mrr@10")
    next_command = "predict {run} --input FILE"
    compares_with_start = True
    scores_pairs = True

    loss: Loss = "binary"
    """binary: the cross-entropy of each pair, independent of other pairs. contrast: distinguishes
    the positive from the other documents. list_net, lambda, rank_net: learn to order the documents
    by their scores. margin_mse: learns the differences between a teacher's scores. See
    `train.rerank`."""
    scale: Positive = 10.0
    """For contrast: a factor that multiplies the sigmoid of a score."""
    sigma: Positive = 1.0
    """For lambda and rank_net: a factor that multiplies the differences between scores."""
    weighting: ranking.Weighting = "ndcg_loss_2pp"
    """For lambda: the formula for the weight of each pair of documents."""

    def build(self, data: RerankData) -> Objective:
        """Returns `rerank`."""
        del data
        return rerank(self)

    def check(self, data: RerankData) -> None:
        """Checks that settings that `loss` does not use have their default values."""
        del data
        for name, losses in _SETTINGS_OF.items():
            default = type(self).__dataclass_fields__[name].default
            require(
                self.loss in losses or getattr(self, name) == default,
                f"objective.{name} {getattr(self, name)} requires the loss "
                f"{' or '.join(losses)}, got {self.loss}: leave it out",
            )

    def of_data(self, data: RerankData, *, is_default: bool) -> "RerankConfig":
        """See `ObjectiveConfig`; raises UserError for data that the loss cannot learn from."""
        del is_default
        # The loss `binary` treats each pair separately, so it only needs scores from 0 to 1.
        if self.loss == "binary":
            remedy = "scale them, or train flaxzoo train bert-classify on classes"
            data.require_scores(0.0, 1.0, "the loss binary", remedy=remedy)
            return self
        if self.loss == "margin_mse":
            data.require_one_negative("the loss margin_mse")
        # The other losses compare documents. If negatives are sampled, every query has several
        # documents.
        examples = data.train_examples()
        samples = examples[0].form == "none" and data.sampled_negatives != 0
        require(
            samples or any(len(example.documents) > 1 for example in examples),
            f"objective.loss {self.loss} compares the documents of a query, but each record of "
            f"{data.source_name!r} has one document: choose --objective.loss binary",
        )
        for example in examples if self.loss == "contrast" else ():
            require(
                all(example.scores[0] > x for x in example.scores[1:]),
                f"the first document of {example.location} does not have the largest score, "
                f"but the loss contrast treats the first document as the best: choose "
                f"--objective.loss "
                "list_net or lambda",
            )
        return self

    def to_minimize(self, scores: Scores) -> float:
        """Returns -nDCG@10, or the loss if no query has both relevant and irrelevant documents."""
        if "ndcg@10" not in scores:
            return super().to_minimize(scores)
        return -float(cast(float, scores["ndcg@10"]))

    def metrics(self, evaluation: Evaluation, split: DataSplit, data: RerankData) -> Scores:
        """Returns the number of queries, and nDCG@10 and MRR@10 if any query can be ranked."""
        del data
        names = [name for name in self.progress_metrics if evaluation.counts[name] > 0]
        measures = {name: evaluation.means[name] for name in names}
        return {**measures, "queries": split.examples.num_examples}


_SETTINGS_OF = {
    "scale": ("contrast",),
    "sigma": ("lambda", "rank_net"),
    "weighting": ("lambda",),
}


@dataclasses.dataclass(frozen=True)
class _Loss:
    """A loss that depends on scores, labels and a mask of the real documents, all `[B, C]`."""

    total: Callable[[RerankConfig, Array, Array, Array], Float[Array, ""]]
    """Computes the sum of the loss over all items. An item is a query with a document, a query, or
    a pair of documents."""
    num_items: Callable[[Array, Array], Float[Array, ""]]
    """Computes the number of items from the labels and the mask of the real documents."""


def _num_queries(labels: Array, real: Array) -> Array:
    del labels
    return jnp.sum(real[:, 0])


def _binary(settings: RerankConfig, scores: Array, labels: Array, real: Array) -> Array:
    del settings
    # Each pair is an item with a single label, [B, C] to [B · C, 1].
    flat, targets = scores.reshape(-1, 1), labels.reshape(-1, 1)
    return sigmoid_cross_entropy(flat, targets, real.reshape(-1).astype(jnp.float32))


def _of_pairs(settings: RerankConfig, weighting: ranking.Weighting) -> Callable[..., Array]:
    return lambda *arrays: jnp.sum(
        ranking.lambda_loss(*arrays, weighting=weighting, sigma=settings.sigma)
    )


def _sum_real(values: Array, real: Array) -> Array:
    return jnp.sum(jnp.where(real, values, 0.0))


LOSSES: Mapping[Loss, _Loss] = {
    "binary": _Loss(_binary, lambda labels, real: jnp.sum(real)),
    "contrast": _Loss(
        lambda settings, scores, labels, real: _sum_real(
            ranking.contrast(scores, real, scale=settings.scale), real[:, 0]
        ),
        _num_queries,
    ),
    "list_net": _Loss(
        lambda settings, *arrays: _sum_real(ranking.list_net(*arrays), arrays[2][:, 0]),
        _num_queries,
    ),
    "lambda": _Loss(
        lambda settings, *arrays: _of_pairs(settings, settings.weighting)(*arrays),
        lambda labels, real: jnp.sum(ranking.ordered_pairs(labels, real)),
    ),
    "rank_net": _Loss(
        lambda settings, *arrays: _of_pairs(settings, "none")(*arrays),
        lambda labels, real: jnp.sum(ranking.ordered_pairs(labels, real)),
    ),
    "margin_mse": _Loss(
        lambda settings, scores, labels, real: _sum_real(
            ranking.margin_error(scores, labels), real[:, 1:]
        ),
        lambda labels, real: jnp.sum(real[:, 1:]),
    ),
}


def rerank(settings: RerankConfig = RerankConfig()) -> Objective:
    """Returns the loss of a reranker, which scores the documents of each query.

    s_c is the score of document c of a query, and y_c is the label of this document. The losses are

    - `binary`: the mean over all pairs of the cross-entropy of σ(s_c) and y_c (Nogueira and Cho
      2019, "Passage re-ranking with BERT", equation 1);
    - `contrast`: the cross-entropy with the first document as the correct class, with logits scale
      · σ(s_c);
    - `list_net`, `lambda`, `rank_net`: see `list_net` and `lambda_loss` of `train.losses.ranking`;
      `list_net` is a mean over queries, the others are means over pairs of documents;
    - `margin_mse`: the mean of (s_0 - s_n - (y_0 - y_n))² over the negatives n (Hofstätter et al.
      2020, equation 5).

    See `RerankData` for the arrays of a batch. The model has a sequence-classification head with a
    single label. The metrics are `ndcg@10` and `mrr@10` of the documents sorted by score, averaged
    over the queries that have both a relevant document (label above 0) and an irrelevant document.

    Args:
        settings: the hyperparameters.
    """
    loss, measured = LOSSES[settings.loss], ("ndcg@10", "mrr@10")

    def counts(batch: Batch) -> Terms:
        labels, real = batch["scores"], real_documents(batch)
        ranked = jnp.sum(ranking.can_be_ranked(labels, real)).astype(jnp.float32)
        num_items = loss.num_items(labels, real).astype(jnp.float32)
        return {"ranking": num_items, **dict.fromkeys(measured, ranked)}

    def terms(outputs: Outputs, batch: Batch) -> Terms:
        labels, real = batch["scores"], real_documents(batch)
        # The single logit of each pair, [B · C, 1] to [B, C].
        scores = outputs.logits[:, 0].reshape(labels.shape)
        counted = ranking.can_be_ranked(labels, real)
        values = ranking.ranking_measures(scores, labels, real)
        measures = {name: _sum_real(x, counted) for name, x in values.items()}
        return {"ranking": loss.total(settings, scores, labels, real), **measures}

    return Objective(
        coefficients={"ranking": 1.0},
        inputs=pair_inputs,
        counts=counts,
        terms=terms,
    )


def real_documents(batch: Batch) -> Bool[Array, "B C"]:
    """Returns a mask of the real documents: it is false for missing documents and for filler."""
    return jnp.any(batch["attention_mask"] != 0, axis=-1)
