"""Texts, or pairs of texts, with a label: GLUE's sentences and their like.

Devlin et al. 2018, section 4.1: ``[CLS] A [SEP]`` or ``[CLS] A [SEP] B [SEP]``, classified
at ``[CLS]``; pairs that are too long lose tokens of the longer text first.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from ..dataset import ArraySpec, BatchSpec, Values
from ..errors import DataError, UserError
from ..features.bert_inputs import Frame, FramedTokens, frame_texts, token_specs
from ..features.predictions import label_id, output, sigmoid, softmax
from ..io.files import input_lines
from ..sources.documents import Split
from ..sources.labelled_records import (
    LabelledSource,
    Record,
    are_json_lines,
    read_fields,
    read_objects,
)
from ..sources.tfds_records import PublishedRecords
from ..tokenizers.base import Tokenizer
from .labelled import LabelledData, Loaded

Target = Literal["one", "several", "score"]

# From so many examples on, a label for each is a column of something else.
_FEW = 20

Label = str | tuple[str, ...] | float
"""The label's name, the names of several, or a score."""


@dataclass(frozen=True)
class ClassificationExample:
    """A text, or two, and what it is.

    Attributes:
        text: The text, or the first of two.
        text_b: The second text.
        label: None if it is to be predicted.
        place: Where it stands, for messages.
    """

    text: str
    text_b: str | None
    label: Label | None
    place: str = field(repr=False)

    @property
    def texts(self) -> tuple[str, ...]:
        """Its one or two texts."""
        return (self.text,) if self.text_b is None else (self.text, self.text_b)

    @property
    def group(self) -> str:
        """Equal texts stay together."""
        return "\t".join(self.texts)


