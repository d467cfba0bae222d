"""Scores vectors during training, for example by retrieval on the validation data."""

from collections import defaultdict
from typing import Any

import numpy as np

from ....data.dataset import DataSplit
from ....data.embedding.embedding_examples import EmbeddingExamples
from ....models.text.embed import normalized
from ...losses.eval_step import Evaluation
from .nearest import nearest
from .pairs import cosines, similarity_scores
from .ranking import DEPTH, ranking_scores, retrieval_scores


def vector_scores(
    evaluation: Evaluation, split: DataSplit, *, by_dot: bool = False
) -> dict[str, Any]:
    """Scores the vectors that an evaluation collected; returns no scores without vectors.

    Pairs without scores are evaluated by retrieval: for each distinct anchor, all distinct
    documents of the split are ranked by cosine, and the anchor's positives are the relevant
    documents. For scored pairs, the cosines are compared with the scores. For texts with labels,
    `label_accuracy` is the fraction of texts whose nearest other text has the same label. If there
    are several data sets, the scores of each data set, such as `qa_ndcg@10`, are computed and then
    averaged.

    Args:
        evaluation: The evaluation, with the predictions `anchors` float `[N, D]` and `documents`
            float `[N, C, D]`.
        split: The data, with N examples.
        by_dot: Whether retrieval compares vectors by dot product instead of cosine.
    """
    examples, predictions = split.examples, evaluation.predictions
    if not isinstance(examples, EmbeddingExamples) or "documents" not in predictions:
        return {}
    anchors, documents = predictions["anchors"], predictions["documents"]
    if not examples.names:
        return _scores_of(examples, anchors, documents, by_dot=by_dot)
    each: dict[str, float] = {}
    # Data sets may have different metrics, so average each metric over the data sets with this
    # metric.
    values: defaultdict[str, list[float]] = defaultdict(list)
    for name, (rows, part) in zip(examples.names, examples.parts(), strict=True):
        scores = _scores_of(part, anchors[rows], documents[rows], by_dot=by_dot)
        for metric, value in scores.items():
            each[f"{name}_{metric}"] = value
            values[metric].append(value)
    return each | {metric: float(np.mean(of_sets)) for metric, of_sets in values.items()}


def _scores_of(
    examples: EmbeddingExamples, anchors: np.ndarray, documents: np.ndarray, *, by_dot: bool
) -> dict[str, Any]:
    """Returns the scores of the vectors of one data set."""
    if "labels" in examples.targets:
        return label_scores(anchors, examples.targets["labels"])
    if "scores" in examples.targets:
        scores = examples.targets["scores"]
        # If an example has a negative, its single score is a difference of similarities, not the
        # similarity of its pair.
        of_pairs = scores.ndim == 1 and (examples.rows[:, 2:] < 0).all()
        is_varied = of_pairs and len(np.unique(scores)) > 1
        if not is_varied:
            return {}
        pairs = anchors, documents[:, 0]
        # A model may compute equal vectors for all texts. This must not raise an error, which would
        # end the run.
        if len(np.unique(cosines(*pairs))) == 1:
            return {"spearman": 0.0, "pearson": 0.0}
        return similarity_scores(*pairs, scores)
    # Keep each distinct text once, and leave out missing documents (-1).
    queries, indices = examples.rows[:, 0], examples.rows[:, 1:]
    distinct, first_query = np.unique(queries, return_index=True)
    stored, first = np.unique(indices, return_index=True)
    stored, first = stored[stored >= 0], first[stored >= 0]
    corpus = documents.reshape(indices.size, -1)[first]
    # With several data sets, the text indices of a data set do not begin at 0, so convert them to
    # rows of `corpus`.
    relevant: list[dict[int, float]] = [{} for _ in distinct]
    positives = np.searchsorted(stored, indices[:, 0])
    rows = zip(np.searchsorted(distinct, queries).tolist(), positives.tolist(), strict=True)
    for query, document in rows:
        relevant[query][document] = 1.0
    queries = anchors[first_query]
    if not by_dot:
        return retrieval_scores(queries, corpus, relevant)
    return ranking_scores(nearest(queries, corpus, DEPTH)[1], relevant)


def label_scores(vectors: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Returns `label_accuracy`: the fraction of texts whose nearest text has the same label.

    Args:
        vectors: float `[N, D]`. If there are fewer than two vectors, no score is returned.
        labels: the label of each text, int `[N]`.
    """
    if len(vectors) < 2:
        return {}
    units = normalized(vectors)
    first, second = nearest(units, units, 2)[1].T
    # A different text with an equal vector may be listed before the text itself.
    other = np.where(first == np.arange(len(labels)), second, first)
    return {"label_accuracy": float(np.mean(labels[other] == labels))}
