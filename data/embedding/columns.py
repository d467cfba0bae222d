"""Reads examples from the columns of records.

A record has an anchor, its documents and their scores, or a text and its label. As in
sentence-transformers, the order of the columns determines their roles: an anchor (a query), then
the positive, then any number of negatives, or a score. Columns that have one of the names below may
be in any order.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..common.errors import DataError
from ..common.fields import require
from ..sources.labelled_names import Record
from ..sources.retrieval.collection import RetrievalData
from ..sources.tables import ColumnRoles
from .embedding_examples import ScoreForm

ANCHORS = frozenset("anchor query question sentence1 text1 text_a premise source".split())
POSITIVES = frozenset(
    "positive document documents answer passage sentence2 text2 text_b hypothesis target".split()
)
SCORES = frozenset("score scores label labels similarity similarity_score".split())
LABELS = frozenset("label labels".split())
TEXTS = ANCHORS | {"text", "sentence"}
NEGATIVES = re.compile(r"negatives?|negative_?\d+")
COLUMNS = ColumnRoles(
    "the columns of the texts",
    {"anchor": ANCHORS, "positive": POSITIVES},
    SCORES | TEXTS | {"negative", "negatives", *(f"negative_{i}" for i in range(1, 100))},
)


@dataclass(frozen=True)
class EmbeddingExample:
    """An anchor and its documents.

    Attributes:
      anchor: The text in the first column, such as a query.
      documents: The positive, followed by the negatives; for a scored pair, the second text.
      form: The type of the scores.
      scores: The score of the pair, or the score of each document; empty if the record has no
        score.
      label: The label of the anchor if the example has no documents; otherwise None.
      data_set: The index of the data set that contains the example; 0 if there is only one.
      location: The location of the example for messages, such as `pairs.jsonl line 7`.
    """

    anchor: str
    documents: tuple[str, ...]
    form: ScoreForm
    scores: tuple[float, ...]
    location: str = field(repr=False)
    label: str | None = None
    data_set: int = 0

    @property
    def texts(self) -> tuple[str, ...]:
        """The anchor and the documents."""
        return tuple(filter(None, (self.anchor, *self.documents)))

    @property
    def group(self) -> str:
        """See ``Example``. All anchors of the same document are in the same split."""
        return (*self.documents, *self.texts)[0]


def find_fields(names: Sequence[str], source: str) -> tuple[str, ...]:
    """Returns the fields to read, in order: the anchor, the positive, then negatives and a score.

    For labeled texts, the fields are the text and the label.

    Args:
      names: The names of all columns.
      source: The name of the source, for messages.

    Raises:
      DataError: The names do not determine which columns to read.
    """
    anchors, positives, scores, texts, labels = (
        [name for name in names if name.casefold() in customary]
        for customary in (ANCHORS, POSITIVES, SCORES, TEXTS, LABELS)
    )
    # Without a positive, a text and a label form a labeled text.
    if not positives and len(texts) == len(labels) == 1:
        return (*texts, *labels)
    require(
        len(anchors) == len(positives) == 1 and len(scores) <= 1,
        f"{source!r} has the columns {', '.join(names)}: name the columns of the anchor and "
        "the positive after a #, then any negatives or a score, as #question,paragraph, or a text "
        "and its label, as #text,label",
        error=DataError,
    )
    # Sort negative_2 before negative_10, which is the order of the scores in a list.
    negative_names = [name for name in names if NEGATIVES.fullmatch(name.casefold())]
    negatives = sorted(negative_names, key=lambda name: (len(name), name))
    return (*anchors, *positives, *negatives, *scores)


def examples_of(records: Sequence[Record], fields: Sequence[str]) -> list[EmbeddingExample]:
    """Makes examples from records.

    Args:
      records: The values of the fields in order.
      fields: The names of the fields. If there are three or more fields, the last field is a score
        if its name says so or if most of its values are numbers. If there are two fields, the last
        field is a label if its name says so.

    Raises:
      DataError: A record lacks a text or a score, or the number of its scores differs from the
        number of its documents.
    """
    last = fields[-1].casefold()
    if len(fields) == 2 and last in LABELS:
        return list(map(_labelled, records))
    # If the name of the last column is unknown, the column is a score if most of its values are
    # numbers. A few missing scores must not turn all scores into documents.
    num_scores = 0 if NEGATIVES.fullmatch(last) else sum(_is_score(r.values[-1]) for r in records)
    scored = len(fields) > 2 and (last in SCORES or 2 * num_scores > len(records))
    return [_example(record, scored) for record in records]


def _example(record: Record, scored: bool) -> EmbeddingExample:
    location = record.location
    # A column may contain lists of documents, so there may be several positives.
    anchor, positive, *negatives = record.values[:-1] if scored else record.values
    positives = _texts(positive)
    documents = [*positives, *(text for value in negatives for text in _texts(value))]
    texts = [anchor, *documents]
    require(
        all(isinstance(x, str) for x in texts) and _texts(anchor) and positives,
        f"{location} must have a text as its anchor and as its positive, got {anchor!r:.40} and "
        f"{positive!r:.40}: name the columns after a #, as #question,paragraph",
        error=DataError,
    )
    form, scores = _scores(record.values[-1], location) if scored else ("none", ())
    # A list of documents requires a list of scores that ranks them. Without scores, the second
    # document would be treated as a negative.
    require(
        len(positives) == 1 or form == "documents",
        f"{location} has {len(positives)} positives: give a score for each document, or one "
        "record for each positive",
        error=DataError,
    )
    require(
        form != "documents" or len(scores) == len(documents),
        f"{location} has {len(scores)} scores for {len(documents)} documents: give one score for "
        "each",
        error=DataError,
    )
    return EmbeddingExample(anchor, tuple(documents), form, scores, location)


def _labelled(record: Record) -> EmbeddingExample:
    text, label = record.values
    require(
        isinstance(text, str) and _texts(text) and isinstance(label, str | int) and label != "",
        f"{record.location} must have a text and its label, got {text!r:.40} and {label!r:.40}: "
        "name the columns after a #, as #text,label",
        error=DataError,
    )
    return EmbeddingExample(text, (), "labels", (), record.location, str(label))


def _texts(value: Any) -> list[Any]:
    """Returns the texts in a column, excluding blank texts and None."""
    values = value if isinstance(value, list) else [value]
    return [x for x in values if (x.strip() if isinstance(x, str) else x is not None)]


def _is_score(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(map(_is_score, value))
    # In CSV and TSV files, numbers are texts.
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def _scores(value: Any, location: str) -> tuple[ScoreForm, tuple[float, ...]]:
    problem = (
        f"{location} must have a number as its score, or a list of numbers, got {value!r:.40}: "
        "correct it, or name the column negative if its values are texts"
    )
    require(_is_score(value), problem, DataError)
    if isinstance(value, list):
        return "documents", tuple(map(float, value))
    return "pairs", (float(value),)


def examples_of_collection(collection: RetrievalData, source: str) -> list[EmbeddingExample]:
    """Makes an example from each query and each of its relevant documents.

    Args:
      collection: The collection.
      source: The name of the collection, for messages.
    """
    documents = collection.documents
    return [
        EmbeddingExample(text, (documents[id],), "none", (), f"{source} query {query}")
        for query, text in collection.queries.items()
        # Relevance judgments may refer to documents that are not in the collection.
        for id in filter(documents.__contains__, collection.relevant[query])
    ]


def limited(example: EmbeddingExample, num_documents: int) -> EmbeddingExample:
    """Returns an example with only its first `num_documents` documents."""
    scores = example.scores[:num_documents]
    return replace(example, documents=example.documents[:num_documents], scores=scores)
