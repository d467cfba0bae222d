"""Evaluates retrieval by vectors, and by a cross-encoder that reranks the results of BM25."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ....data.common.progress import LogFn
from ....data.embedding.bm25 import bm25
from ....data.sources.retrieval.collection import RetrievalData, read_retrieval
from ....models.config import TransformerConfig
from ....models.text.embed import TextEmbedder
from ....models.text.folder import open_folder
from ....models.text.pair_scorer import PairScorer
from ....models.text.sparse_embed import SparseEmbedder, open_embedder
from ....models.text.text_model import Loaded
from ....models.text.yes_no_scorer import open_pair_scorer
from .nearest import nearest
from .ranking import DEPTH, ranking_scores

AT_ONCE = 16_384
"""The maximum number of documents whose vectors are in memory at once."""
FLOATS = 1024 * AT_ONCE
"""The maximum number of floats in these vectors. Blocks of wide vectors, such as sparse vectors,
therefore have fewer documents."""

RERANKED = 20
"""The number of documents at the top of BM25's ranking that a cross-encoder reranks."""


def evaluate_retrieval(
    folder: str | Path,
    source: str | RetrievalData,
    *,
    step: int | None = None,
    loaded: Loaded | None = None,
    yes_no: bool = False,
    log: LogFn = print,
) -> dict[str, float]:
    """Evaluates a model and, for comparison, BM25 on a retrieval collection.

    A model that embeds texts ranks all documents by cosine. If the model has a prompt `query`, this
    prompt precedes each query. If the model has a prompt `document`, `passage` or `corpus`, the
    first of these precedes each document. A sparse encoder ranks by dot product. A cross-encoder (a
    sequence classifier with one label) reranks the first 20 documents of BM25. With `yes_no`, a
    language model that answers yes or no, such as Qwen3-Reranker, reranks them instead.

    Args:
        folder: a run folder, a folder in the Hugging Face format or of sentence-transformers, or a
          name on the hub.
        source: a name such as `beir:scifact` (see `data.read_retrieval`), or the collection.
        step: the checkpoint. Defaults to the newest checkpoint.
        loaded: the model in the folder and its parameters. If None, this function loads them.
        yes_no: whether the model is a language model that ranks documents by its answers instead of
          by vectors.
        log: called with lines that describe the data.

    Returns:
        `ndcg@10`, `mrr@10`, `map@100`, and `accuracy@k`, `precision@k` and `recall@k` for k = 1, 3,
        5, 10, as InformationRetrievalEvaluator of sentence-transformers computes them; with graded
        relevance, also `graded_ndcg@10`, as trec_eval computes it. `bm25_ndcg@10` is nDCG@10 of
        BM25. For a sparse encoder, there are also `query_active_dims` and `corpus_active_dims`, the
        mean number of weights above 0 in the vector of a query and of a document.

    Raises:
        FileNotFoundError: the folder is not a run folder, or does not have the checkpoint.
        UserError: the model does not embed texts, it does not compare vectors by cosine, or the
          collection cannot be read.
    """
    collection = source if isinstance(source, RetrievalData) else read_retrieval(source)
    for line in (collection.summary, *collection.notes):
        log(f"data: {line}")
    scores = model_scores(folder, collection, step=step, loaded=loaded, yes_no=yes_no, log=log)
    # A comparison with BM25 shows whether the model is better than a keyword search.
    return scores | bm25_scores(collection)


