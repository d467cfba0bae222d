"""Rows for causal language modelling: from tokens to one example."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from ..corpora.token_corpus import TokenCorpus, build_corpus
from ..dataset import BatchSpec, DataSplit, Rows
from ..packing.packed_rows import check_ends, packed_specs, pieces_of, row_of
from ..packing.packing import (
    Packing,
    Span,
    check_fills_a_row,
    concat_then_split,
    first_fit,
    split_once,
)
from ..prepared.read_shards import SPLITS, is_prepared, prepared_split, prepared_tokenizer
from ..sources.documents import Documents, default_cache_dir, load_whole
from ..tokenizers.base import Tokenizer
from .base import DocumentsData


def row_from_spans(
    corpus: TokenCorpus, spans: Sequence[Span], length: int
) -> dict[str, np.ndarray]:
    """Makes one example.

    Args:
        corpus: The tokens.
        spans: Ranges of pairs, each inside one document.
        length: The row's length T, at least the sum of the spans' lengths.

    Returns:
        See ``row_of``.
    """
    return row_of(pieces_of(corpus, spans), length)


@dataclass(frozen=True)
class CausalRows:
    """The rows of training epochs; see ``pipeline.Rows``.

    ``concat`` cuts each epoch at other places, ``first-fit`` has the same rows in each.

    Attributes:
        corpus: The tokens.
        length: The row's length T.
        packing: ``concat`` or ``first-fit``.
        seed: Of the places where ``concat`` cuts.
    """

    corpus: TokenCorpus
    length: int
    packing: Packing = "concat"
    seed: int = 0

    def __post_init__(self) -> None:
        check_fills_a_row(self.corpus.total_pairs, self.length)

    @property
    def rows_per_epoch(self) -> int:
        """The number of rows of an epoch, at least 1."""
        if self.packing == "concat":
            return self.corpus.total_pairs // self.length
        return len(self._plan[1]) - 1

    def row(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Makes one example: a pure function of its arguments.

        Args:
            epoch: From 0.
            index: In ``[0, rows_per_epoch)``.

        Returns:
            See ``row_from_spans``.
        """
        if self.packing == "concat":
            total = self.corpus.total_pairs
            offset = _offset(self.seed, epoch, total)
            spans = concat_then_split(index, self.length, self.corpus.pair_starts, total, offset)
        else:
            planned, row_starts = self._plan
            spans = planned[row_starts[index] : row_starts[index + 1]].tolist()
        return row_from_spans(self.corpus, spans, self.length)

    @cached_property
    def _plan(self) -> tuple[np.ndarray, np.ndarray]:
        return first_fit(self.corpus.pair_counts, self.length)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True)
class CausalEvaluationRows:
    """Every pair of a corpus exactly once, in order; the last row is padded.

    Attributes:
        corpus: The tokens.
        length: The row's length T.
    """

    corpus: TokenCorpus
    length: int

    @property
    def rows_per_epoch(self) -> int:
        """The number of rows that hold all pairs."""
        return -(-self.corpus.total_pairs // self.length)

    def row(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Makes one example; the same in every epoch."""
        spans = split_once(index, self.length, self.corpus.pair_starts, self.corpus.total_pairs)
        return row_from_spans(self.corpus, spans, self.length)


def _offset(seed: int, epoch: int, total: int) -> int:
    """Where an epoch's first row starts: as good as random, equal everywhere."""
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % total


@dataclass(frozen=True, kw_only=True)
class CausalData(DocumentsData):
    """Documents, every next token of which is predicted."""

    kind: ClassVar[str] = "causal"

    packing: Packing = "concat"
    """concat: fill every sequence and split documents. first-fit: keep documents whole and pad."""

    def make_tokenizer(self) -> Tokenizer:
        """See ``DataConfig``; prepared rows have theirs."""
        if is_prepared(self.source) and self.tokenizer.path is None:
            return prepared_tokenizer(self.source)
        return super().make_tokenizer()

    def batch_spec(self, num_labels: int, num_choices: int) -> BatchSpec:
        """See ``DataConfig``; int32 [T] each, see ``row_of``."""
        return packed_specs(self.length)

    def train_split(self, tokenizer: Tokenizer, labels: tuple[str, ...], seed: int) -> DataSplit:
        """Packed rows; with `concat`, cut anew in every epoch, unless they were prepared."""
        if is_prepared(self.source):
            asked = {"length": self.length, "packing": self.packing, **self._held_out()}
            splits = SPLITS if self.validation else SPLITS[:1]
            return prepared_split(self.source, splits, tokenizer, asked)
        corpus = _corpus(self.texts(), tokenizer)
        rows = CausalRows(corpus, self.length, self.packing, seed)
        _ = rows.rows_per_epoch  # a text shorter than a row is refused here
        return _split(rows, corpus)

    def validation_split(self, tokenizer: Tokenizer, labels: tuple[str, ...]) -> DataSplit:
        """Every validation token once."""
        if self.validation is not None:
            return self.whole_source(self.validation, tokenizer, labels)
        if is_prepared(self.source):
            asked = {"length": self.length, **self._held_out()}
            return prepared_split(self.source, SPLITS[1:], tokenizer, asked)
        return self._every_token(self.validation_documents(), tokenizer)

    def whole_source(self, source: str, tokenizer: Tokenizer, labels: tuple[str, ...]) -> DataSplit:
        """Every token of a source once."""
        if is_prepared(source):
            return prepared_split(source, SPLITS, tokenizer, {"length": self.length})
        return self._every_token(load_whole(source), tokenizer)

    def _held_out(self) -> dict[str, float]:
        """What a prepared source must have held out; nothing if another one validates."""
        return {} if self.validation else {"validation_fraction": self.validation_fraction}

    def _every_token(self, documents: Documents, tokenizer: Tokenizer) -> DataSplit:
        corpus = _corpus(documents, tokenizer)
        return _split(CausalEvaluationRows(corpus, self.length), corpus)


def _corpus(documents: Documents, tokenizer: Tokenizer) -> TokenCorpus:
    check_ends(tokenizer)
    return build_corpus(documents, tokenizer, default_cache_dir() / "tokens")


def _split(rows: Rows, corpus: TokenCorpus) -> DataSplit:
    facts = (
        f"{corpus.num_documents:,} documents, {corpus.num_bytes:,} bytes, "
        f"{corpus.total_pairs:,} tokens to predict"
    )
    if corpus.num_unknown:
        unknown = f"{corpus.num_unknown:,} of {len(corpus.tokens):,} tokens"
        facts += f"; {unknown} are unknown to the tokenizer"
    return DataSplit(rows, corpus, corpus.fingerprint, facts)