@dataclass(frozen=True, kw_only=True)
class ClassificationData(LabelledData[ClassificationExample]):
    """Texts, or pairs of texts, with a label each."""

    kind: ClassVar[str] = "classify"
    forms: ClassVar[dict[str, str]] = {"tsv": "1,2", "jsonl": "label,text", "tfds": "label,text"}
    published_fields: ClassVar[dict[str, str]] = {
        "glue/cola": "label,sentence",
        "glue/sst2": "label,sentence",
        "glue/mrpc": "label,sentence1,sentence2",
        "glue/qqp": "label,question1,question2",
        "glue/stsb": "label,sentence1,sentence2",
        "glue/mnli": "label,premise,hypothesis",
        "glue/qnli": "label,question,sentence",
        "glue/rte": "label,sentence1,sentence2",
        "glue/wnli": "label,sentence1,sentence2",
        "ag_news_subset": "label,description",
    }

    source: str
    """tsv:GLOB#LABEL,TEXT[,TEXT_B], jsonl:GLOB#label,text or tfds:glue/NAME."""
    length: int = 128
    """Tokens in a sequence, T."""
    target: Target = "one"
    """one: each example has one label; several: any number, parted by commas; score: a number."""

    def read(
        self, source: LabelledSource, published: PublishedRecords | None, split: Split
    ) -> Loaded[ClassificationExample]:
        """See ``LabelledData``; the fields are the label, the text and a second text."""
        _check_fields(source)
        names = published.class_names(source.fields[0]) if published is not None else None
        records = published.read(split) if published is not None else read_fields(source)
        examples = tuple(self._example(record, names) for record in records)
        return Loaded(examples, names)

    def _example(self, record: Record, names: tuple[str, ...] | None) -> ClassificationExample:
        value, *texts = record.values
        label = _label(value, self.target, names, record.place)
        return _of_texts(texts, label, record.place)

    def unlabelled(self, records: Iterable[Record]) -> list[ClassificationExample]:
        """See ``LabelledData``."""
        return [_of_texts(record.values, None, record.place) for record in records]

    def examples_to_predict(self, path: str) -> list[ClassificationExample]:
        """Reads a text per line, or two parted by a tab, as many as the source has.

        An empty line is an empty text, so that there is a prediction for each line. Of a
        file ``*.jsonl`` the fields of the texts are read.

        Raises:
            DataError: A line has more texts, or fewer (with file and line).
        """
        fields = self.fields_to_predict(("text", "text_b")[: len(self.fields) - 1])
        if are_json_lines(path):
            return self.unlabelled(read_objects(input_lines(path), fields))
        examples = []
        for file, number, line in input_lines(path):
            texts, place = line.split("\t"), f"{file} line {number}"
            if len(texts) != len(fields):
                raise DataError(
                    f"{place} has {len(texts)} columns where this model reads {len(fields)}: give "
                    "its texts alone, parted by tabs, or name a file of labelled examples as "
                    f"tsv:{file}#LABEL,TEXT[,TEXT_B]"
                )
            examples.append(_of_texts(texts, None, place))
        return examples

    def labels(self) -> tuple[str, ...]:
        """The labels of the source, those held out of it included.

        As the published data set orders them; whole numbers by size; others by name. A
        score has the one label ``score``.

        Raises:
            DataError: All examples have the same label, or most have one of their own.
        """
        if self.target == "score":
            return ("score",)
        loaded = self._whole()
        if loaded.class_names is not None:
            return loaded.class_names
        found = {name for example in loaded.examples for name in _names(example.label)}
        if len(found) < 2 and self.target == "one":
            raise DataError(
                f"all examples of {self.source!r} have the label {min(found)!r}: name the column "
                "of the labels, as #LABEL,TEXT"
            )
        if len(loaded.examples) > _FEW and 2 * len(found) > len(loaded.examples):
            raise DataError(
                f"{len(loaded.examples):,} examples of {self.source!r} have {len(found):,} "
                f"different labels, {min(found)[:40]!r} among them: name the column of the "
                "labels, as #LABEL,TEXT, or have target score for numbers"
            )
        if not found:
            raise DataError(f"no example of {self.source!r} has a label: name their column")
        whole = all(_is_integer(name) for name in found)
        return tuple(sorted(found, key=lambda name: (int(name) if whole else 0, name)))

    def assumed_labels(self) -> tuple[str, ...]:
        """See ``DataConfig``; two labels, or the one of a score."""
        return ("score",) if self.target == "score" else ("a", "b")

    def batch_spec(self, num_labels: int, num_choices: int) -> BatchSpec:
        """See ``DataConfig``; the arrays are those of ``ClassificationRows.row``."""
        labels = {
            "one": ArraySpec((), Values.LABEL, num_classes=num_labels),
            "several": ArraySpec((num_labels,), Values.LABEL, "float32", num_classes=2),
            "score": ArraySpec((), Values.LABEL, "float32"),
        }
        return {**token_specs(self.length), "labels": labels[self.target]}

    def rows(
        self,
        examples: Sequence[ClassificationExample],
        tokenizer: Tokenizer,
        labels: tuple[str, ...],
        *,
        training: bool = False,
    ) -> "ClassificationRows":
        """See ``LabelledData``; training and evaluation have the same rows."""
        frame = Frame.of(tokenizer, self.length)
        tokens, cut = frame_texts([example.texts for example in examples], tokenizer, frame)
        empty = sum(not "".join(example.texts).strip() for example in examples)
        notes = tuple(
            note
            for count, note in (
                (cut, f"{cut:,} of them cut to {self.length} tokens"),
                (empty, f"{empty:,} of them without a text"),
            )
            if count
        )
        values = label_values(examples, labels, self.target)
        texts = tuple(example.texts for example in examples)
        return ClassificationRows(tokens, values, texts, labels, self.target, notes)


