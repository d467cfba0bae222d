"""Scores of vectors during training, such as of a search among the validation data's documents."""

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
    """Scores the vectors that an evaluation collected; without vectors, returns no scores.

    Pairs without scores are evaluated as a search: for each distinct anchor, all distinct documents
    of the split are ranked by cosine, and the anchor's positives are the relevant documents. For
    scored pairs the cosines are compared with the scores. For texts with labels, `label_accuracy`
    is the fraction of texts whose nearest other text has the same label. For several data sets, the
    scores are computed for each data set, such as `qa_ndcg@10`, and then averaged.

    Args:
        evaluation: Its predictions are `anchors` float `[N, D]` and `documents` float `[N, C, D]`.
        split: The data, with N examples.
        by_dot: Whether a search compares by dot product instead of cosine.
    """
    examples, found = split.examples, evaluation.predictions
    if not isinstance(examples, EmbeddingExamples) or "documents" not in found:
        return {}
    anchors, documents = found["anchors"], found["documents"]
    if not examples.names:
        return _scores_of(examples, anchors, documents, by_dot=by_dot)
    scores = {
        name: _scores_of(part, anchors[rows], documents[rows], by_dot=by_dot)
        for name, (rows, part) in zip(examples.names, examples.parts(), strict=True)
    }
    each = {f"{name}_{metric}": x for name, own in scores.items() for metric, x in own.items()}
    metrics = dict.fromkeys(metric for own in scores.values() for metric in own)
    # Data sets may have different metrics, so average each metric over the data sets that have it.
    means = {
        metric: float(np.mean([own[metric] for own in scores.values() if metric in own]))
        for metric in metrics
    }
    return {**each, **means}


def _scores_of(
    examples: EmbeddingExamples, anchors: np.ndarray, documents: np.ndarray, *, by_dot: bool
) -> dict[str, Any]:
    """Returns the scores of the vectors of one data set."""
    if examples.labels is not None:
        return label_scores(anchors, examples.labels)
    if examples.scores is not None:
        # If an example has a negative, its single score is a difference of similarities, not the
        # similarity of its pair.
        of_pairs = examples.scores.ndim == 1 and (examples.rows[:, 2:] < 0).all()
        is_varied = of_pairs and len(np.unique(examples.scores)) > 1
        if not is_varied:
            return {}
        pairs = anchors, documents[:, 0]
        # A model may compute equal vectors for all texts, which must not raise an error and end the
        # run.
        if len(np.unique(cosines(*pairs))) == 1:
            return {"spearman": 0.0, "pearson": 0.0}
        return similarity_scores(*pairs, examples.scores)
    # Keep each distinct text once, and leave out missing documents (-1).
    queries, numbers = examples.rows[:, 0], examples.rows[:, 1:]
    distinct, first_query = np.unique(queries, return_index=True)
    stored, first = np.unique(numbers, return_index=True)
    stored, first = stored[stored >= 0], first[stored >= 0]
    corpus = documents.reshape(numbers.size, -1)[first]
    # If there are several data sets, the numbers of a data set's texts do not begin at 0, so find
    # the index of each text.
    relevant: list[dict[int, float]] = [{} for _ in distinct]
    positives = np.searchsorted(stored, numbers[:, 0])
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
        vectors: float `[N, D]`, at least two.
        labels: the label of each text, int `[N]`.
    """
    if len(vectors) < 2:
        return {}
    units = normalized(vectors)
    first, second = nearest(units, units, 2)[1].T
    # The nearest vector need not be the text itself, but may be another text with an equal vector.
    other = np.where(first == np.arange(len(labels)), second, first)
    return {"label_accuracy": float(np.mean(labels[other] == labels))}
