"""Texts and their counterparts, for models of sentence vectors.

The arrays of a batch are int32: ``anchor_ids`` and ``anchor_mask`` [B, Q] of the first column, and
``input_ids`` and ``attention_mask`` [B, C, T] of the other columns, the positive first. A text that
an example lacks is all zeros. ``scores`` are float32 [B] for scored pairs, and [B, C] if each
document has a score.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from ..common.errors import DataError
from ..common.fields import NonNegativeInt, require
from ..dataset import ArraySpec, BatchSpec, PickledByFields, Values, too_long
from ..distinct_order import ABSENT
from ..features.bert_inputs import BertInputs, Template, encode_texts
from ..sources.hash_split import Split
from ..sources.labelled_names import LabelledSource, Record
from ..sources.labelled_records import names_of_fields
from ..sources.retrieval.collection import read_retrieval
from ..sources.tables import ColumnRoles
from ..sources.tfds_records import PublishedRecords
from ..tasks.base import SourceField
from ..tasks.labelled import LabelledLength, RecordData
from ..tasks.labelled_examples import ExampleSet
from ..tokenizers.base import Tokenizer
from .columns import (
    COLUMNS,
    NEGATIVES,
    EmbeddingExample,
    examples_of,
    examples_of_collection,
    find_fields,
    limited,
)
from .paragraphs import paragraph_records


@dataclass(frozen=True, kw_only=True)
class EmbeddingData(RecordData[EmbeddingExample]):
    """Pairs of texts with similar meaning, with negatives or with scores."""

    kind: ClassVar[str] = "embedding"
    # Without named fields, the names of the columns decide.
    forms: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("jsonl", "csv", "tsv", "tfds", "memory", "beir", "squad"), ""),
        "builtin": "anchor,positive",
    }
    noun: ClassVar[str] = "examples"
    columns: ClassVar[ColumnRoles] = COLUMNS

    source: SourceField
    """jsonl:GLOB, csv:GLOB, tsv:GLOB or tfds:NAME, with the columns anchor and positive, then
    negative, negative_1 … or negatives (a list), or score. #question,paragraph names other columns,
    in this order. builtin:python-docs has the first sentence of each paragraph, and the rest of it;
    beir:FOLDER#train and squad:GLOB have queries and their documents. In Python also the examples
    themselves."""
    length: LabelledLength = 128
    """Tokens in the sequence of a document, T. Longer texts are truncated."""
    query_length: LabelledLength | None = None
    """Tokens in the sequence of an anchor, at most `length`. Defaults to `length`."""
    num_negatives: NonNegativeInt | None = None
    """Negatives of an example; further ones are not read. Defaults to the most that one has."""
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

    def builtin_records(self, source: LabelledSource, split: Split) -> list[Record]:
        """See ``RecordData``."""
        return paragraph_records(source, split)

    def read(
        self, source: LabelledSource, published: PublishedRecords | None, split: Split
    ) -> ExampleSet[EmbeddingExample]:
        """See ``RecordData``."""
        if source.kind in ("beir", "squad"):
            collection = read_retrieval(source.name)
            whole = split == "validation"
            examples = examples_of_collection(collection, source.name, whole=whole)
            return ExampleSet(tuple(examples), lines=(collection.summary, *collection.notes))
        names = source.fields
        if not names:
            known = names_of_fields(source) if published is None else published.field_names
            names = find_fields(known, source.name)
        require(
            len(names) > 1,
            f"{source.name!r} names one column: name the positive as well",
            error=DataError,
        )
        # A record may lack a negative.
        fields = tuple(name + "?" * self._is_optional(name, source) for name in names)
        source = replace(source, fields=fields, named=True)
        if published is not None:
            published = replace(published, source=source)
        records, lines = self._records(source, published, split)
        examples = examples_of(records, names)
        if self.num_negatives is not None:
            examples = [limited(example, 1 + self.num_negatives) for example in examples]
        return ExampleSet(tuple(examples), lines=(f"columns: {', '.join(names)}", *lines))

    def _is_optional(self, name: str, source: LabelledSource) -> bool:
        of_objects = source.kind in ("jsonl", "memory") and not source.fields
        return of_objects and NEGATIVES.fullmatch(name.casefold()) is not None

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
        number = max(len(example.documents) for example in examples)
        queries, documents, texts = _Table(), _Table(), _Table()
        rows, keys = np.full((2, len(examples), 1 + number), ABSENT, np.int32)
        for i, example in enumerate(examples):
            if example.anchor is not None:
                rows[i, 0] = queries.add(example.anchor, example.location)
            for j, text in enumerate(example.documents, start=1):
                rows[i, j] = documents.add(text, example.location)
            for j, text in enumerate(example.texts):
                keys[i, j] = texts.add(text, example.location)
        queries_in, cut_queries = self._encoded(
            queries, tokenizer, "anchor", self.query_prompt, self.anchor_length
        )
        documents_in, cut_documents = self._encoded(
            documents, tokenizer, "document", self.document_prompt, self.length
        )
        scores = _scores(examples, number)
        # Equal documents are far apart in an evaluation, whose batches follow the order.
        order = np.arange(len(rows)) if training else _spread(rows[:, 1])
        return EmbeddingExamples(
            queries=queries_in,
            documents=documents_in,
            rows=rows[order],
            scores=None if scores is None else scores[order],
            # Pairs without scores are candidates for each other.
            text_keys=keys[order] if scores is None else None,
            notes=(f"{number} documents each", *cut_queries, *cut_documents),
        )

    def _encoded(
        self, texts: "_Table", tokenizer: Tokenizer, noun: str, prompt: str | None, length: int
    ) -> tuple[BertInputs, tuple[str, ...]]:
        """Tokenizes different texts, and counts those that are truncated."""
        made = [(self._lowered(f"{prompt or ''}{text}"),) for text in texts.numbers]
        template = Template.of(tokenizer, length)
        tokens, num_truncated = encode_texts(made, tokenizer, template, texts.locations)
        setting = "length" if noun == "document" else "query_length"
        limit = f"data.{setting} {length}"
        return tokens, too_long(num_truncated, len(made), noun, limit, consequence="truncated")

    def _lowered(self, text: str) -> str:
        # Character by character, as the tokenizers library does: a final Σ becomes σ, not ς.
        return "".join(map(str.lower, text)) if self.lowercase else text


class _Table:
    """Different texts, numbered as they are added."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.locations: list[str] = []

    def add(self, text: str, location: str) -> int:
        """Returns the number of a text; `location` is kept for messages."""
        number = self.numbers.setdefault(text, len(self.numbers))
        if number == len(self.locations):
            self.locations.append(location)
        return number