def model_scores(
    folder: str | Path,
    collection: RetrievalData,
    *,
    step: int | None = None,
    loaded: Loaded | None = None,
    yes_no: bool = False,
    log: LogFn = print,
) -> dict[str, float]:
    """Returns the scores of `evaluate_retrieval` without the scores of BM25."""
    ids, queries, documents = _texts(collection)
    model, _ = open_folder(folder)
    active = dict[str, float]()
    if yes_no or is_cross_encoder(model):
        log(f"the model scores pairs: it ranks the first {RERANKED} documents of BM25 again")
        scorer = open_pair_scorer(folder, step=step, log=log, loaded=loaded)
        ranked = _reranked(scorer, queries, documents, log)
    else:
        embedder = open_embedder(folder, step=step, log=log, loaded=loaded)
        query_vectors = embedder(queries, log, prompt_name=embedder.settings.query_prompt)
        blocks = embedded(embedder, documents, log)
        if isinstance(embedder, SparseEmbedder):
            active["query_active_dims"] = np.count_nonzero(query_vectors) / len(query_vectors)
            blocks = _counted(blocks, len(documents), active)
        ranked = nearest(embedder.comparable(query_vectors), blocks, DEPTH)[1]
    return ranking_scores(ranked, _indices(collection, ids)) | active


def is_cross_encoder(model: TransformerConfig) -> bool:
    """Returns whether a model is a classifier with one label, so that it may score text pairs."""
    return model.head in PairScorer.heads and len(model.labels) == 1


def bm25_scores(collection: RetrievalData) -> dict[str, float]:
    """Returns the nDCG scores of BM25 on a collection, such as `bm25_ndcg@10`."""
    ids, queries, documents = _texts(collection)
    ranked = bm25(queries, documents, DEPTH)[1]
    scores = ranking_scores(ranked, _indices(collection, ids))
    return {f"bm25_{name}": x for name, x in scores.items() if "ndcg" in name}


def _texts(collection: RetrievalData) -> tuple[list[str], list[str], list[str]]:
    """Returns three lists: the documents' identifiers, the queries, and the documents."""
    # The evaluator of sentence-transformers orders documents with equal scores by identifier.
    ids = sorted(collection.documents)
    documents = [collection.documents[id] for id in ids]
    return ids, list(collection.queries.values()), documents


def _counted(
    blocks: Iterator[np.ndarray], num_documents: int, active: dict[str, float]
) -> Iterator[np.ndarray]:
    """Yields the blocks of document vectors; computes the mean number of active dimensions."""
    for block in blocks:
        mean = active.get("corpus_active_dims", 0.0)
        active["corpus_active_dims"] = mean + np.count_nonzero(block) / num_documents
        yield block


def _reranked(
    scorer: PairScorer, queries: Sequence[str], documents: Sequence[str], log: LogFn
) -> np.ndarray:
    """Reranks the first documents of BM25 for each query by the scores of a cross-encoder."""
    first = bm25(queries, documents, RERANKED)[1]  # [Q, K]; −1 where BM25 finds fewer documents
    # Score all pairs in one call. Entries without a document get the score -inf, so that they come
    # last.
    rows, columns = np.nonzero(first >= 0)
    indices = zip(rows.tolist(), first[rows, columns].tolist(), strict=True)
    pairs = [(queries[int(i)], documents[int(j)]) for i, j in indices]
    scores = np.full(first.shape, -np.inf)
    scores[rows, columns] = scorer.score(pairs, log)
    order = np.argsort(-scores, axis=1, kind="stable")
    return np.take_along_axis(first, order, axis=1)


def embedded(
    embedder: TextEmbedder, documents: Sequence[str], log: LogFn = print
) -> Iterator[np.ndarray]:
    """Yields blocks float32 `[N, D]` of document vectors, in order, to compare with queries."""
    prompt = embedder.settings.document_prompt
    size = min(AT_ONCE, max(1, FLOATS // embedder.width))
    for start in range(0, len(documents), size):
        part = documents[start : start + size]
        yield embedder.comparable(embedder(part, log, prompt_name=prompt))
        if len(documents) > size:
            log(f"embedded {start + len(part):,} of {len(documents):,} texts")


def _indices(collection: RetrievalData, ids: Sequence[str]) -> list[dict[int, float | int]]:
    """Returns, for each query, the gains of the relevant documents by document index.

    Relevant documents that the collection does not contain get indices after the last document.
    """
    index_of = {id: i for i, id in enumerate(ids)}
    return [
        {
            index_of.setdefault(id, len(index_of)): gain
            for id, gain in collection.relevant[query].items()
        }
        for query in collection.queries
    ]
