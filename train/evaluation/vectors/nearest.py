"""Exact nearest neighbors: all documents are compared with each query, in blocks on the device."""

from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from ....data.common.fields import PositiveInt, check_value, require
from ....models.nn.typing import Array, Float, Int

BLOCK = 16_384
"""The maximum number of documents whose vectors are on the device at once."""
FLOATS = 1024 * BLOCK
"""The maximum number of floats in these vectors. Blocks of wide vectors, such as sparse vectors,
therefore have fewer documents."""
QUERIES = 256
"""The number of queries that are compared with a block of documents at once."""


def nearest(
    queries: np.ndarray, documents: np.ndarray | Iterable[np.ndarray], top_k: int = 10
) -> tuple[np.ndarray, np.ndarray]:
    """Finds the documents with the largest dot products with each query.

    For vectors of length 1 (`normalized`) the dot product is the cosine. Only one block of
    documents is on the device at a time, so `documents` may be a memory-mapped file.

    Args:
        queries: float32 `[Q, D]`.
        documents: float32 `[N, D]`, or an iterable of such arrays, which are concatenated.
        top_k: the number of documents to find.

    Returns:
        The dot products float32 `[Q, K]` in descending order, and the indices of the documents
        int32 `[Q, K]`, where K = min(`top_k`, N). Documents with equal scores are ordered by index.

    Raises:
        UserError: `top_k` is below 1, an array is empty, or the widths differ.
    """
    check_value("top_k", top_k, PositiveInt)
    require(len(queries), "queries must have at least one row, got 0: give their vectors")
    starts = range(0, len(queries), QUERIES)
    # Pad queries and documents to fixed numbers of rows, so that a single program is compiled.
    parts = [_padded(queries[start : start + QUERIES], QUERIES) for start in starts]
    shape = QUERIES, top_k
    empty = jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.int32)
    best = [empty for _ in parts]
    num_documents, size = 0, min(BLOCK, max(1, FLOATS // queries.shape[1]))
    for block in _blocks(documents, size):
        require(
            block.shape[1] == queries.shape[1],
            f"documents must have the width {queries.shape[1]} of the queries, got "
            f"{block.shape[1]}: embed both with the same model",
        )
        rows = jnp.asarray(_padded(block, size))
        for i, part in enumerate(parts):
            best[i] = _merge(best[i], part, rows, num_documents, len(block))
        num_documents += len(block)
    problem = "documents must have at least one row, got 0: give the vectors to search"
    require(num_documents, problem)
    kept = min(top_k, num_documents)
    # Concatenate the results of all groups of queries, without padding and without columns beyond
    # the number of documents.
    scores, indices = [np.concatenate([np.asarray(pair[i]) for pair in best]) for i in (0, 1)]
    return scores[: len(queries), :kept], indices[: len(queries), :kept]


@jax.jit
def _merge(
    best: tuple[Float[Array, "Q K"], Int[Array, "Q K"]],
    queries: Float[Array, "Q D"],
    block: Float[Array, "N D"],
    start: Int[Array, ""] | int,
    num_documents: Int[Array, ""] | int,
) -> tuple[Float[Array, "Q K"], Int[Array, "Q K"]]:
    """Merges a block into the best documents so far; returns the scores and indices of the result.

    Args:
        best: the scores and the indices of the best documents for each query before this block.
        queries: the queries.
        block: the vectors of the documents in the block, followed by padding.
        start: the index of the first document of the block.
        num_documents: the number of documents in the block.
    """
    # The default precision of a GPU or a TPU could change the order of documents with close scores.
    scores = jnp.dot(queries, block.T, precision="highest")
    scores = jnp.where(jnp.arange(block.shape[0]) < num_documents, scores, -jnp.inf)
    scores_of_block, rows = jax.lax.top_k(scores, min(best[0].shape[1], block.shape[0]))
    # Among equal scores, `top_k` takes the first, so put the documents of earlier blocks first.
    scores = jnp.concatenate([best[0], scores_of_block], axis=1)
    indices = jnp.concatenate([best[1], rows + start], axis=1)
    scores, chosen = jax.lax.top_k(scores, best[0].shape[1])
    return scores, jnp.take_along_axis(indices, chosen, axis=1)


def _blocks(documents: np.ndarray | Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
    """Yields the vectors of the documents in order, in arrays of at most `size` rows."""
    for array in [documents] if isinstance(documents, np.ndarray) else documents:
        for start in range(0, len(array), size):
            yield array[start : start + size]


def _padded(rows: np.ndarray, num_rows: int) -> np.ndarray:
    """Converts rows to float32, and pads them with zeros to `num_rows` rows."""
    padded = np.zeros((num_rows, rows.shape[1]), np.float32)
    padded[: len(rows)] = rows
    return padded
