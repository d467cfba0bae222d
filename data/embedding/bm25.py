"""Lexical search by BM25, with the package bm25s.

BM25 is a baseline for retrieval models, and finds hard negatives for training rerankers.

Robertson and Zaragoza 2009, "The Probabilistic Relevance Framework: BM25 and Beyond"; Lù 2024,
"BM25S: Orders of magnitude faster lexical search via eager sparse scoring".
"""

import logging
import re
from collections.abc import Sequence

import numpy as np

from ..common.fields import PositiveInt, check_value, require

K1, B = 1.5, 0.75
WORD = re.compile(r"\w+")


def bm25(
    queries: Sequence[str], documents: Sequence[str], top_k: int = 10
) -> tuple[np.ndarray, np.ndarray]:
    """Finds the documents with the highest BM25 scores for each query (k1 = 1.5, b = 0.75).

    Words are lowercased. Stop words are not removed, and words are not stemmed.

    Args:
      queries: The queries.
      documents: The documents.
      top_k: The maximum number of documents to find for each query.

    Returns:
      The scores, float32 `[Q, K]`, in descending order, and the document indices, int32 `[Q, K]`. K
      is `top_k` or, if that is smaller, the number of documents. Documents with equal scores are
      ordered by index. Documents that contain no word of the query are not results. If there are
      fewer than K results, the remaining scores are 0 and the remaining indices are −1.

    Raises:
      UserError: `top_k` is less than 1, or no document contains a word.
    """
    check_value("top_k", top_k, PositiveInt)
    import bm25s

    # When the package is imported, it sets the level of its logger to DEBUG.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    words, of_queries = (
        [WORD.findall(text.lower()) for text in texts] for texts in (documents, queries)
    )
    require(any(words), "documents must have at least one word: give the texts to search")
    index = bm25s.BM25(k1=K1, b=B)
    index.index(words, show_progress=False)
    kept = min(top_k, len(documents))
    scores = np.zeros((len(queries), kept), np.float32)
    indices = np.full((len(queries), kept), -1, np.int32)
    for row, query in enumerate(of_queries):
        of_all = index.get_scores(query) if query else np.zeros(len(documents), np.float32)
        # Sort only the documents whose score is at least the K-th best score.
        least = max(np.partition(of_all, -kept)[-kept], np.nextafter(np.float32(0), np.float32(1)))
        candidates = np.flatnonzero(of_all >= least)
        best = candidates[np.argsort(-of_all[candidates], kind="stable")][:kept]
        scores[row, : len(best)], indices[row, : len(best)] = of_all[best], best
    return scores, indices
