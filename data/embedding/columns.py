"""The columns of a record: the anchor, its documents, and their scores; or a text and its label.

The order of the columns gives their roles, as in sentence-transformers: an anchor (a query), then
the positive, then any number of negatives, or a score. Columns with one of the names below may be
in any order.
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
    """An anchor with its documents.

    Attributes:
      anchor: The text of the first column, such as a query.
      documents: The positive, then the negatives; or the second text of a scored pair.
      form: The kind of scores.
      scores: The score of the pair, or of each document; empty if the record has none.
      label: The label of the anchor if the example has no documents, or None.
      data_set: The index of the example's data set, if there are several.
      location: The location of the example, for messages: `pairs.jsonl line 7`.
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
        """See ``Example``. All anchors of a document are in the same split."""
        return (*self.documents, *self.texts)[0]


def find_fields(names: Sequence[str], source: str) -> tuple[str, ...]:
    """Returns the fields to read in order: the anchor, the positive, negatives, a score.

    The fields of labeled texts are the text and the label.

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
    # Without a positive, a text and a label are labeled texts.
    if not positives and len(texts) == len(labels) == 1:
        return (*texts, *labels)
    require(
        len(anchors) == len(positives) == 1 and len(scores) <= 1,
        f"{source!r} has the columns {', '.join(names)}: name the columns of the anchor and "
        "the positive after a #, then any negatives or a score, as #question,paragraph, or a text "
        "and its label, as #text,label",
        error=DataError,
    )
    # Sort negative_2 before negative_10, the order of a list of scores.
    negative_names = [name for name in names if NEGATIVES.fullmatch(name.casefold())]
    negatives = sorted(negative_names, key=lambda name: (len(name), name))
    return (*anchors, *positives, *negatives, *scores)


def examples_of(records: Sequence[Record], fields: Sequence[str]) -> list[EmbeddingExample]:
    """Makes examples from records.

    Args:
      records: The values of the fields in order.
      fields: The names of the fields. The last of three or more fields is a score if it has the
        name of a score, or if most of its values are numbers. The last of two fields is a label if
        it has the name of a label.

    Raises:
      DataError: A record lacks a text or a score, or has different numbers of documents and scores.
    """
    last = fields[-1].casefold()
    if len(fields) == 2 and last in LABELS:
        return list(map(_labelled, records))
    # A last column with an unknown name is a score if most of its values are numbers. A missing
    # score must not turn the other scores into documents.
    num_scores = 0 if NEGATIVES.fullmatch(last) else sum(_is_score(r.values[-1]) for r in records)
    scored = len(fields) > 2 and (last in SCORES or 2 * num_scores > len(records))
    return [_example(record, scored) for record in records]


def _example(record: Record, scored: bool) -> EmbeddingExample:
    location = record.location
    # A column may have a list of documents, so the positive may be several texts.
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
    # A list of documents needs a list of scores that ranks it. Without scores, the second document
    # would be a negative.
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
    """Returns the texts of a column, without blank texts and None."""
    values = value if isinstance(value, list) else [value]
    return [x for x in values if (x.strip() if isinstance(x, str) else x is not None)]


def _is_score(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(map(_is_score, value))
    # Numbers in CSV and TSV files are texts.
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
    """Makes an example for each query and each of its relevant documents.

    Args:
      collection: The collection.
      source: The name of the collection, for messages.
    """
    documents = collection.documents
    return [
        EmbeddingExample(text, (documents[id],), "none", (), f"{source} query {query}")
        for query, text in collection.queries.items()
        # A relevance judgment may refer to a document that the collection does not contain.
        for id in filter(documents.__contains__, collection.relevant[query])
    ]


def limited(example: EmbeddingExample, num_documents: int) -> EmbeddingExample:
    """Returns the example with at most `num_documents` documents."""
    scores = example.scores[:num_documents]
    return replace(example, documents=example.documents[:num_documents], scores=scores)
