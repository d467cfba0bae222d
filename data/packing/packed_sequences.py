"""Converts packed sequences to the arrays of an example, and to the bytes of a record on disk.

Both are made from ``PackedTokens``, which contains the number of target tokens of each span, and
the tokens of each span together with the token that follows them in the document. A record is
therefore hardly larger than its tokens, and decoding restores the sequence exactly.
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
"""The arrays of an example; each is int32 [T]."""


def packed_specs(length: int) -> BatchSpec:
    """Describes the arrays that ``packed_arrays`` makes."""
    values = (Values.SOURCE_TOKEN, Values.TARGET_TOKEN, Values.SEGMENT, Values.TEXT_POSITION)
    return {name: ArraySpec((length,), value) for name, value in zip(ARRAYS, values, strict=True)}


# The data type of a record's header.
_SIZE = np.dtype("<u4")


class PackedTokens(NamedTuple):
    """The tokens of a sequence before their conversion to arrays.

    Attributes:
      tokens: The tokens of all spans, int [sum of sizes + number of spans].
      sizes: The number of target tokens of each span, int [spans]. A span has one more token than
        target tokens.
    """

    tokens: np.ndarray
    sizes: np.ndarray


def gather_tokens(corpus: TokenCorpus, spans: Sequence[Span]) -> PackedTokens:
    """Reads the tokens of a sequence.

    Args:
      corpus: The corpus that contains the tokens.
      spans: At least one range of target tokens. Each range is inside one document.
    """
    # Convert target indices to token indices.
    firsts, sizes = np.asarray(spans, np.int64).T
    # Every document before the span has one more token than target tokens.
    firsts = firsts + np.searchsorted(corpus.target_starts, firsts, "right") - 1
    ends = firsts + sizes + 1
    parts = [corpus.tokens[a:b] for a, b in zip(firsts.tolist(), ends.tolist(), strict=True)]
    return PackedTokens(np.concatenate(parts), sizes)


def packed_arrays(pieces: PackedTokens, length: int) -> dict[str, np.ndarray]:
    """Makes one example from the tokens of a sequence.

    Args:
      pieces: The tokens of the sequence.
      length: The length T of the sequence. It must be at least the sum of the sizes.

    Returns:
      Four int32 [T] arrays. ``labels`` contains, for each token of ``input_ids``, the token that
      follows it in the document; ``segment_ids`` numbers the spans from 1; ``position_ids`` starts
      at 0 in each span. Padding is at the end, and is 0 in all four arrays.
    """
    tokens, sizes = pieces
    # The index of the span that contains each target token, [sum of sizes].
    spans = np.repeat(np.arange(len(sizes)), sizes)
    targets = np.arange(len(spans))  # [sum of sizes]
    # Every span before the target token has one more token than target tokens.
    inputs = targets + spans
    arrays = {name: np.zeros(length, np.int32) for name in ARRAYS}
    # Inputs and labels are the same tokens shifted by one, so no label is from another document.
    arrays["input_ids"][: len(spans)] = tokens[inputs]
    arrays["labels"][: len(spans)] = tokens[inputs + 1]
    arrays["segment_ids"][: len(spans)] = spans + 1
    # The position of a target token is its index minus the start index of its span.
    arrays["position_ids"][: len(spans)] = targets - (np.cumsum(sizes) - sizes)[spans]
    return arrays


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the data type of stored tokens: little-endian, with 2 bytes if possible, else 4."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def encode(pieces: PackedTokens, vocab_size: int) -> bytes:
    """Encodes a sequence: the number of spans and their sizes (4 bytes each), then the tokens."""
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

    Without BOS, the model does not predict the first token of a document, although bits per byte
    counts the bytes of this token.

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
