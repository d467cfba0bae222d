"""Sequence classification: texts, or pairs of texts, with a label (GLUE).

Devlin et al. 2018, section 4.1: one or two texts with the special tokens of the tokenizer's frame,
classified at the token that the model pools (``[CLS]`` in BERT). In pairs that are too long, the
longer text is truncated first.

The arrays of a batch are int32 [B, T] ``input_ids``, ``attention_mask``, ``token_type_ids``, and
``labels``: int32 [B] (single_label), float32 [B, L] (multi_label; binary with L = 1) or float32 [B]
(regression).
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from ..common.errors import DataError, UserError
from ..dataset import ArraySpec, BatchSpec, Values, too_long
from ..features.bert_inputs import BertInputs, Template, encode_texts, token_specs
from ..features.predictions import Prediction, label_id, output, sigmoid, softmax
from ..sources.hash_split import Split
from ..sources.in_memory import Examples
from ..sources.labelled_names import LabelledSource, Record, parse_labelled
from ..sources.labelled_records import read_fields
from ..sources.tfds_records import PublishedRecords
from ..tokenizers.base import Tokenizer
from .base import SourceField, Target
from .labelled import ExampleSet, LabelledData, LabelledExamples, LabelledLength
from .texts_to_predict import IMPORTED, TextReader, are_pair

# With more examples than this, mostly distinct labels suggest that the wrong column was named.
_FEW = 20

Label = str | tuple[str, ...] | float
"""The name of the label, the names of several labels, or a score."""


@dataclass(frozen=True)
class ClassificationExample:
    """A text, or a pair of texts, with its label.

    Attributes:
      text: The text, or the first of two.
      text_b: The second text.
      label: The label, or None if unknown (prediction).
      location: The location of the example, for messages: `train.tsv line 7`.
      part: The part of the source that contains the example, if the source has named parts. Each
        part is also scored separately.
    """

    text: str
    text_b: str | None
    label: Label | None
    location: str = field(repr=False)
    part: str | None = field(default=None, repr=False)

    @property
    def texts(self) -> tuple[str, ...]:
        """The one or two texts."""
        return (self.text,) if self.text_b is None else (self.text, self.text_b)

    @property
    def group(self) -> str:
        """See ``Example``; equal texts are in the same split."""
        return "\t".join(self.texts)


@dataclass(frozen=True, kw_only=True)
class SequenceClassificationData(LabelledData[ClassificationExample]):
    """Texts, or pairs of texts, with a label each."""

    kind: ClassVar[str] = "sequence_classification"
    forms: ClassVar[dict[str, str]] = {
        "tsv": "1,2",
        "csv": "1,2",
        "jsonl": "label,text",
        "tfds": "label,text",
        "builtin": "label,text",
        "corpora": "label,text",
        "memory": "label,text,text_b?",
    }
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

    source: SourceField
    """tsv:GLOB#LABEL,TEXT[,TEXT_B], csv:GLOB#LABEL,TEXT[,TEXT_B], jsonl:GLOB#label,text,
    tfds:glue/NAME, builtin:reviews, or the documents of several sources:
    corpora:good=SOURCE | crawl=SOURCE."""
    length: LabelledLength = 128
    """Tokens in a sequence, T."""
    target: Target = "single_label"
    """single_label: each example has one label, by a softmax; binary: one of two, by the sigmoid of
    a single number for the second of them in order; multi_label: any number of labels, separated
    by commas; regression: a number."""

    def read(
        self, source: LabelledSource, published: PublishedRecords | None, split: Split
    ) -> ExampleSet[ClassificationExample]:
        """See ``LabelledData``; the fields are the label, the text and an optional second text."""
        if not 2 <= len(source.fields) <= 3:
            raise DataError(
                f"{source.name!r} names {len(source.fields)} fields: name the label, the text "
                "and perhaps a second text, as #LABEL,TEXT[,TEXT_B]"
            )
        # Published labels are class ids with declared names; local labels are names.
        names = published.class_names(source.fields[0]) if published is not None else None
        records, lines = self.read_records(source, published, split)
        examples = []
        for record in records:
            value, *texts = record.values
            try:
                label = _label(value, self.target, names, record.location)
            except DataError as error:
                # A bad label in the first line of a table is often the header.
                hint = (
                    "; if the line has the names of columns, name yours after a #, as #label,text"
                )
                raise DataError(f"{error}{hint}") if record.first else error from None
            examples.append(_example(texts, label, record.location, record.part))
        if self.target in ("single_label", "binary"):
            _check_first_lines(records, examples)
        return ExampleSet(tuple(examples), names, lines=lines)

    def label_names(self, example: ClassificationExample) -> tuple[str, ...]:
        """See ``LabelledData``; scores are not counted."""
        if example.label is None or self.target == "regression":
            return ()
        return _names(example.label)

    def unlabelled(self, records: Iterable[Record]) -> list[ClassificationExample]:
        """See ``LabelledData``."""
        return [_example(record.values, None, record.location) for record in records]

    def examples_to_predict(self, path: str, unread: set[str]) -> list[ClassificationExample]:
        """Reads a file; see ``TextReader.of_file``."""
        return self.unlabelled(self._reader(unread).of_file(path))

    def examples_in_memory(self, name: Examples, unread: set[str]) -> list[ClassificationExample]:
        """Reads texts or dicts; see ``TextReader.of_examples``."""
        if "#" in name:
            return super().examples_in_memory(name, unread)
        return self.unlabelled(self._reader(unread).of_examples(name))

    def examples_of_source(self, name: str, unread: set[str]) -> list[ClassificationExample]:
        """Reads a source; customary names of two texts do not mean label and text."""
        source, reader = parse_labelled(name, self.forms), self._reader(unread)
        if source.kind not in ("tsv", "csv", "jsonl"):
            return super().examples_of_source(name, unread)
        # Without named fields, the names in the source decide which fields are texts.
        given = source.fields
        if not source.named and (records := reader.of_source(source)) is not None:
            return self.unlabelled(records)
        if not reader.imported and not are_pair(given):
            return super().examples_of_source(name, unread)
        # An imported model reads one or two texts, so two unknown names are ambiguous.
        labels = self.columns.fields["label"]
        if reader.imported and len(given) == 2 and not are_pair(given) and given[0] not in labels:
            raise DataError(
                f"{name!r}: {given[0]!r} may be the label or a first text: name one text, as "
                f"#{given[1]}, or the label and both texts, or leave the # out, so that the names "
                "of the columns decide"
            )
        # Otherwise the first field is the label, unless the fields are a text or a pair.
        texts = given if len(given) == 1 or are_pair(given) else self.without_label(given)
        if len(texts) > 2 or (not reader.imported and len(texts) != len(reader.fields)):
            raise DataError(
                f"{name!r} names {len(texts)} texts where this model reads "
                f"{'1 or 2' if reader.imported else len(reader.fields)}: name the label and these"
            )
        roles = self.columns.without(self.label_field)
        return self.unlabelled(read_fields(replace(source, fields=texts), roles))

    def _reader(self, unread: set[str]) -> TextReader:
        fields = self.without_label(self.fields)
        return TextReader(fields, self.source_name == IMPORTED, unread)

    def labels(self) -> tuple[str, ...]:
        """Returns the labels of the source, including its held-out examples.

        The labels of a published data set keep its order; whole numbers are ordered by size, other
        labels by name. Regression has the only label ``score``. A binary target has only the second
        of two labels, and every other label counts as its negation.

        Raises:
          DataError: All examples have the same label, or most labels occur only once; or a binary
            target has more than two labels.
        """
        if self.target == "regression":
            return ("score",)
        # Use all examples, so that a label that only held-out examples have is also known.
        loaded = self._whole()
        if loaded.class_names is not None and self.target != "binary":
            return loaded.class_names
        found = {name for example in loaded.examples for name in _names(example.label)}
        if len(found) < 2 and self.target in ("single_label", "binary"):
            raise DataError(
                f"all examples of {self.source_name!r} have the label {min(found)!r}: name the "
                "column of the labels, as #LABEL,TEXT"
            )
        # A label should repeat; otherwise the column probably contains ids, texts or scores.
        if len(loaded.examples) > _FEW and 2 * len(found) > len(loaded.examples):
            raise DataError(
                f"{len(loaded.examples):,} examples of {self.source_name!r} have {len(found):,} "
                f"different labels, {min(found)[:40]!r} among them: name the column of the "
                "labels, as #LABEL,TEXT, or choose target regression for numbers"
            )
        if not found:
            raise DataError(f"no example of {self.source_name!r} has a label: name their column")
        # Sort whole numbers by value, so that 10 follows 9.
        whole = all(name.removeprefix("-").isdecimal() and name.isascii() for name in found)
        ordered = loaded.class_names or sorted(
            found, key=lambda name: (int(name) if whole else 0, name)
        )
        if self.target != "binary":
            return tuple(ordered)
        if len(ordered) != 2:
            raise DataError(
                f"{self.source_name!r} has {len(ordered)} labels ({', '.join(ordered[:5])}), but "
                "target binary needs two: choose target single_label, or name another column"
            )
        return (ordered[1],)

    @property
    def label_target(self) -> Target:
        """See ``DataConfig``."""
        return self.target

    @property
    def classifies_single_texts(self) -> bool:
        """See ``DataConfig``; a source of single texts has the label and one more field."""
        return self.target != "regression" and len(self.fields) == 2

    def of_imported_model(self, target: Target) -> "SequenceClassificationData":
        """See ``DataConfig``; an imported model reads one or two texts."""
        return replace(self, target=target, source=IMPORTED, validation=None)

    def assumed_labels(self) -> tuple[str, ...]:
        """See ``DataConfig``; two labels, or one for regression or a binary target."""
        only = {"regression": ("score",), "binary": ("b",)}
        return only.get(self.target, ("a", "b"))

    def batch_spec(self, num_labels: int, num_choices: int) -> BatchSpec:
        """See ``DataConfig`` and the module docstring."""
        labels = {
            "single_label": ArraySpec((), Values.LABEL, num_classes=num_labels),
            "binary": ArraySpec((num_labels,), Values.LABEL, "float32", num_classes=2),
            "multi_label": ArraySpec((num_labels,), Values.LABEL, "float32", num_classes=2),
            "regression": ArraySpec((), Values.LABEL, "float32"),
        }
        return {**token_specs(self.length), "labels": labels[self.target]}

    def encode(
        self,
        examples: Sequence[ClassificationExample],
        tokenizer: Tokenizer,
        labels: tuple[str, ...],
        *,
        training: bool = False,
    ) -> "SequenceClassificationExamples":
        """See ``LabelledData``; the arrays are the same for training and evaluation."""
        template = Template.of(tokenizer, self.length)
        # Tokenize once for all epochs; `example` only pads.
        tokens, num_truncated = encode_texts(
            [example.texts for example in examples],
            tokenizer,
            template,
            [example.location for example in examples],
        )
        limit = f"data.length {self.length}"
        notes = too_long(num_truncated, len(examples), "example", limit, consequence="truncated")
        if empty := sum(not "".join(example.texts).strip() for example in examples):
            notes = (*notes, f"{empty:,} of them without a text")
        values = label_values(examples, labels, self.target)
        texts = tuple(example.texts for example in examples)
        return SequenceClassificationExamples(tokens, values, texts, labels, self.target, notes)


@dataclass(frozen=True, eq=False)
class SequenceClassificationExamples(LabelledExamples):
    """One sequence for each of n examples; see ``dataset.ExampleSource``.

    Attributes:
      tokens: The texts as tokens with special tokens.
      values: int32 [n] label ids, float32 [n, L] of 0 and 1 (multi_label; binary with L = 1) or
        float32 [n] (regression); None if unknown (prediction).
      texts: The one or two texts of each example, for predictions.
      labels: The names of the L labels.
      target: The type of the labels.
      notes: Remarks for the log.
    """

    tokens: BertInputs
    values: np.ndarray | None
    texts: tuple[tuple[str, ...], ...]
    labels: tuple[str, ...]
    target: Target
    notes: tuple[str, ...] = ()

    def example(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Makes one example; the same in every epoch.

        Returns:
          ``input_ids``, ``attention_mask``, ``token_type_ids`` int32 [T]; ``labels`` int32
          [], float32 [L] (multi_label, binary) or float32 [] (regression), if known.
        """
        row = self.tokens.example(index)
        if self.values is not None:
            row["labels"] = np.asarray(self.values[index])
        return row

    def gold(self) -> list[object]:
        """Returns label ids, lists of 0 and 1 (multi_label), or numbers (regression)."""
        if self.values is None:
            raise UserError("examples to predict have no labels")
        return self.values.tolist()

    def decode(self, predictions: dict[str, np.ndarray]) -> list[Prediction]:
        """Converts logits to label names and their probabilities.

        Args:
          predictions: ``logits`` float [n, L].

        Returns:
          For each example ``{"text": …, "label": name, "probabilities": {name: p}}``, with
          ``text_b`` if there is a second text. multi_label: ``"labels": [names]`` with all
          labels whose probability is above 0.5. regression: ``{"text": …, "score": number}``.
          binary: the label is the name, or ``not`` and the name.
        """
        logits = output(predictions, "logits", len(self.tokens))  # [n, L]
        given = [dict(zip(("text", "text_b"), texts, strict=False)) for texts in self.texts]
        if self.target == "regression":
            scores = logits[:, 0].tolist()
            return [{**g, "score": score} for g, score in zip(given, scores, strict=True)]
        # Single labels compete; other labels are independent.
        table = softmax(logits) if self.target == "single_label" else sigmoid(logits)
        decoded = []
        for texts, row in zip(given, table, strict=True):
            named = dict(zip(self.labels, row.tolist(), strict=True))
            if self.target == "single_label":
                found = {"label": self.labels[int(row.argmax())]}
            elif self.target == "binary":
                found = {"label": self.labels[0] if row[0] > 0.5 else f"not {self.labels[0]}"}
            else:
                found = {"labels": [name for name, p in named.items() if p > 0.5]}
            decoded.append({**texts, **found, "probabilities": named})
        return decoded


