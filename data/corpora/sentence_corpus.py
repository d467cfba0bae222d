"""A tokenized split as lists of sentences on disk: flat arrays, opened without being read.

Sentence ``s`` is ``tokens[sentence_starts[s] : sentence_starts[s + 1]]``; the sentences of
document ``d`` are ``document_starts[d]`` up to ``document_starts[d + 1]``. Nothing is added
to the tokens of the text. Sentences without a token vanish, and so do documents without a
sentence.
"""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path

import numpy as np

from ..dataset import PickledByFields
from ..errors import DataError
from ..io.atomic_io import build_folder
from ..sources.documents import Documents
from ..tokenizers.base import Tokenizer
from .sentence_splitting import lines_as_sentences, split_sentences, splitter
from .token_corpus import (
    TokenWriter,
    chunks,
    corpus_key,
    count_tokens,
    read_metadata,
    write_metadata,
)

_FORMAT = 2


@dataclass(frozen=True)
class SentenceCorpus(PickledByFields):
    """The tokens of one split, sentence by sentence.

    Attributes:
      folder: The folder of the arrays.
      vocab_size: The size of the vocabulary; every token is smaller.
      fingerprint: A stable hash of documents, tokenizer and the way of splitting.
      num_unknown: The number of tokens for text unknown to the tokenizer.
    """

    folder: Path
    vocab_size: int
    fingerprint: str
    num_unknown: int

    @cached_property
    def tokens(self) -> np.ndarray:
        """All sentences one after the other, uint16 or uint32 [num_tokens], memory-mapped."""
        return np.load(self.folder / "tokens.npy", mmap_mode="r")

    @property
    def token_counts(self) -> np.ndarray:
        """The number of occurrences of each token, int64 [V]."""
        return count_tokens(self.tokens, self.vocab_size)

    @cached_property
    def sentence_starts(self) -> np.ndarray:
        """Where each sentence starts in ``tokens`` and the end, int64 [num_sentences + 1]."""
        return np.load(self.folder / "sentence_starts.npy", mmap_mode="r")

    @cached_property
    def document_starts(self) -> np.ndarray:
        """Each document's first sentence and the end, int64 [num_documents + 1]."""
        return np.load(self.folder / "document_starts.npy")

    @property
    def num_documents(self) -> int:
        """The number of documents with at least one sentence."""
        return len(self.document_starts) - 1

    @property
    def num_sentences(self) -> int:
        """The number of sentences with at least one token."""
        return len(self.sentence_starts) - 1

    @property
    def num_tokens(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    @property
    def num_single(self) -> int:
        """The number of documents of one sentence: no pair begins there."""
        return int(np.count_nonzero(np.diff(self.document_starts) == 1))

    @property
    def summary(self) -> str:
        """A line for the log: documents, sentences and tokens."""
        return (
            f"{self.num_documents:,} documents ({self.num_single:,} of one sentence), "
            f"{self.num_sentences:,} sentences, {self.num_tokens:,} tokens"
        )


def build_sentence_corpus(
    documents: Documents, tokenizer: Tokenizer, folder: str | PathLike[str], language: str = "en"
) -> SentenceCorpus:
    """Splits and tokenises documents, or opens the result of an earlier call.

    Args:
      documents: The texts of one split; read once, in chunks. Where their lines are
        sentences these are taken, elsewhere the text is split.
      tokenizer: Its fingerprint and that of the documents are part of the cache's key.
      folder: The cache; the corpus gets a folder of its own inside.
      language: The language of text that must be split, see ``split_sentences``.

    Returns:
      The corpus.

    Raises:
      DataError: There is no token at all, or the folder cannot be written.
    """
    split = any(not part.lines_are_sentences for part in documents.parts)
    way = splitter(language) if split else language
    key = corpus_key("sentences", _FORMAT, documents.fingerprint, tokenizer.fingerprint, way)

    def fill(temporary: Path) -> None:
        _write(sentence_lists(documents, language), tokenizer, temporary, key)

    return open_sentence_corpus(build_folder(Path(folder) / key, fill))


def open_sentence_corpus(folder: str | PathLike[str]) -> SentenceCorpus:
    """Opens a corpus that ``build_sentence_corpus`` wrote.

    Raises:
      DataError: There is no corpus.
    """
    return SentenceCorpus(Path(folder), **read_metadata(Path(folder)))


def sentence_lists(documents: Documents, language: str = "en") -> Iterator[list[str]]:
    """Yields each document's sentences; for joined sources each in its own way."""
    for part in documents.parts:
        for text in part:
            if part.lines_are_sentences:
                yield lines_as_sentences(text)
            else:
                yield split_sentences(text, language)


def _write(documents: Iterable[list[str]], tokenizer: Tokenizer, folder: Path, key: str) -> None:
    sentence_starts, document_starts = array("q"), array("q")
    seen = 0
    with TokenWriter(folder, tokenizer.vocab_size, tokenizer.special_ids.unk) as tokens:
        for chunk in chunks(documents, lambda sentences: sum(map(len, sentences))):
            for sentences in _encode(chunk, tokenizer):
                first = len(sentence_starts)
                sentence_starts.extend(tokens.append(ids) for ids in sentences if ids)
                if len(sentence_starts) > first:
                    document_starts.append(first)
            seen += len(chunk)
        sentence_starts.append(tokens.position)
    if not document_starts:
        raise DataError(f"none of {seen} documents has a token: give a source with text")
    document_starts.append(len(sentence_starts) - 1)
    np.save(folder / "sentence_starts.npy", np.asarray(sentence_starts, np.int64))
    np.save(folder / "document_starts.npy", np.asarray(document_starts, np.int64))
    write_metadata(
        folder,
        {
            "vocab_size": tokenizer.vocab_size,
            "fingerprint": key,
            "num_unknown": tokens.num_unknown,
        },
    )


def _encode(chunk: list[list[str]], tokenizer: Tokenizer) -> Iterator[list[list[int]]]:
    """Tokenizes documents together, and yields the sentences of each.

    A vocabulary that writes spaces gets the one before each sentence but the first.
    """
    space = "" if tokenizer.kind == "wordpiece" else " "
    texts = [
        space + text if number else text
        for sentences in chunk
        for number, text in enumerate(sentences)
    ]
    encoded = iter(tokenizer.encode_batch(texts))
    for sentences in chunk:
        yield [next(encoded) for _ in sentences]
