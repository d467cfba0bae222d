"""Stores tokenized sentence pairs on disk, as flat arrays that are memory-mapped.

A pair is stored as the source tokens with the special tokens of ``Tokenizer.source_frame``,
followed by the target tokens and an end token. Pairs with an empty source or target (only white
space) are left out. The corpus stores the number of these pairs and the index of the first.
"""

from array import array
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from os import PathLike
from pathlib import Path

import numpy as np

from ..common.atomic_io import build_folder
from ..common.errors import DataError
from ..common.fields import require
from ..sources.parallel_corpus import ParallelText
from ..sources.sentence_pairs import SentencePair
from ..tokenizers.base import Tokenizer
from .token_corpus import CorpusFolder, TokenWriter, chunks, corpus_key, save_arrays

_FORMAT = 1


@dataclass(frozen=True)
class PairCorpus(CorpusFolder):
    """The tokenized sentence pairs of one split.

    If the source and the target have different vocabularies, ``vocab_size`` is the larger size.

    Attributes:
      num_read: The number of pairs in the text, including pairs with an empty source or target.
      num_empty: The number of pairs with an empty source or target, which the arrays do not
        contain.
      first_empty: The index in the text of the first pair with an empty source or target, or None
        if there is no such pair.
    """

    num_read: int = field(kw_only=True)
    num_empty: int = field(kw_only=True)
    first_empty: int | None = field(kw_only=True)

    def __len__(self) -> int:
        return self.num_read - self.num_empty

    @cached_property
    def starts(self) -> np.ndarray:
        """The start of each source and target in ``tokens``, then the end, int64 [2 pairs + 1]."""
        return self.array("starts")

    @cached_property
    def numbers(self) -> np.ndarray:
        """The index of each pair in the text, int64 [num_pairs]."""
        return self.array("numbers")

    @cached_property
    def sizes(self) -> tuple[np.ndarray, np.ndarray]:
        """The lengths of sources and targets with special tokens, int64 [num_pairs] each."""
        sizes = np.diff(self.starts)
        return sizes[::2], sizes[1::2]

    def pair(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source tokens and the target tokens of a pair, with special tokens."""
        # The target starts where the source ends.
        first, middle, last = self.starts[2 * index : 2 * index + 3].tolist()
        return self.tokens[first:middle], self.tokens[middle:last]


def build_pair_corpus(
    text: ParallelText, tokenizer: Tokenizer, folder: str | PathLike[str]
) -> PairCorpus:
    """Tokenizes sentence pairs, or opens the result of an earlier call.

    Args:
      text: The pairs, which are read once, in chunks.
      tokenizer: The tokenizer. The cache key consists of the fingerprints of the tokenizer and the
        text.
      folder: The cache folder; the corpus becomes a subfolder.

    Returns:
      The corpus.

    Raises:
      DataError: The text has an error, no pair has both a source and a target, the tokenizer has no
        end token, or the folder cannot be written.
    """
    parts = ["pairs", _FORMAT, text.fingerprint, tokenizer.fingerprint]
    marks = tokenizer.source_frame.single.marks
    # If a source has a single special token, keep the cache key of earlier versions.
    if sum(map(len, marks)) != 1:
        parts.append(repr(marks))
    key = corpus_key(*parts)
    write = partial(_write, text, tokenizer, key)
    return PairCorpus.open(build_folder(Path(folder) / key, write))


def pair_at(text: ParallelText, index: int) -> SentencePair:
    """Reads the pair with a given index, for the location in a message."""
    return next(islice(text, index, None))


def _write(text: ParallelText, tokenizer: Tokenizer, key: str, folder: Path) -> None:
    sides = tokenizer, tokenizer.target
    # The tokens before and after a source, and before and after a target.
    frames = tokenizer.source_frame.single.marks, ((), (tokenizer.target.end,))
    unknown = [side.special_ids.unk for side in sides]
    # Sources and targets share one array, so its data type must fit the larger vocabulary.
    vocab_size = max(side.vocab_size for side in sides)
    starts, numbers = array("q"), array("q")
    num_read, num_unknown, first_empty = 0, 0, None
    with TokenWriter(folder, vocab_size) as tokens:
        for chunk in chunks(text, lambda pair: len(pair.source) + len(pair.target)):
            columns = [pair.source for pair in chunk], [pair.target for pair in chunk]
            # Some tokenizers return tokens for white space, but here a blank text must have no
            # tokens.
            encoded = [
                side.encode_batch([text if text.strip() else "" for text in column])
                for side, column in zip(sides, columns, strict=True)
            ]
            # Append sources and targets alternately, so that `starts` has two entries for each
            # pair.
            for i, pair in enumerate(zip(*encoded, strict=True)):
                if all(pair):
                    starts.extend(
                        tokens.append([*before, *ids, *after])
                        for ids, (before, after) in zip(pair, frames, strict=True)
                    )
                    num_unknown += sum(map(list.count, pair, unknown))
                    numbers.append(num_read + i)
                elif first_empty is None:
                    first_empty = num_read + i
            num_read += len(chunk)
    require(
        numbers,
        f"none of {num_read:,} pairs of {text.name!r} has a text on both sides: give "
        f"another source",
        DataError,
    )
    metadata = {
        "num_read": num_read,
        "num_empty": num_read - len(numbers),
        "first_empty": first_empty,
        "vocab_size": vocab_size,
        "fingerprint": key,
        "num_unknown": num_unknown,
    }
    save_arrays(folder, metadata, starts=[*starts, tokens.position], numbers=numbers)
