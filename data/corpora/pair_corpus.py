"""Tokenized sentence pairs on disk: flat arrays, opened without being read.

A pair is stored as its source's tokens and an end, then its target's tokens and an end. A
pair with an empty side (nothing but white space) teaches nothing and is left out; how many
there were, and which was the first, is kept.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from os import PathLike
from pathlib import Path

import numpy as np

from ..dataset import PickledByFields
from ..errors import DataError
from ..io.atomic_io import build_folder
from ..sources.parallel_corpus import ParallelText
from ..sources.sentence_pairs import SentencePair
from ..tokenizers.base import Tokenizer
from .token_corpus import TokenWriter, chunks, corpus_key, read_metadata, write_metadata

_FORMAT = 1


@dataclass(frozen=True)
class PairCorpus(PickledByFields):
    """The tokens of the pairs of one split.

    Attributes:
      folder: The folder of the arrays.
      num_read: Pairs of the text, those with an empty side included.
      num_empty: Of these the pairs with an empty side, which are not in the arrays.
      first_empty: The number of the first of them in the text, from 0; None without any.
      vocab_size: Of the larger of the tokenizer's vocabularies; every token is smaller.
      fingerprint: A stable hash of the text and the tokenizer.
      num_unknown: The number of tokens for text unknown to the tokenizer.
    """

    folder: Path
    num_read: int
    num_empty: int
    first_empty: int | None
    vocab_size: int
    fingerprint: str
    num_unknown: int

    def __len__(self) -> int:
        return self.num_read - self.num_empty

    @cached_property
    def tokens(self) -> np.ndarray:
        """All sides one after the other, uint16 or uint32 [num_tokens], memory-mapped."""
        return _mapped(self.folder / "tokens.npy")

    @cached_property
    def starts(self) -> np.ndarray:
        """Where each side starts in ``tokens``, and the end, int64 [2 * num_pairs + 1]."""
        return _mapped(self.folder / "starts.npy")

    @cached_property
    def numbers(self) -> np.ndarray:
        """The number of each pair in the text, from 0, int64 [num_pairs]."""
        return _mapped(self.folder / "numbers.npy")

    @cached_property
    def sizes(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of each source and of each target, ends included, int64 [num_pairs] each."""
        sizes = np.diff(self.starts)
        return sizes[::2], sizes[1::2]

    def pair(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of a pair's source and target, ends included."""
        first, middle, last = self.starts[2 * index : 2 * index + 3].tolist()
        return self.tokens[first:middle], self.tokens[middle:last]


def build_pair_corpus(
    text: ParallelText, tokenizer: Tokenizer, folder: str | PathLike[str]
) -> PairCorpus:
    """Tokenizes pairs, or opens the result of an earlier call.

    Args:
      text: The pairs; read once, in chunks.
      tokenizer: Its fingerprint and that of the text are the cache's key.
      folder: The cache; the corpus gets a folder of its own inside.

    Raises:
      DataError: The text has a fault, no pair has two sides, the tokenizer has no token
        that ends a text, or the folder cannot be written.
    """
    key = corpus_key("pairs", _FORMAT, text.fingerprint, tokenizer.fingerprint)

    def fill(temporary: Path) -> None:
        _write(text, tokenizer, temporary, key)

    place = build_folder(Path(folder) / key, fill)
    return PairCorpus(place, **read_metadata(place))


def end_of_text(tokenizer: Tokenizer) -> int:
    """The id of the token that ends a text.

    Raises:
      DataError: The vocabulary has none.
    """
    end = tokenizer.special_ids.eos
    if end is None:
        raise DataError(f"this {tokenizer.kind} tokenizer has no token that ends a text")
    return end


def pair_at(text: ParallelText, number: int) -> SentencePair:
    """Reads the pair of a number, from 0, to say where it stands."""
    return next(islice(text, number, None))


def _mapped(path: Path) -> np.ndarray:
    """Maps an array; as a plain one, since each slice of a ``memmap`` costs microseconds."""
    return np.asarray(np.load(path, mmap_mode="r"))


def _write(text: ParallelText, tokenizer: Tokenizer, folder: Path, key: str) -> None:
    sides = tokenizer, tokenizer.target
    ends = [end_of_text(side) for side in sides]
    unknown = [side.special_ids.unk for side in sides]
    vocab_size = max(side.vocab_size for side in sides)
    tokens = TokenWriter(folder, vocab_size)
    starts, numbers = array("q"), array("q")
    num_read, num_unknown, first_empty = 0, 0, None
    with tokens:
        for chunk in chunks(text, lambda pair: len(pair.source) + len(pair.target)):
            for number, pair in enumerate(_encoded(chunk, sides)):
                if all(pair):
                    starts.extend(
                        tokens.append([*ids, end]) for ids, end in zip(pair, ends, strict=True)
                    )
                    num_unknown += sum(map(list.count, pair, unknown))
                    numbers.append(num_read + number)
                elif first_empty is None:
                    first_empty = num_read + number
            num_read += len(chunk)
    if not numbers:
        raise DataError(
            f"none of {num_read:,} pairs of {text.name!r} has a text on both sides: name others"
        )
    np.save(folder / "starts.npy", np.asarray([*starts, tokens.position], np.int64))
    np.save(folder / "numbers.npy", np.asarray(numbers, np.int64))
    metadata = {
        "num_read": num_read,
        "num_empty": num_read - len(numbers),
        "first_empty": first_empty,
        "vocab_size": vocab_size,
        "fingerprint": key,
        "num_unknown": num_unknown,
    }
    write_metadata(folder, metadata)


def _encoded(
    pairs: list[SentencePair], sides: tuple[Tokenizer, Tokenizer]
) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the tokens of each pair's two sides, none for white space."""
    texts = [pair.source for pair in pairs], [pair.target for pair in pairs]
    encoded = [
        side.encode_batch([text if text.strip() else "" for text in column])
        for side, column in zip(sides, texts, strict=True)
    ]
    yield from zip(*encoded, strict=True)
