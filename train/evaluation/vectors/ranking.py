"""Scores rankings, with the same values as sentence-transformers.

nDCG was introduced by Järvelin and Kekäläinen 2002, "Cumulated gain-based evaluation of IR
techniques".
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ....data.common.fields import require
from ....models.text.embed import normalized
from .nearest import nearest

CUTOFFS = (1, 3, 5, 10)
"""The values of k of accuracy@k, precision@k and recall@k."""
DEPTH = 100
"""The scores of a ranking depend only on this number of documents at its top."""

Gains = Mapping[int, float | int]
"""Maps the index of each relevant document of a query to its gain. All other documents have the
gain 0."""


def retrieval_scores(
    queries: np.ndarray, documents: np.ndarray, relevant: Sequence[Gains]
) -> dict[str, float]:
    """Ranks the documents for each query by cosine, and scores the rankings.

    Args:
        queries: float `[Q, D]`.
        documents: float `[N, D]`. Documents with equal scores are ranked by index.
        relevant: the relevant documents of each query, at least one.

    Returns:
        The scores of `ranking_scores`.

    Raises:
        UserError: the numbers of queries differ, or a query has no relevant document.
    """
    _, ranked = nearest(normalized(queries), normalized(documents), DEPTH)
    return ranking_scores(ranked, relevant)


def ranking_scores(ranked: np.ndarray, relevant: Sequence[Gains]) -> dict[str, float]:
    """Scores rankings of documents, as sentence-transformers' InformationRetrievalEvaluator does.

    A document is relevant if its gain is above 0. In the ideal ranking, all relevant documents come
    first.

    Args:
        ranked: int `[Q, K]`, the indices of the first K documents for each query, best first. The
          scores are exact if K is at least 100 or equals the number of all documents.
        relevant: the relevant documents of each query, at least one.

    Returns:
        Means over the queries: `ndcg@10`, `mrr@10`, `map@100`, and for k = 1, 3, 5, 10
        `accuracy@k` (whether one of the first k documents is relevant), `precision@k` and
        `recall@k`. nDCG uses the gain 1 for each relevant document. If some gain is not 1, there is
        also `graded_ndcg@10`, which uses the gains of `relevant`, as trec_eval and BEIR do.

    Raises:
        UserError: the numbers of queries differ, or a query has no relevant document.
    """
    require(
        len(ranked) == len(relevant),
        f"relevant has {len(relevant):,} queries, but ranked has {len(ranked):,}: give a ranking "
        "for each query",
    )
    # Sort the gains of each query's relevant documents, to be padded with 0.
    sorted_gains = [sorted((x for x in one.values() if x > 0), reverse=True) for one in relevant]
    num_relevant = np.array(list(map(len, sorted_gains)))
    require(
        len(num_relevant) and num_relevant.min() > 0,
        "each query must have a relevant document: leave out queries without a relevant document",
    )
    ideal = _padded(sorted_gains)
    gains = _padded(
        [[one.get(i, 0.0) for i in row] for one, row in zip(relevant, ranked.tolist(), strict=True)]
    )
    gains = np.maximum(gains, 0)
    hits = gains > 0
    num_hits = hits.cumsum(1)  # [Q, K]: the number of relevant documents up to each rank
    ranks = np.arange(1, hits.shape[1] + 1)
    scores = {
        "ndcg@10": _ndcg(hits, ideal > 0),
        "mrr@10": (hits & (num_hits == 1) & (ranks <= 10)) @ (1 / ranks),
        "map@100": (hits * num_hits / ranks).sum(1) / np.minimum(num_relevant, DEPTH),
    }
    for k in CUTOFFS:
        scores |= {
            f"accuracy@{k}": num_hits[:, k - 1] > 0,
            f"precision@{k}": num_hits[:, k - 1] / k,
            f"recall@{k}": num_hits[:, k - 1] / num_relevant,
        }
    if (ideal[ideal > 0] != 1).any():
        scores["graded_ndcg@10"] = _ndcg(gains, ideal)
    return {name: float(np.mean(values)) for name, values in scores.items()}


def _padded(rows: Sequence[Sequence[float | int] | np.ndarray]) -> np.ndarray:
    """Returns the first 100 values of each row, padded with zeros to 100: float64 `[Q, 100]`."""
    padded = np.zeros((len(rows), DEPTH))
    for values, row in zip(padded, rows, strict=True):
        values[: len(row)] = row[:DEPTH]
    return padded


def _ndcg(gains: np.ndarray, ideal: np.ndarray) -> np.ndarray:
    """Returns nDCG@10, given the gains by rank, `[Q, K]`, and the gains of the ideal ranking."""
    discounts = 1 / np.log2(np.arange(2, 12))
    return (gains[:, :10] @ discounts) / (ideal[:, :10] @ discounts)


def reranking_scores(
    scores: Sequence[np.ndarray], relevant: Sequence[np.ndarray]
) -> dict[str, float]:
    """Ranks documents by their scores, and scores the rankings as RerankingEvaluator does.

    Queries that have only relevant or only irrelevant documents are left out.

    Args:
        scores: for each query, the scores of its documents, float `[N_i]`.
        relevant: whether each document is relevant, bool `[N_i]`.

    Returns:
        Means over the queries: `map` and `ndcg@10`, which are means over all orders of documents
        with equal scores, and `mrr@10`, which ranks documents with equal scores by index.

    Raises:
        UserError: no query has both a relevant and an irrelevant document, or lengths differ.
    """
    from sklearn.metrics import average_precision_score, ndcg_score

    pairs = [(np.asarray(r, bool), np.asarray(s)) for r, s in zip(relevant, scores, strict=True)]
    for i, (labels, values) in enumerate(pairs):
        problem = (
            f"query {i} has {len(values)} scores and {len(labels)} labels: give a score and a "
            "label for each document"
        )
        require(len(values) == len(labels), problem)
    counted = [(labels, values) for labels, values in pairs if labels.any() and not labels.all()]
    require(
        counted, "no query has a relevant and an irrelevant document: give at least one such query"
    )
    # [Q, 10]: whether the documents at the first ten ranks are relevant.
    first = _padded([labels[np.argsort(-x, kind="stable")] for labels, x in counted])[:, :10] > 0
    return {
        "map": float(np.mean([average_precision_score(*pair) for pair in counted])),
        "mrr@10": float(np.mean((first & (first.cumsum(1) == 1)) @ (1 / np.arange(1, 11)))),
        "ndcg@10": float(np.mean([ndcg_score([r], [s], k=10) for r, s in counted])),
    }