def _check_first_lines(
    records: Sequence[Record], examples: Sequence[ClassificationExample]
) -> None:
    """Rejects a first line that is probably a header and not an example.

    Its label is a word that no other line has, while every other label occurs at least twice, and
    its texts are single words.

    Raises:
      DataError: A first line is probably a header.
    """
    # Count the labels of all lines except first lines.
    counts = Counter(str(e.label) for r, e in zip(records, examples, strict=True) if not r.first)
    if not counts or min(counts.values()) < 2:
        return
    for record, example in zip(records, examples, strict=True):
        label, words = str(example.label), [text.strip() for text in example.texts]
        if record.first and label not in counts and all(map(str.isidentifier, [label, *words])):
            raise DataError(
                f"{record.location} seems to have the names of columns, for no other line has the "
                f"label {label!r}: name the columns after a #, as #{','.join([label, *words])}, or "
                "move the line down if it is an example"
            )


def _example(
    texts: Sequence[object], label: Label | None, location: str, part: str | None = None
) -> ClassificationExample:
    strings = []
    for text in texts:
        if not isinstance(text, str):
            raise DataError(
                f"{location} has a {type(text).__name__} where its text should be: give a string; "
                "the name of a source has the label first and then the text, as #LABEL,TEXT"
            )
        strings.append(text)
    second = strings[1] if len(strings) == 2 else None
    return ClassificationExample(strings[0], second, label, location, part)


