"""Evaluates the search for documents by the vectors of a model."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ....data.common.progress import LogFn
from ....data.sources.retrieval.collection import RetrievalData, read_retrieval
from ....models.text.embed import TextEmbedder
from .bm25 import INSTALL, bm25, has_bm25
from .nearest import nearest, normalized
from .ranking import DEPTH, ranking_scores

AT_ONCE = 16_384
"""The number of documents whose vectors are in memory at once."""


def evaluate_retrieval(
    folder: str | Path,
    source: str | RetrievalData,
    *,
    step: int | None = None,
    log: LogFn = print,
) -> dict[str, float]:
    """Evaluates a model that embeds texts on a collection, and BM25 for comparison.

    Documents are ranked by cosine. Queries have the model's prompt `query` before them, if it has
    one, and documents the first of its prompts `document`, `passage` and `corpus`.

    Args:
        folder: a run folder, a folder in the Hugging Face format or of sentence-transformers, or a
          name on the hub.
        source: a name such as `beir:scifact` (see `data.read_retrieval`), or the collection.
        step: the checkpoint. Defaults to the newest.
        log: called with lines that describe the data.

    Returns:
        `ndcg@10`, `mrr@10`, `map@100`, and `accuracy@k`, `precision@k` and `recall@k` for k = 1, 3,
        5, 10, as InformationRetrievalEvaluator of sentence-transformers computes them; with graded
        relevance also `graded_ndcg@10`, as trec_eval does. The same scores of BM25 begin with
        `bm25_`; only nDCG is included. Without the package bm25s (the extra `retrieval`) it is
        left out.

    Raises:
        FileNotFoundError: the folder is not a run folder, or does not have the checkpoint.
        UserError: the model does not embed texts, or the collection cannot be read.
    """
    collection = source if isinstance(source, RetrievalData) else read_retrieval(source)
    for line in (collection.summary, *collection.notes):
        log(f"data: {line}")
    # The evaluator of sentence-transformers orders documents with equal scores by identifier.
    ids = sorted(collection.documents)
    documents = [collection.documents[id] for id in ids]
    queries = list(collection.queries.values())
    relevant = _indices(collection, ids)
    embedder = TextEmbedder.of_run(folder, step=step, log=log)
    asked = embedder(queries, log, prompt_name=embedder.settings.query_prompt)
    vectors = embedded(embedder, documents, log)
    scores = ranking_scores(nearest(normalized(asked), vectors, DEPTH)[1], relevant)
    if has_bm25():
        lexical = ranking_scores(bm25(queries, documents, DEPTH)[1], relevant)
        scores |= {f"bm25_{name}": x for name, x in lexical.items() if "ndcg" in name}
    else:
        log(f"bm25_ndcg@10 is left out, because bm25s is not installed: {INSTALL}")
    return scores


def embedded(
    embedder: TextEmbedder, documents: Sequence[str], log: LogFn = print
) -> Iterator[np.ndarray]:
    """Yields the vectors of documents in order, normalized: float32 `[N, D]`, some at a time."""
    prompt = embedder.settings.document_prompt
    for start in range(0, len(documents), AT_ONCE):
        part = documents[start : start + AT_ONCE]
        yield normalized(embedder(part, log, prompt_name=prompt))
        if len(documents) > AT_ONCE:
            log(f"embedded {start + len(part):,} of {len(documents):,} texts")


def _indices(collection: RetrievalData, ids: Sequence[str]) -> list[dict[int, float | int]]:
    """Returns the relevant documents of each query by index; unknown ones follow the last."""
    places = {id: i for i, id in enumerate(ids)}
    return [
        {
            places.setdefault(id, len(places)): gain
            for id, gain in collection.relevant[query].items()
        }
        for query in collection.queries
    ]
