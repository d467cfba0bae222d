"""Stores the tokenized sentences of a split on disk, as flat arrays that are memory-mapped.

Sentence ``s`` is ``tokens[sentence_starts[s] : sentence_starts[s + 1]]``. Document ``d`` consists
of the sentences from ``document_starts[d]`` to ``document_starts[d + 1]``, excluding the latter. No
special tokens are added. Sentences without tokens and documents without sentences are left out.
"""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from os import PathLike
from pathlib import Path

import numpy as np

from ..common.atomic_io import build_folder
from ..common.errors import DataError, counted
from ..common.fields import require
from ..sources.documents import Documents
from ..tokenizers.base import Tokenizer
from .sentence_splitting import lines_as_sentences, split_sentences, splitter
from .token_corpus import CorpusFolder, TokenWriter, chunks, corpus_key, save_arrays

_FORMAT = 2


@dataclass(frozen=True)
class SentenceCorpus(CorpusFolder):
    """The tokens of one split, divided into sentences."""

    @cached_property
    def sentence_starts(self) -> np.ndarray:
        """The start of each sentence in ``tokens``, then the end, int64 [num_sentences + 1]."""
        return self.array("sentence_starts")

    @cached_property
    def document_starts(self) -> np.ndarray:
        """The first sentence of each document, then the end, int64 [num_documents + 1]."""
        return self.array("document_starts")

    @property
    def num_documents(self) -> int:
        """The number of documents with at least one sentence."""
        return len(self.document_starts) - 1

    @property
    def num_sentences(self) -> int:
        """The number of sentences with at least one token."""
        return len(self.sentence_starts) - 1

    @property
    def num_single(self) -> int:
        """The number of documents with only one sentence, which cannot start a segment pair."""
        return int(np.count_nonzero(np.diff(self.document_starts) == 1))

    @property
    def summary(self) -> str:
        """A line for the log with the numbers of documents, sentences and tokens."""
        return (
            f"{counted(self.num_documents, 'document')} ({self.num_single:,} of one sentence), "
            f"{counted(self.num_sentences, 'sentence')}, {counted(len(self.tokens), 'token')}"
        )


def build_sentence_corpus(
    documents: Documents, tokenizer: Tokenizer, folder: str | PathLike[str], language: str = "en"
) -> SentenceCorpus:
    """Splits documents into sentences and tokenizes them, or opens the result of an earlier call.

    Args:
      documents: The texts of one split, which are read once, in chunks. If the lines of a document
        are sentences, the document is split at line breaks; otherwise it is split by rules.
      tokenizer: The tokenizer. The cache key contains the fingerprints of the tokenizer and the
        documents.
      folder: The cache folder; the corpus becomes a subfolder.
      language: The language of texts that are split by rules; see ``split_sentences``.

    Returns:
      The corpus.

    Raises:
      DataError: No document has a token, or the folder cannot be written.
    """
    # The key contains the version of the rules only if some document is split by rules.
    by_rules = any(not part.lines_are_sentences for part in documents.parts)
    way = splitter(language) if by_rules else language
    key = corpus_key("sentences", _FORMAT, documents.fingerprint, tokenizer.fingerprint, way)
    write = partial(_write, sentence_lists(documents, language), tokenizer, key)
    return SentenceCorpus.open(build_folder(Path(folder) / key, write))


def sentence_lists(documents: Documents, language: str = "en") -> Iterator[list[str]]:
    """Yields the sentences of each document. Joined sources may be split in different ways."""
    for part in documents.parts:
        for text in part:
            if part.lines_are_sentences:
                yield lines_as_sentences(text)
            else:
                yield split_sentences(text, language)


def _write(documents: Iterable[list[str]], tokenizer: Tokenizer, key: str, folder: Path) -> None:
    sentence_starts, document_starts = array("q"), array("q")
    seen = 0
    with TokenWriter(folder, tokenizer.vocab_size, tokenizer.special_ids.unk) as tokens:
        for chunk in chunks(documents, lambda sentences: sum(map(len, sentences))):
            for sentences in _encode(chunk, tokenizer):
                # Store a document only if at least one of its sentences has a token.
                first = len(sentence_starts)
                sentence_starts.extend(tokens.append(ids) for ids in sentences if ids)
                if len(sentence_starts) > first:
                    document_starts.append(first)
            seen += len(chunk)
        sentence_starts.append(tokens.position)
    require(
        document_starts, f"none of {seen} documents has a token: give a source with text", DataError
    )
    # Both arrays end with the total, so that the last item also has an end.
    document_starts.append(len(sentence_starts) - 1)
    metadata = {
        "vocab_size": tokenizer.vocab_size,
        "fingerprint": key,
        "num_unknown": tokens.num_unknown,
    }
    save_arrays(folder, metadata, sentence_starts=sentence_starts, document_starts=document_starts)


def _encode(chunk: list[list[str]], tokenizer: Tokenizer) -> Iterator[list[list[int]]]:
    """Tokenizes all sentences in one call, and yields the tokenized sentences of each document.

    If the tokens of the vocabulary include spaces, each sentence of a document except the first
    begins with a space.
    """
    # Tokenizers with WordPiece or word vocabularies ignore spaces.
    space = "" if tokenizer.kind in ("wordpiece", "words") else " "
    texts = [space + text if i else text for sentences in chunk for i, text in enumerate(sentences)]
    # A single call for all sentences of the chunk uses all threads of the tokenizer.
    encoded = iter(tokenizer.encode_batch(texts))
    for sentences in chunk:
        yield [next(encoded) for _ in sentences]