def label_values(
    examples: Sequence[ClassificationExample], labels: tuple[str, ...], target: Target
) -> np.ndarray | None:
    """Converts labels to numbers.

    Returns:
      See ``SequenceClassificationExamples.values``.

    Raises:
      DataError: The training data do not have a label (the message names file and line).
    """
    if all(example.label is None for example in examples):
        return None
    if target == "regression":
        return np.array([example.label for example in examples], np.float32)
    ids = {name: i for i, name in enumerate(labels)}
    if target == "single_label":
        return np.array([label_id(str(e.label), ids, e.location) for e in examples], np.int32)
    if target == "binary":
        return np.array([[str(e.label) == labels[0]] for e in examples], np.float32)
    # One row of 0 and 1 for each example.
    values = np.zeros((len(examples), len(labels)), np.float32)
    for row, example in zip(values, examples, strict=True):
        row[[label_id(name, ids, example.location) for name in _names(example.label)]] = 1
    return values


def _label(value: Any, target: Target, names: tuple[str, ...] | None, location: str) -> Label:
    """Converts a label from the form in its file."""
    if target == "regression":
        return _score(value, location)
    if target == "multi_label":
        # Accept a comma-separated text, a list, or a single label.
        several = value.split(",") if isinstance(value, str) else value
        several = several if isinstance(several, list) else [several]
        return tuple(_name(one, names, location) for one in several if str(one).strip())
    name = _name(value, names, location)
    if not name:
        raise DataError(f"{location} has no label: its column is empty")
    return name


def _name(value: Any, names: tuple[str, ...] | None, location: str) -> str:
    if names is None:
        if isinstance(value, float):
            raise DataError(
                f"{location} has the label {value!r}: a label is a word or a whole number; for "
                "other numbers choose target regression"
            )
        if isinstance(value, list | dict) or value is None:
            raise DataError(f"{location} has the label {value!r}: a label is a word or a number")
        return str(value).lower() if isinstance(value, bool) else str(value).strip()
    # Published test splits have the id -1 in place of a label.
    if not 0 <= value < len(names):
        raise DataError(f"{location} has no label ({value}): choose a data set with labels")
    return names[value]


def _score(value: Any, location: str) -> float:
    try:
        score = float(value)
    except (TypeError, ValueError):
        score = math.nan
    if not math.isfinite(score):
        raise DataError(
            f"{location} has the score {value!r}: with target regression it must be a number"
        )
    return score


def _names(label: Label | None) -> tuple[str, ...]:
    return label if isinstance(label, tuple) else (str(label),)