@dataclass(frozen=True, eq=False)
class ClassificationRows:
    """A row for each example; see ``pipeline.Rows``.

    Attributes:
        tokens: The framed texts.
        values: int32 [n] label ids, float32 [n, L] of 0 and 1 (several) or float32 [n]
            (score); None if they are to be predicted.
        texts: The one or two texts of each, for predictions.
        labels: The names of the labels, L.
        target: What a label is.
        notes: For the log.
    """

    tokens: FramedTokens
    values: np.ndarray | None
    texts: tuple[tuple[str, ...], ...]
    labels: tuple[str, ...]
    target: Target
    notes: tuple[str, ...] = ()

    @property
    def rows_per_epoch(self) -> int:
        """The number of examples."""
        return len(self.tokens)

    def row(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Makes one example; the same in every epoch.

        Returns:
            ``input_ids``, ``attention_mask``, ``token_type_ids`` int32 [T]; ``labels`` int32
            [], float32 [L] (several) or float32 [] (score), unless they are unknown.
        """
        row = self.tokens.row(index)
        if self.values is not None:
            row["labels"] = np.asarray(self.values[index])
        return row

    def gold(self) -> list[Any]:
        """Label ids, lists of 0 and 1 (several), or numbers (score)."""
        if self.values is None:
            raise UserError("examples to predict have no labels")
        return self.values.tolist()

    def decode(self, predictions: dict[str, np.ndarray]) -> list[dict[str, Any]]:
        """Names the labels.

        Args:
            predictions: ``logits`` float [n, L].

        Returns:
            For each example ``{"text": …, "label": name, "probabilities": {name: p}}``, with
            ``text_b`` if there is a second text; several: ``"labels": [names]``, all that
            are above 0.5; score: ``{"text": …, "score": number}``.
        """
        logits = output(predictions, "logits", len(self.tokens))
        given = [dict(zip(("text", "text_b"), texts, strict=False)) for texts in self.texts]
        if self.target == "score":
            scores = logits[:, 0].tolist()
            return [{**g, "score": score} for g, score in zip(given, scores, strict=True)]
        table = softmax(logits) if self.target == "one" else sigmoid(logits)
        decoded = []
        for texts, row in zip(given, table, strict=True):
            named = dict(zip(self.labels, row.tolist(), strict=True))
            if self.target == "one":
                found = {"label": self.labels[int(row.argmax())]}
            else:
                found = {"labels": [name for name, p in named.items() if p > 0.5]}
            decoded.append({**texts, **found, "probabilities": named})
        return decoded


def _check_fields(source: LabelledSource) -> None:
    if not 2 <= len(source.fields) <= 3:
        raise DataError(
            f"{source.name!r} names {len(source.fields)} fields: name the label, the text "
            "and perhaps a second text, as #LABEL,TEXT[,TEXT_B]"
        )


def _of_texts(texts: Sequence[Any], label: Label | None, place: str) -> ClassificationExample:
    for text in texts:
        if not isinstance(text, str):
            raise DataError(
                f"{place} has a {type(text).__name__} where its text should be: "
                "name the label first and then the text, as #LABEL,TEXT"
            )
    return ClassificationExample(texts[0], texts[1] if len(texts) == 2 else None, label, place)


def label_values(
    examples: Sequence[ClassificationExample], labels: tuple[str, ...], target: Target
) -> np.ndarray | None:
    """Turns labels into numbers.

    Returns:
        See ``ClassificationRows.values``.

    Raises:
        DataError: A label is not among those of the training data (with file and line).
    """
    if all(example.label is None for example in examples):
        return None
    if target == "score":
        return np.array([example.label for example in examples], np.float32)
    ids = {name: i for i, name in enumerate(labels)}
    if target == "one":
        return np.array([label_id(str(e.label), ids, e.place) for e in examples], np.int32)
    values = np.zeros((len(examples), len(labels)), np.float32)
    for row, example in zip(values, examples, strict=True):
        row[[label_id(name, ids, example.place) for name in _names(example.label)]] = 1
    return values


def _label(value: Any, target: Target, names: tuple[str, ...] | None, place: str) -> Label:
    """Reads one label as its file gives it."""
    if target == "score":
        return _score(value, place)
    if target == "several":
        several = value.split(",") if isinstance(value, str) else value
        several = several if isinstance(several, list) else [several]
        return tuple(_name(one, names, place) for one in several if str(one).strip())
    name = _name(value, names, place)
    if not name:
        raise DataError(f"{place} has no label: its column is empty")
    return name


def _name(value: Any, names: tuple[str, ...] | None, place: str) -> str:
    if names is None:
        if isinstance(value, float):
            raise DataError(
                f"{place} has the label {value!r}: a label is a word or a whole number; for other "
                "numbers choose target score"
            )
        if isinstance(value, list | dict) or value is None:
            raise DataError(f"{place} has the label {value!r}: a label is a word or a number")
        return str(value).lower() if isinstance(value, bool) else str(value).strip()
    if not 0 <= value < len(names):
        raise DataError(f"{place} has no label ({value}): choose a data set with labels")
    return names[value]


def _score(value: Any, place: str) -> float:
    try:
        score = float(value)
    except (TypeError, ValueError):
        score = math.nan
    if not math.isfinite(score):
        raise DataError(f"{place} has the score {value!r}: with target score it must be a number")
    return score


def _names(label: Label | None) -> tuple[str, ...]:
    return label if isinstance(label, tuple) else (str(label),)


def _is_integer(name: str) -> bool:
    return name.removeprefix("-").isdecimal() and name.isascii()
