"""Texts and their counterparts, for models of sentence vectors.

The arrays of a batch are int32: ``anchor_ids`` and ``anchor_mask`` [B, Q] of the first column, and
``input_ids`` and ``attention_mask`` [B, C, T] of the other columns, the positive first. A text that
an example lacks is all zeros. Q and T are the lengths of the longest texts, rounded up to a
multiple of 8, or the limits of the settings. ``scores`` are float32 [B] for scored pairs, and
[B, C] if each document has a score. Labeled texts have only the first column, and ``labels`` int32
[B].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from ..common.errors import DataError, counted
from ..common.fields import require
from ..dataset import ArraySpec, BatchSpec, PickledByFields, Values, too_long
from ..features.bert_inputs import BertInputs, Template, encode_texts
from ..orders.by_label import label_order
from ..orders.distinct import ABSENT, distinct_order
from ..tasks.labelled import LabelledLength
from ..tokenizers.base import Tokenizer
from .columns import EmbeddingExample
from .columns_data import ColumnsData
from .text_table import NumberedTexts, TextTable

ScoreForm = Literal["none", "pairs", "documents", "labels"]
"""The form of scores: none, one for each pair, one for each document, or a label of each text."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingData(ColumnsData):
    """Pairs of texts with similar meaning, with negatives or with scores; or texts with labels."""

    kind: ClassVar[str] = "embedding"

    length: LabelledLength = 128
    """Maximum number of tokens of a document, T. Longer texts are truncated."""
    query_length: LabelledLength | None = None
    """Maximum number of tokens of an anchor, Q, at most `length`. Defaults to `length`."""
    query_prompt: str | None = None
    """A text before each anchor. Defaults to the prompt of `init_from` for queries."""
    document_prompt: str | None = None
    """A text before each document. Defaults to the prompt of `init_from` for documents."""
    lowercase: bool | None = None
    """Whether texts are lowercased before tokenization. Defaults to the setting of `init_from`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.anchor_length <= self.length,
            f"query_length {self.query_length} must be at most length {self.length}: raise the "
            "second",
        )

    @property
    def anchor_length(self) -> int:
        """The number of tokens in the sequence of an anchor, Q."""
        return self.query_length or self.length

    def score_form(self) -> ScoreForm:
        """Returns the form of the scores of the training examples, which are read."""
        return form_of(self._part("train").examples[0])

    def label_names(self, example: EmbeddingExample) -> tuple[str, ...]:
        """See ``RecordData``."""
        return () if example.label is None else (example.label,)

    def batch_spec(self, num_labels: int, num_choices: int) -> BatchSpec:
        """See ``DataConfig`` and the top of this file; without scores."""
        del num_labels, num_choices
        anchor, documents = (self.anchor_length,), (1 + (self.num_negatives or 0), self.length)
        return {
            "anchor_ids": ArraySpec(anchor, Values.SOURCE_TOKEN),
            "anchor_mask": ArraySpec(anchor, Values.MASK),
            "input_ids": ArraySpec(documents, Values.SOURCE_TOKEN),
            "attention_mask": ArraySpec(documents, Values.MASK),
        }

    def encode(
        self,
        examples: Sequence[EmbeddingExample],
        tokenizer: Tokenizer,
        labels: tuple[str, ...],
        *,
        training: bool = False,
    ) -> "EmbeddingExamples":
        """See ``RecordData``; each text is tokenized once."""
        del labels
        texts = NumberedTexts.of(examples)
        rows, number = texts.rows, texts.rows.shape[1] - 1
        queries_in, cut_queries = self._encoded(
            texts.queries, tokenizer, "anchor", self.query_prompt, self.anchor_length
        )
        documents_in, cut_documents = self._encoded(
            texts.documents, tokenizer, "document", self.document_prompt, self.length
        )
        scores, classes = _scores(examples, number), _classes(examples)
        order = np.arange(len(rows)) if training else _spread(rows[:, 1] if number else rows[:, 0])
        return EmbeddingExamples(
            queries=queries_in,
            documents=documents_in,
            rows=rows[order],
            scores=None if scores is None else scores[order],
            labels=None if classes is None else classes[order],
            text_keys=texts.keys[order],
            notes=(f"{counted(number, 'document')} each", *cut_queries, *cut_documents),
        )

    def _encoded(
        self, texts: TextTable, tokenizer: Tokenizer, noun: str, prompt: str | None, length: int
    ) -> tuple[BertInputs, tuple[str, ...]]:
        """Tokenizes different texts, and counts those that are truncated."""
        made = [(self._lowered(f"{prompt or ''}{text}"),) for text in texts.numbers]
        template = Template.of(tokenizer, length)
        tokens, num_truncated = encode_texts(made, tokenizer, template, texts.locations)
        setting = "length" if noun == "document" else "query_length"
        limit = f"data.{setting} {length}"
        cut = too_long(num_truncated, len(made), noun, limit, consequence="truncated")
        return tokens.fitted(), cut

    def _lowered(self, text: str) -> str:
        # Lowercase character by character, as the tokenizers library does: a final Σ becomes σ, not
        # ς.
        return "".join(map(str.lower, text)) if self.lowercase else text


def form_of(example: EmbeddingExample) -> ScoreForm:
    """Returns the form of the score of an example."""
    if example.label is not None:
        return "labels"
    if example.score is None:
        return "none"
    return "documents" if isinstance(example.score, tuple) else "pairs"


def _classes(examples: Sequence[EmbeddingExample]) -> np.ndarray | None:
    """Returns the numbers of the labels int32 [n], or None without labels."""
    labels = [example.label for example in examples]
    if labels[0] is None:
        return None
    return np.unique(labels, return_inverse=True)[1].astype(np.int32)


def _spread(documents: np.ndarray) -> np.ndarray:
    """Returns an order that has each document once before it has any twice.

    Equal documents are then far apart in an evaluation, whose batches follow the order.
    """
    by_document = np.argsort(documents, kind="stable")
    _, counts = np.unique(documents, return_counts=True)
    turns = np.concatenate([np.arange(count) for count in counts])
    # `turns` belongs to the order by document; sort by it, then by the original index.
    return by_document[np.lexsort((by_document, turns))]


def _scores(examples: Sequence[EmbeddingExample], number: int) -> np.ndarray | None:
    """Returns the scores of pairs [n], or of documents [n, C] with 0 for absent ones."""
    found = [example.score for example in examples if example.score is not None]
    if not found:
        return None
    lists = [score for score in found if isinstance(score, tuple)]
    require(
        len(lists) in (0, len(found)),
        f"{len(lists):,} of {len(found):,} records with scores have a list of scores: give a "
        "number in each record, or a list in each",
        error=DataError,
    )
    if not lists:
        return np.asarray(found, np.float32)
    return np.array([[*row, *[0.0] * (number - len(row))] for row in lists], np.float32)


@dataclass(frozen=True, eq=False, kw_only=True)
class EmbeddingExamples(PickledByFields):
    """Anchors with their documents; see ``dataset.OrderedExamples`` and the top of this file.

    Attributes:
      queries: The different anchors.
      documents: The different documents.
      rows: The number of the anchor and of each document, or -1, int32 [n, 1 + C].
      scores: float32 [n] or [n, C], or None.
      labels: int32 [n], or None.
      text_keys: The number of each text of each example, or -1, int32 [n, 1 + C].
      notes: Remarks for the log.
    """

    queries: BertInputs
    documents: BertInputs
    rows: np.ndarray
    scores: np.ndarray | None
    labels: np.ndarray | None
    text_keys: np.ndarray
    notes: tuple[str, ...] = ()

    @property
    def num_examples(self) -> int:
        """The number of anchors."""
        return len(self.rows)

    def batches(self, batch_size: int, seed: int, epoch: int) -> np.ndarray | None:
        """See ``dataset.OrderedExamples``."""
        if self.labels is not None:
            return label_order(self.labels, batch_size, seed, epoch)
        # Pairs without scores are candidates for each other.
        if self.scores is None:
            return distinct_order(self.text_keys, batch_size, seed, epoch)
        return None

    def example(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Makes one example; the same in every epoch."""
        anchor, *documents = self.rows[index].tolist()
        query = self.queries.example(max(anchor, 0))
        # A document without an anchor is only a candidate in an evaluation.
        present = int(anchor != ABSENT)
        arrays = {
            name: np.zeros((len(documents), self.documents.template.length), np.int32)
            for name in ("input_ids", "attention_mask")
        }
        for place, number in enumerate(documents):
            # An absent text is all zeros.
            if number != ABSENT:
                row = self.documents.example(number)
                for name, array in arrays.items():
                    array[place] = row[name]
        values = {"scores": self.scores, "labels": self.labels}
        targets = {name: x[index] for name, x in values.items() if x is not None}
        anchors = {
            "anchor_ids": query["input_ids"] * present,
            "anchor_mask": query["attention_mask"] * present,
        }
        return {**anchors, **(arrays if documents else {}), **targets}
