"""A packed sequence as the arrays of an example, and as the bytes of a record on disk.

Both representations come from ``PackedTokens``, which has the number of target tokens of each span,
and the tokens of each span with the next token of its document. A record is therefore about as long
as its tokens, and decoding is exact.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..common.errors import DataError
from ..common.fields import require
from ..corpora.token_corpus import TokenCorpus
from ..dataset import ArraySpec, BatchSpec, Values
from ..tokenizers.base import Tokenizer
from .packing import Span

ARRAYS = ("input_ids", "labels", "segment_ids", "position_ids")
"""The arrays of an example, int32 [T] each."""


def packed_specs(length: int) -> BatchSpec:
    """Describes the arrays that ``packed_arrays`` makes."""
    values = (Values.SOURCE_TOKEN, Values.TARGET_TOKEN, Values.SEGMENT, Values.TEXT_POSITION)
    return {name: ArraySpec((length,), value) for name, value in zip(ARRAYS, values, strict=True)}


# The type of the header of a record.
_SIZE = np.dtype("<u4")


class PackedTokens(NamedTuple):
    """The tokens of a sequence before they become arrays.

    Attributes:
      tokens: The tokens of all spans, int [sum of sizes + number of spans].
      sizes: The number of target tokens of each span, one less than its tokens, int [spans].
    """

    tokens: np.ndarray
    sizes: np.ndarray


def gather_tokens(corpus: TokenCorpus, spans: Sequence[Span]) -> PackedTokens:
    """Reads the tokens of a sequence.

    Args:
      corpus: The tokens.
      spans: Ranges of target tokens, at least one, each inside one document.
    """
    # Convert target indices to token indices.
    firsts, sizes = np.asarray(spans, np.int64).T
    # Each earlier document has one more token than target tokens.
    firsts = firsts + np.searchsorted(corpus.target_starts, firsts, "right") - 1
    ends = firsts + sizes + 1
    parts = [corpus.tokens[a:b] for a, b in zip(firsts.tolist(), ends.tolist(), strict=True)]
    return PackedTokens(np.concatenate(parts), sizes)


def packed_arrays(pieces: PackedTokens, length: int) -> dict[str, np.ndarray]:
    """Makes one example.

    Args:
      pieces: The tokens of the sequence.
      length: The sequence's length T, at least the sum of the sizes.

    Returns:
      Four int32 [T] arrays. ``labels`` are the tokens that follow ``input_ids`` in the
      document; ``segment_ids`` count the spans from 1; ``position_ids`` start at 0 in
      each span. Padding is at the end, and is 0 in all four arrays.
    """
    tokens, sizes = pieces
    # The index of the span of each target token, [sum of sizes].
    spans = np.repeat(np.arange(len(sizes)), sizes)
    targets = np.arange(len(spans))  # [sum of sizes]
    # Each earlier span has one more token than target tokens.
    inputs = targets + spans
    arrays = {name: np.zeros(length, np.int32) for name in ARRAYS}
    # Inputs and labels are the same tokens shifted by one, so no label crosses a document.
    arrays["input_ids"][: len(spans)] = tokens[inputs]
    arrays["labels"][: len(spans)] = tokens[inputs + 1]
    arrays["segment_ids"][: len(spans)] = spans + 1
    # The position of a target token is its index minus the start of its span.
    arrays["position_ids"][: len(spans)] = targets - (np.cumsum(sizes) - sizes)[spans]
    return arrays


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the storage type of tokens: little-endian, 2 bytes if they suffice, else 4."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def encode(pieces: PackedTokens, vocab_size: int) -> bytes:
    """Encodes a sequence as ``number of spans, sizes`` (4 bytes each) and ``tokens``."""
    tokens, sizes = pieces
    header = np.asarray([len(sizes), *sizes], _SIZE)
    return header.tobytes() + tokens.astype(token_dtype(vocab_size)).tobytes()


def decode(record: bytes, vocab_size: int) -> PackedTokens:
    """Decodes a record that ``encode`` returned."""
    num_spans = int(np.frombuffer(record, _SIZE, count=1)[0])
    sizes = np.frombuffer(record, _SIZE, count=num_spans, offset=_SIZE.itemsize).astype(np.int64)
    start = (1 + num_spans) * _SIZE.itemsize
    return PackedTokens(np.frombuffer(record, token_dtype(vocab_size), offset=start), sizes)


def require_bos_eos(tokenizer: Tokenizer) -> None:
    """Checks that the tokenizer has BOS and EOS.

    Without BOS, the first token of a document is not predicted, although bits per byte counts its
    bytes.

    Raises:
      DataError: The tokenizer lacks BOS or EOS.
    """
    require(
        tokenizer.special_ids.present.keys() >= {"bos", "eos"},
        f"this {tokenizer.kind} tokenizer lacks the tokens that begin and end a document, and "
        "causal language models need both: train one (data.tokenizer.kind byte-bpe), name one "
        "of a causal language model, or leave out init_from if it is a run of another kind",
        DataError,
    )
