"""Pure functions that pack target tokens, or sentence pairs, into sequences.

A sequence contains the tokens of one example. A **span** is a range of target tokens inside one
document, written ``(first target token, length)``. A sequence is a list of spans whose lengths sum
to at most ``T``.

*Concat-then-split* concatenates all documents and splits the result after every ``T`` target
tokens. This needs no padding, but may split a document at any token. *First-fit* keeps documents
whole where possible, and pads the sequences.

For translation, *best-fit* assigns sentence pairs to sequences, and never splits a pair. A sequence
has room for ``T`` source tokens and ``T`` target tokens.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Literal

import numpy as np

from ..common.errors import DataError
from ..common.fields import require

Span = tuple[int, int]
Packing = Literal["concat", "first-fit"]
"""How documents fill sequences. concat: documents are concatenated and split. first-fit: documents
are kept whole where possible, and sequences are padded."""

# The maximum number of open sequences. It limits the planning time to documents × open sequences.
_OPEN_SEQUENCES = 64


def spans_of_range(first: int, length: int, target_starts: np.ndarray) -> list[Span]:
    """Splits a range of target tokens at the ends of documents.

    Args:
      first: The first target token.
      length: The number of target tokens, at least 1.
      target_starts: The first target token of each document, int64 [num_documents], ascending.

    Returns:
      The spans in order; their lengths sum to ``length``.
    """
    # Split the range where a document starts strictly inside it.
    low = np.searchsorted(target_starts, first, "right")
    high = np.searchsorted(target_starts, first + length, "left")
    edges = [first, *target_starts[low:high].tolist(), first + length]
    return [(a, b - a) for a, b in pairwise(edges)]


def concat_then_split(
    sequence: int, length: int, target_starts: np.ndarray, *, total: int, offset: int
) -> list[Span]:
    """Returns one of the ``total // length`` full sequences of an epoch.

    The target tokens form a ring, and the first sequence starts at ``offset``. The last
    ``total % length`` tokens of the ring do not fill a sequence, so this epoch leaves them out. The
    offset differs between epochs, and therefore the omitted tokens also differ.

    Args:
      sequence: The index of the sequence, in ``[0, total // length)``.
      length: The number of target tokens in a sequence, T.
      target_starts: The first target token of each document, int64 [num_documents].
      total: The number of target tokens.
      offset: The index of the first target token of the first sequence, in ``[0, total)``.

    Returns:
      The spans of the sequence, which have ``length`` target tokens in total.
    """
    first = (offset + sequence * length) % total
    before_end = min(length, total - first)
    spans = spans_of_range(first, before_end, target_starts)
    # The sequence wraps around the end of the ring.
    if before_end < length:
        spans += spans_of_range(0, length - before_end, target_starts)
    return spans


def split_once(sequence: int, length: int, target_starts: np.ndarray, total: int) -> list[Span]:
    """Returns one of the ``ceil(total / length)`` sequences that split a corpus without overlap.

    Args:
      sequence: The index of the sequence, in ``[0, ceil(total / length))``.
      length: The number of target tokens in a sequence, T.
      target_starts: The first target token of each document, int64 [num_documents].
      total: The number of target tokens.

    Returns:
      The spans of the sequence; the last sequence may be shorter than ``length``.
    """
    first = sequence * length
    return spans_of_range(first, min(length, total - first), target_starts)


def first_fit(target_counts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Plans sequences that keep documents whole, except documents of more than T target tokens.

    A document of more than T target tokens is split into pieces of T; any other document is one
    piece. Each piece is added to the first open sequence that has room. If no sequence has room, a
    new sequence is opened; if too many sequences are open, the fullest is closed first. No token is
    lost, and the plan is a pure function of its arguments.

    Args:
      target_counts: The number of target tokens of each document, all positive, int64
        [num_documents].
      length: The number of target tokens in a sequence, T.

    Returns:
      ``spans`` int64 [num_spans, 2] of (first target token, length), grouped by sequence, and
      ``sequence_starts`` int64 [num_sequences + 1]: sequence ``i`` has the spans from
      ``sequence_starts[i]`` up to, but not including, ``sequence_starts[i + 1]``.
    """
    closed: list[list[Span]] = []
    sequences: list[list[Span]] = []
    room: list[int] = []
    for first, size in _pieces(target_counts, length):
        # Add the piece to the first open sequence with enough room.
        index = next((i for i, free in enumerate(room) if free >= size), None)
        if index is None:
            if len(sequences) == _OPEN_SEQUENCES:
                # Close the fullest sequence, because another piece is unlikely to fit into it.
                fullest = min(range(len(room)), key=room.__getitem__)
                closed.append(sequences.pop(fullest))
                room.pop(fullest)
            index = len(sequences)
            sequences.append([])
            room.append(length)
        sequences[index].append((first, size))
        room[index] -= size
        # Close a full sequence, so that another sequence can be opened.
        if room[index] == 0:
            closed.append(sequences.pop(index))
            room.pop(index)
    # The sequences that are still open at the end are only partly filled.
    closed += sequences
    spans = np.asarray([span for sequence in closed for span in sequence], np.int64).reshape(-1, 2)
    sequence_starts = np.cumsum([0, *map(len, closed)], dtype=np.int64)
    return spans, sequence_starts


def best_fit(
    source_sizes: np.ndarray,
    target_sizes: np.ndarray,
    lengths: tuple[int, int],
    seed: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Plans sequences of whole sentence pairs, with separate limits for sources and targets.

    The pairs are shuffled with the seed. Each pair is added to the fullest open sequence that has
    room for both its source and its target. If no sequence has room, a new sequence is opened; if
    too many sequences are open, the sequence with the least room for sources or for targets is
    closed first. A pair whose source or target is too long for any sequence is left out. The plan
    is a pure function of its arguments.

    Args:
      source_sizes: The number of tokens in each source, int64 [num_pairs].
      target_sizes: The number of tokens in each target, int64 [num_pairs].
      lengths: The maximum numbers of source tokens and of target tokens in a sequence.
      seed: The seed that determines the order of the pairs, any integer.

    Returns:
      ``pairs`` int64 [num_fitting], grouped by sequence, and ``sequence_starts`` int64
      [num_sequences + 1]: sequence ``i`` has the pairs from ``sequence_starts[i]`` up to, but not
      including, ``sequence_starts[i + 1]``.
    """
    # Shuffle the pairs that fit, so that the pairs of a sequence are unrelated.
    order = np.flatnonzero((source_sizes <= lengths[0]) & (target_sizes <= lengths[1]))
    np.random.default_rng(seed % 2**64).shuffle(order)
    sequences: list[list[int]] = [[] for _ in range(_OPEN_SEQUENCES)]
    closed: list[list[int]] = []
    # The room for source tokens (row 0) and for target tokens (row 1) in each open sequence, int64
    # [2, open]. `of_sources` and `of_targets` are views of the two rows.
    room = np.repeat(np.asarray(lengths)[:, None], _OPEN_SEQUENCES, axis=1)
    of_sources, of_targets = room
    unused = sum(lengths)
    # The total room for source and target tokens. An entry that has not been used represents an
    # empty sequence.
    in_all = np.full(_OPEN_SEQUENCES, unused)
    sizes = zip(source_sizes[order].tolist(), target_sizes[order].tolist(), strict=True)
    for pair, (source, target) in zip(order.tolist(), sizes, strict=True):
        # Choose the fullest sequence with room for source and target, and an empty sequence only if
        # no other has room.
        fits = (of_sources >= source) & (of_targets >= target)
        index = int(np.where(fits, in_all, unused + 1).argmin())
        if not fits[index]:
            # Close the sequence with the smallest room for sources or for targets, and reuse its
            # entry.
            index = int(np.minimum(of_sources, of_targets).argmin())
            closed.append(sequences[index])
            sequences[index], room[:, index], in_all[index] = [], lengths, unused
        sequences[index].append(pair)
        room[:, index] -= source, target
        in_all[index] -= source + target
    closed += filter(None, sequences)
    pairs = np.asarray([pair for sequence in closed for pair in sequence], np.int64)
    return pairs, np.cumsum([0, *map(len, closed)], dtype=np.int64)


def check_fills_a_sequence(total: int, length: int) -> None:
    """Checks that a corpus fills at least one sequence.

    Args:
      total: The number of target tokens in the corpus.
      length: The number of target tokens in a sequence, T.

    Raises:
      DataError: The corpus has too few tokens.
    """
    require(
        total >= length,
        f"the corpus has {total} target tokens, fewer than one sequence of {length}: "
        f"give more text, or sequences of at most {total}",
        DataError,
    )


def _pieces(target_counts: np.ndarray, length: int) -> Iterator[Span]:
    first = 0
    for count in target_counts.tolist():
        # A document that is longer than a sequence is split into several pieces.
        for start in range(0, count, length):
            yield first + start, min(length, count - start)
        # A piece never extends past the end of its document.
        first += count
