"""Sets embeddings to published word vectors (word2vec, GloVe, fastText), read from text files."""

from collections.abc import Container, Mapping
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from ...data.common.errors import DataError
from ...data.common.fields import require
from ...data.common.files import file_lines
from ...data.tokenizers.base import Tokenizer
from ...models.nn.typing import Params

MARKS = "Ġ▁"
"""The characters that mark a space before a token, in byte-level BPE and in sentencepiece."""


def read_word_vectors(
    path: str | Path, words: Container[str] | None = None
) -> dict[str, np.ndarray]:
    """Reads word vectors from a text file; each line has a word and its vector.

    Args:
        path: the file, which may be compressed with gzip. The first line of a word2vec file has the
          number of words and the number of dimensions; a GloVe file has no such line.
        words: the words to keep. If None, all words are kept.

    Returns:
        The vector of each word, float32 `[D]`.

    Raises:
        DataError: the file cannot be read, or a line does not have D numbers.
    """
    vectors: dict[str, np.ndarray] = {}
    width = None
    for file, line_number, line in file_lines(Path(path).expanduser()):
        parts = line.rstrip().split(" ")
        if line_number == 1 and len(parts) == 2:
            width = int(parts[1]) if parts[1].isdecimal() else None
            continue
        width = width or len(parts) - 1
        # A word in a GloVe file may contain spaces, so take the numbers from the end of the line.
        word = " ".join(parts[:-width])
        if words is not None and word not in words:
            continue
        try:
            row = np.array(parts[-width:], np.float32)
        except ValueError:
            row = np.empty(0)
        require(
            word and row.shape == (width,) and np.isfinite(row).all(),
            f"{file} line {line_number} must be a word and {width} numbers, got {line[:40]!r}: "
            "correct the line",
            error=DataError,
        )
        vectors[word] = row
    require(vectors, f"{path} has no vector of the words: give another file", error=DataError)
    return vectors


class WithVectors(NamedTuple):
    """Parameters with token embeddings that were set to word vectors."""

    params: Params
    num_found: int
    """The number of tokens whose embeddings were set."""


def with_word_vectors(
    params: Params, tokenizer: Tokenizer, vectors: Mapping[str, np.ndarray]
) -> WithVectors:
    """Sets the embedding of every token that has a word vector; other embeddings stay unchanged.

    Save the result with `train.save_run` and train it with `--init-from`;
    `--optimizer.frozen token_embedding` keeps the vectors.

    Args:
        params: the parameters of a model whose embeddings have the same width as the vectors.
        tokenizer: the model's tokenizer. A character that marks a space before a token is not part
          of the word.
        vectors: the vector of each word, from `read_word_vectors`.

    Raises:
        UserError: the vectors and the embeddings have different widths.
    """
    table = params["token_embedding"]["embedding"]
    width = len(next(iter(vectors.values()), ()))
    require(
        width == table.shape[1],
        f"the word vectors must have {table.shape[1]} numbers, the width of the embeddings, got "
        f"{width}: set d_model to {width}",
    )
    of_token = {
        id: vectors[word]
        for id in range(min(tokenizer.vocab_size, len(table)))
        if (word := tokenizer.token(id).lstrip(MARKS)) in vectors
    }
    ids = np.fromiter(of_token, np.int32, len(of_token))
    rows = np.array([*of_token.values()], np.float32).reshape(-1, width)
    changed = jnp.asarray(table).at[ids].set(rows)
    embedding = {**params["token_embedding"], "embedding": changed}
    return WithVectors({**params, "token_embedding": embedding}, len(of_token))