def _spread(documents: np.ndarray) -> np.ndarray:
    """Returns an order that has each document once before it has any twice."""
    by_document = np.argsort(documents, kind="stable")
    _, counts = np.unique(documents, return_counts=True)
    turns = np.concatenate([np.arange(count) for count in counts])
    # `turns` belongs to the order by document; sort by it, then by the original place.
    return by_document[np.lexsort((by_document, turns))]


def _scores(examples: Iterable[EmbeddingExample], number: int) -> np.ndarray | None:
    """Returns the scores of pairs [n], or of documents [n, C] with 0 for absent ones."""
    found = [example.score for example in examples if example.score is not None]
    if not found:
        return None
    lists = [score for score in found if isinstance(score, tuple)]
    if not lists:
        return np.asarray(found, np.float32)
    return np.array([[*row, *[0.0] * (number - len(row))] for row in lists], np.float32)


@dataclass(frozen=True, eq=False, kw_only=True)
class EmbeddingExamples(PickledByFields):
    """Anchors with their documents; see ``dataset.ExampleSource`` and the top of this file.

    Attributes:
      queries: The different anchors.
      documents: The different documents.
      rows: The number of the anchor and of each document, or -1, int32 [n, 1 + C].
      scores: float32 [n] or [n, C], or None.
      text_keys: See ``dataset.DistinctExamples``, int32 [n, 1 + C] or None.
      notes: Remarks for the log.
    """

    queries: BertInputs
    documents: BertInputs
    rows: np.ndarray
    scores: np.ndarray | None
    text_keys: np.ndarray | None
    notes: tuple[str, ...] = ()

    @property
    def num_examples(self) -> int:
        """The number of anchors."""
        return len(self.rows)

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
        scores = {} if self.scores is None else {"scores": self.scores[index]}
        anchors = {
            "anchor_ids": query["input_ids"] * present,
            "anchor_mask": query["attention_mask"] * present,
        }
        return {**anchors, **arrays, **scores}
