"""Data for models that read a query and a document together, to rank the documents.

A batch contains ``input_ids``, ``attention_mask`` and ``token_type_ids``, int32 [B, C, T], for the
pairs of a query and each of its C documents, and ``scores``, float32 [B, C]. T is the sum of the
lengths of the longest query and the longest document, rounded up to a multiple of 8, but at most
`length`. If an example has fewer documents than other examples, the rows of the missing documents
are all zeros. If the records have no scores, the score of the positive is 1, and the scores of the
negatives and the sampled documents are 0.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np

from ..common.errors import DataError
from ..common.fields import NonNegativeInt, Seed, require
from ..dataset import ArraySpec, BatchSpec, PickledByFields, Values, too_long
from ..features.bert_inputs import BertInputs, Template, token_specs, truncate_longest_first
from ..orders.distinct import ABSENT
from ..sources.hash_split import Split
from ..sources.published.records import OpenedRecords
from ..tasks.labelled import LabelledLength
from ..tasks.labelled_examples import ExampleSet
from ..tokenizers.base import Tokenizer
from .bm25 import bm25
from .columns import EmbeddingExample
from .columns_data import ColumnsData
from .embedding_examples import arrays_of
from .text_table import NumberedTexts, TokenRows

# The default number of sampled negatives for records without scores.
_SAMPLED = 4
FIRST = 20
"""The number of documents that BM25 finds for each query, to draw negatives from them."""


@dataclass(frozen=True, kw_only=True)
class RerankData(ColumnsData):
    """Queries and documents with scores, or with positives and negatives."""

    kind: ClassVar[str] = "rerank"

    length: LabelledLength = 256
    """Maximum total number of tokens in a query and a document, T. If a pair is too long, the
    longer text is truncated.
    """
    sampled_negatives: NonNegativeInt | None = None
    """Number of documents of other queries drawn as negatives for each query in each epoch. Only
    for records without scores. Defaults to 4, or to 0 if the records have scores.
    """
    sampled_from: Literal["all", "bm25"] = "all"
    """The documents that sampled negatives are drawn from. all: all documents of other queries.
    bm25: the first 20 documents that BM25 finds for the query, which are harder to distinguish from
    the positive. If BM25 finds too few documents, other documents are also drawn.
    """
    sampling_seed: Seed = 0
    """The seed for drawing negatives."""

    def labels(self) -> tuple[str, ...]:
        """See ``DataConfig``. The only label is the score."""
        return ("score",)

    def assumed_labels(self) -> tuple[str, ...]:
        """See ``DataConfig``."""
        return self.labels()

    def read(self, records: OpenedRecords, split: Split) -> ExampleSet[EmbeddingExample]:
        """See ``RecordData``."""
        examples_read = super().read(records, split)
        require(
            all(example.documents for example in examples_read.examples),
            f"{records.source.name!r} has texts with labels, and a reranker learns from queries "
            "with documents: name the columns after a #, as #query,document",
            error=DataError,
        )
        return examples_read

    def batch_spec(self, num_labels: int, num_choices: int) -> BatchSpec:
        """See ``DataConfig`` and the module docstring."""
        del num_labels, num_choices
        num_documents = 1 + (self.num_negatives or 0)
        num_documents += _SAMPLED if self.sampled_negatives is None else self.sampled_negatives
        return {
            **token_specs(num_documents, self.length),
            "scores": ArraySpec((num_documents,), Values.LABEL, "float32"),
        }

    def encode(
        self,
        examples: Sequence[EmbeddingExample],
        tokenizer: Tokenizer,
        labels: tuple[str, ...],
        *,
        training: bool = False,
    ) -> "RerankExamples":
        """See ``RecordData``. Each text is tokenized only once."""
        del labels
        scored = sum(example.form != "none" for example in examples)
        require(
            scored in (0, len(examples)),
            f"{self.source_name!r} has scores in {scored:,} of {len(examples):,} records: give "
            "them in all or in none",
            error=DataError,
        )
        sampled = self.sampled_negatives
        sampled = (0 if scored else _SAMPLED) if sampled is None else sampled
        require(
            not (scored and sampled),
            f"sampled_negatives {sampled} is for records without scores, as the score of a sampled "
            "document is unknown: leave it out",
        )
        texts, template = NumberedTexts.of(examples), Template.of(tokenizer, self.length)
        queries, documents = (TokenRows.of(x, tokenizer) for x in (texts.queries, texts.documents))
        num_documents = texts.rows.shape[1] - 1
        # Count the truncated pairs, except pairs with sampled documents, which are not drawn yet.
        # Split [n, 1 + C] into [n, 1] and [n, C], which broadcast to the sizes of all pairs.
        anchors, others = np.split(texts.rows, [1], axis=1)
        sizes = queries.sizes[anchors] + np.where(others == ABSENT, 0, documents.sizes[others])
        is_long = (sizes > template.room(2)) & (others != ABSENT)
        limit, pairs = f"data.length {self.length}", int(np.sum(others != ABSENT))
        cut = too_long(int(is_long.sum()), pairs, "pair", limit, consequence="truncated")
        # BM25 finds documents that share words with each query, [queries, 20].
        found = None
        if sampled and self.sampled_from == "bm25":
            found = bm25([*texts.queries.numbers], [*texts.documents.numbers], FIRST)[1]
        # Sampling may combine any query with any document, so make room for the longest query and
        # the longest document.
        longest = int(queries.sizes.max() + documents.sizes.max())
        return RerankExamples(
            template=template.fitted(longest + template.length - template.room(2)),
            # Truncate two tokens to one, to determine whether the tokenizer keeps the start or the
            # end.
            keeps_end=tokenizer.truncated([0, 1], 1) == [1],
            queries=queries,
            documents=documents,
            rows=texts.rows,
            scores=_scores(examples, num_documents),
            num_sampled=sampled,
            found=found,
            # Training and evaluation have different seeds. For evaluation, the sampled documents
            # are the same in every epoch.
            seed=(self.sampling_seed, int(training)),
            notes=(f"{num_documents + sampled} documents each", *cut),
        )


def _scores(examples: Sequence[EmbeddingExample], num_documents: int) -> np.ndarray:
    """Returns the scores of all documents, float32 [n, C], with 0 for absent documents."""
    scores = np.zeros((len(examples), num_documents), np.float32)
    for row, example in zip(scores, examples, strict=True):
        # A single score is the score of a pair, or the margin between the positive and a negative.
        values = example.scores or (1.0,)
        row[: len(values)] = values
    return scores


@dataclass(frozen=True, eq=False, kw_only=True)
class RerankExamples(PickledByFields):
    """Queries and their documents. See ``dataset.ExampleSource`` and the module docstring.

    Attributes:
      template: The special tokens and the length of a pair.
      keeps_end: Whether a truncated text keeps its end instead of its start.
      queries: The distinct queries.
      documents: The distinct documents.
      rows: For each example, the index of its query, followed by the index of each of its documents
        or ``ABSENT``, int32 [n, 1 + C].
      scores: The scores of the documents, float32 [n, C].
      num_sampled: The number of sampled documents.
      found: For each query, the indices of the documents that are drawn first, or ``ABSENT``, int32
        [queries, K]. If None, all documents are equally probable.
      seed: The seed for sampling documents, and whether the sampled documents differ between epochs
        (1) or not (0).
      notes: Notes for the log.
    """

    template: Template
    keeps_end: bool
    queries: TokenRows
    documents: TokenRows
    rows: np.ndarray
    scores: np.ndarray
    num_sampled: int
    found: np.ndarray | None
    seed: tuple[int, int]
    notes: tuple[str, ...] = ()

    @property
    def num_examples(self) -> int:
        """The number of queries."""
        return len(self.rows)

    def example(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Makes one example. For training, the sampled documents differ between epochs."""
        query, *documents = self.rows[index].tolist()
        documents += self._sampled(epoch, index, documents)
        pair = functools.partial(self._pair, query)
        arrays = arrays_of(documents, self.template.length, pair)
        scores = np.zeros(len(documents), np.float32)
        # The sampled documents, which are the last ones, have the score 0.
        scores[: self.scores.shape[1]] = self.scores[index]
        return {**arrays, "scores": scores}

    def _sampled(self, epoch: int, index: int, documents: Sequence[int]) -> list[int]:
        """Draws documents of other queries without replacement."""
        seed, training = self.seed
        # For evaluation, `training` is 0, so the draws are the same in every epoch.
        rng = np.random.default_rng([seed, training, epoch * training, index])
        # Documents of the same query in other records must not be sampled either.
        query = int(self.rows[index, 0])
        left_out = {ABSENT, *documents, *self._documents_of[query]}
        # Draw more documents than needed, because documents of this query are left out.
        wanted = min(self.num_sampled + len(left_out), len(self.documents))
        drawn = rng.choice(len(self.documents), wanted, replace=False).tolist()
        # The documents that BM25 found come first, in a random order.
        near = [] if self.found is None else rng.permutation(self.found[query]).tolist()
        candidates = dict.fromkeys([*near, *drawn])
        others = [document for document in candidates if document not in left_out][
            : self.num_sampled
        ]
        return others + [ABSENT] * (self.num_sampled - len(others))

    @cached_property
    def _documents_of(self) -> dict[int, list[int]]:
        """Maps each query to its documents in all records."""
        relevant: dict[int, list[int]] = {}
        for query, *documents in self.rows.tolist():
            relevant.setdefault(query, []).extend(documents)
        return relevant

    def _pair(self, query: int, document: int) -> dict[str, np.ndarray]:
        """Returns the arrays of a pair; see ``BertInputs``."""
        texts = [self.queries[query], self.documents[document]]
        sizes = truncate_longest_first(*map(len, texts), room=self.template.room(2))
        kept = [
            text[len(text) - size :] if self.keeps_end else text[:size]
            for text, size in zip(texts, sizes, strict=True)
        ]
        return BertInputs.of(self.template, [kept]).example(0)
