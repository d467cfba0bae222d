"""Causal language modeling: packed examples of documents and the tokens that follow.

The arrays of a batch are ``input_ids``, ``labels``, ``segment_ids`` and ``position_ids``, int32
[B, T]; see ``packed_sequences.packed_arrays``.
"""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from ..corpora.token_corpus import TokenCorpus, build_corpus
from ..dataset import BatchSpec, DataSplit, ExampleSource, PickledByFields, counted
from ..errors import DataError
from ..packing.packed_sequences import gather_tokens, packed_arrays, packed_specs, require_bos_eos
from ..packing.packing import (
    Packing,
    check_fills_a_sequence,
    concat_then_split,
    first_fit,
    split_once,
)
from ..prepared.read_shards import SPLITS, is_prepared, prepared_split, prepared_tokenizer
from ..sources.documents import Documents, SourceLike, as_source, default_cache_dir, load_whole
from ..tokenizers.base import Tokenizer
from .base import DocumentsData


@dataclass(frozen=True)
class CausalLMExamples(PickledByFields):
    """The examples of training epochs; see ``dataset.ExampleSource``.

    With ``concat`` every epoch is split at other offsets; with ``first-fit`` all epochs have the
    same examples.

    Attributes:
      corpus: The tokens.
      length: The example's length T.
      packing: ``concat`` or ``first-fit``.
      seed: The seed of the offsets for ``concat``.
    """

    corpus: TokenCorpus
    length: int
    packing: Packing = "concat"
    seed: int = 0

    def __post_init__(self) -> None:
        check_fills_a_sequence(self.corpus.num_targets, self.length)

    @property
    def num_examples(self) -> int:
        """The number of examples in an epoch, at least 1."""
        if self.packing == "concat":
            return self.corpus.num_targets // self.length
        return len(self._plan[1]) - 1

    def example(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Makes one example: a pure function of its arguments.

        Args:
          epoch: From 0.
          index: In ``[0, num_examples)``.

        Returns:
          See ``packed_arrays``.
        """
        if self.packing == "concat":
            total = self.corpus.num_targets
            offset = _offset(self.seed, epoch, total)
            spans = concat_then_split(
                index, self.length, self.corpus.target_starts, total=total, offset=offset
            )
        else:
            planned, sequence_starts = self._plan
            spans = planned[sequence_starts[index] : sequence_starts[index + 1]].tolist()
        return packed_arrays(gather_tokens(self.corpus, spans), self.length)

    @cached_property
    def _plan(self) -> tuple[np.ndarray, np.ndarray]:
        return first_fit(self.corpus.target_counts, self.length)


@dataclass(frozen=True)
class CausalLMEvaluationExamples:
    """Every target token of a corpus exactly once, in order; the last example is padded.

    Attributes:
      corpus: The tokens.
      length: The length of a sequence, T.
    """

    corpus: TokenCorpus
    length: int

    @property
    def num_examples(self) -> int:
        """The number of examples with all target tokens."""
        return -(-self.corpus.num_targets // self.length)

    def example(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Returns the same example in every epoch; see ``packed_arrays``."""
        spans = split_once(index, self.length, self.corpus.target_starts, self.corpus.num_targets)
        return packed_arrays(gather_tokens(self.corpus, spans), self.length)


def _offset(seed: int, epoch: int, total: int) -> int:
    """Returns the start of an epoch's first sequence: pseudorandom, equal on all processes."""
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % total


@dataclass(frozen=True, kw_only=True)
class CausalLMData(DocumentsData):
    """Documents, every next token of which is predicted."""

    kind: ClassVar[str] = "causal_lm"
    former_kind: ClassVar[str] = "causal"

    packing: Packing = "concat"
    """concat: fill every sequence and split documents. first-fit: keep documents whole and pad."""

    def make_tokenizer(self) -> Tokenizer:
        """See ``DataConfig``; a prepared source has its own tokenizer."""
        if is_prepared(self.source_name) and self.tokenizer.path is None:
            return prepared_tokenizer(self.source_name)
        return super().make_tokenizer()

    def batch_spec(self, num_labels: int, num_choices: int) -> BatchSpec:
        """See ``DataConfig``; int32 [T] each, see ``packed_arrays``."""
        return packed_specs(self.length)

    def train_split(self, tokenizer: Tokenizer, labels: tuple[str, ...], seed: int) -> DataSplit:
        """Returns packed examples, split anew in every epoch with `concat` unless prepared."""
        if is_prepared(self.source_name):
            if self.keep is not None:
                raise DataError(
                    f"data.keep {self.keep!r} selects documents, and {self.source_name!r} has none "
                    "left: give --keep to flaxzoo prepare"
                )
            requested = {"length": self.length, "packing": self.packing, **self._held_out()}
            splits = SPLITS if self.validation else SPLITS[:1]
            return prepared_split(self.source_name, splits, tokenizer, requested)
        documents = self.texts()
        corpus = _corpus(documents, tokenizer)
        examples = CausalLMExamples(corpus, self.length, self.packing, seed)
        _ = examples.num_examples  # plans the sequences of first-fit now, not in the first batch
        split = _split(examples, corpus)
        return replace(split, notes=(documents.note,) if documents.note else ())

    def validation_split(self, tokenizer: Tokenizer, labels: tuple[str, ...]) -> DataSplit:
        """Returns every validation token once."""
        if self.validation is not None:
            return self.whole_source(self.validation, tokenizer, labels)
        if is_prepared(self.source_name):
            requested = {"length": self.length, **self._held_out()}
            return prepared_split(self.source_name, SPLITS[1:], tokenizer, requested)
        return self._every_token(self.validation_documents(), tokenizer)

    def whole_source(
        self, source: SourceLike, tokenizer: Tokenizer, labels: tuple[str, ...]
    ) -> DataSplit:
        """Returns every token of a source once."""
        name = as_source(source)
        if is_prepared(name):
            return prepared_split(name, SPLITS, tokenizer, {"length": self.length})
        return self._every_token(load_whole(name), tokenizer)

    def _held_out(self) -> dict[str, float]:
        """Returns the held-out fraction a prepared source must have, unless another validates."""
        return {} if self.validation else {"validation_fraction": self.validation_fraction}

    def _every_token(self, documents: Documents, tokenizer: Tokenizer) -> DataSplit:
        corpus = _corpus(documents, tokenizer)
        split = _split(CausalLMEvaluationExamples(corpus, self.length), corpus)
        return replace(split, notes=(documents.note,) if documents.note else ())


def _corpus(documents: Documents, tokenizer: Tokenizer) -> TokenCorpus:
    require_bos_eos(tokenizer)
    return build_corpus(documents, tokenizer, default_cache_dir() / "tokens")


def _split(rows: ExampleSource, corpus: TokenCorpus) -> DataSplit:
    summary = (
        f"{counted(corpus.num_documents, 'document')}, {counted(corpus.num_bytes, 'byte')}, "
        f"{counted(corpus.num_targets, 'token')} to predict"
    )
    if corpus.num_unknown:
        unknown = f"{corpus.num_unknown:,} of {len(corpus.tokens):,} tokens"
        summary += f"; {unknown} are unknown to the tokenizer"
    return DataSplit(rows, corpus, corpus.fingerprint, summary)
