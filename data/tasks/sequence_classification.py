"""Prepares data for sequence classification: texts, or pairs of texts, with a label (GLUE).

As in Devlin et al. 2018, section 4.1, a sequence contains one or two texts with the special tokens
of the tokenizer's frame. It is classified at the token that the model pools (``[CLS]`` in BERT). If
a pair is too long, the longer text is truncated first.

The arrays of a batch are ``input_ids``, ``attention_mask``, ``token_type_ids``, int32 [B, T], and
``labels``, which are int32 [B] (single_label), float32 [B, L] (multi_label; binary with L = 1) or
float32 [B] (regression).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from ..common.errors import DataError
from ..common.fields import require
from ..dataset import BatchSpec
from ..features.bert_inputs import token_specs
from ..features.predictions import Prediction, output
from ..sources.hash_split import Split
from ..sources.in_memory import Examples
from ..sources.labelled_names import Record, forms_of_rows, parse_labelled
from ..sources.labelled_records import read_fields
from ..tokenizers.base import Tokenizer
from .base import SourceField, Target
from .labelled import LabelledLength
from .labelled_examples import ExampleSet, LabelledExamples, encoded_texts
from .labels.given_labels import NamedLabelData
from .labels.label_targets import TARGETS, Label, LabelTarget, in_order, names_of
from .texts_to_predict import IMPORTED, TextReader, are_pair

# If a source has more examples than this and most labels occur only once, the user probably named
# the wrong column.
_FEW = 20


@dataclass(frozen=True)
class ClassificationExample:
    """A text, or a pair of texts, with its label.

    Attributes:
      text: The text, or the first of two texts.
      text_b: The second text, or None if there is only one.
      label: The label, or None if unknown (in prediction).
      location: The location of the example, for messages, such as `train.tsv line 7`.
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
class SequenceClassificationData(NamedLabelData[ClassificationExample]):
    """Texts, or pairs of texts, each with a label."""

    kind: ClassVar[str] = "sequence_classification"
    forms: ClassVar[dict[str, str]] = {
        "tsv": "1,2",
        "csv": "1,2",
        **forms_of_rows("label,text"),
        "builtin": "label,text",
        "corpora": "label,text",
        "memory": "label,text,text_b?",
    }
    field_names: ClassVar[str] = "label,text[,text_b]"
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
    parquet:GLOB#label,text, tfds:glue/NAME, hf:NAME/CONFIG, builtin:reviews, or the documents of
    several sources: corpora:good=SOURCE | crawl=SOURCE."""
    length: LabelledLength = 128
    """The number of tokens in a sequence, T."""
    target: Target = "single_label"
    """single_label: each example has one label, and a softmax gives the probabilities; binary: each
    example has one of two labels, and a sigmoid gives the probability of the label that is second
    in order; multi_label: each example has any number of labels, separated by commas; regression:
    each example has a number.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        problem = "data.label_names requires labels, got target regression: leave it out"
        require(self.target != "regression" or not self.label_names, problem, error=DataError)

    @property
    def has_several_labels(self) -> bool:
        """See ``NamedLabelData``."""
        return self.target == "multi_label"

    def labelled(
        self, records: Sequence[Record], names: tuple[str, ...] | None, split: Split
    ) -> ExampleSet[ClassificationExample]:
        """See ``LabelledData``; the fields are the label, the text and an optional second text."""
        examples = []
        for record in records:
            value, *texts = record.values
            try:
                label = self._labels.read(value, names, record.location)
            except DataError as error:
                # An invalid label in the first line of a table is often a column name.
                hint = (
                    "; if the line names the columns, name your columns after a #, as #label,text"
                )
                raise DataError(f"{error}{hint}") if record.first else error from None
            examples.append(_example(texts, label, record.location, record.part))
        if self._labels.num_labels[0] > 1:
            _check_first_lines(records, examples)
        return ExampleSet(tuple(examples), names)

    @property
    def _labels(self) -> LabelTarget:
        return TARGETS[self.target]

    def labels_in(self, example: ClassificationExample) -> tuple[str, ...]:
        """See ``LabelledData``; in regression, labels are scores, which are not counted."""
        return names_of(example.label)

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
        """Reads a source; if two fields have usual names of texts, neither of them is the label."""
        source, reader = parse_labelled(name, self.forms), self._reader(unread)
        if source.kind not in ("tsv", "csv", "jsonl"):
            return super().examples_of_source(name, unread)
        # If the user named no fields, the names in the source decide which fields are texts.
        given = source.fields
        if not source.named and (records := reader.of_source(source)) is not None:
            return self.unlabelled(records)
        if not reader.imported and not are_pair(given):
            return super().examples_of_source(name, unread)
        # An imported model reads one or two texts, so two fields with unknown names could be two
        # texts, or a label and a text.
        labels = self.columns.fields["label"]
        unclear = reader.imported and len(given) == 2 and not are_pair(given)
        require(
            not unclear or given[0] in labels,
            f"{name!r}: {given[0]!r} may be the label or a first text: name one text, as "
            f"#{given[-1]}, or the label and both texts, or leave the # out, so that the names of "
            "the columns decide",
            error=DataError,
        )
        # Otherwise the first field is the label, unless the fields are a single text or a pair.
        texts = given if len(given) == 1 or are_pair(given) else self.without_label(given)
        reader.check_number(len(texts), repr(name), "name the label and these")
        roles = self.columns.without(self.label_field)
        return self.unlabelled(read_fields(replace(source, fields=texts), roles))

    def _reader(self, unread: set[str]) -> TextReader:
        fields = self.without_label(self.fields)
        return TextReader(fields, self.source_name == IMPORTED, unread)

    def labels(self) -> tuple[str, ...]:
        """Returns the labels of the source, including labels that only held-out examples have.

        The labels of a published data set keep its order. Otherwise, whole numbers are ordered by
        value, and other labels by name. For regression, the only label is ``score``. For a binary
        target, only the second of two labels is returned; the other label is its negation.

        Raises:
          DataError: All examples have the same label, or most labels occur only once; or a binary
            target has more than two labels.
        """
        if self.target == "regression":
            return self._labels.assumed
        # Collect the labels of all examples, including labels that only held-out examples have.
        loaded, (fewest, most) = self._whole(), self._labels.num_labels
        ordered = in_order(self._counts(loaded.examples))
        labels, number = loaded.class_names or tuple(ordered), len(loaded.examples)
        require(
            fewest <= len(labels) <= most,
            f"the examples of {self.source_name!r} must have {fewest} labels"
            f"{'' if fewest == most else ' or more'} with target {self.target}, got "
            f"{', '.join(labels[:5]) or 'none'}: name the column of the labels, as #LABEL,TEXT, or "
            "choose another target",
            error=DataError,
        )
        # Labels should repeat; otherwise the column probably contains ids, texts or scores.
        require(
            number <= _FEW or 2 * len(labels) <= number or loaded.class_names is not None,
            f"{number:,} examples of {self.source_name!r} have {len(labels):,} different labels, "
            f"such as {labels[0][:40]!r}: name the column of the labels, as #LABEL,TEXT, or choose "
            "target regression for numbers",
            error=DataError,
        )
        # A binary target has one output, for the second label.
        return labels[1:] if self.target == "binary" else labels

    @property
    def label_target(self) -> Target:
        """See ``DataConfig``."""
        return self.target

    @property
    def classifies_single_texts(self) -> bool:
        """See ``DataConfig``; a source of single texts has two fields, the label and the text."""
        return self.target != "regression" and len(self.fields) == 2

    def of_imported_model(self, target: Target, max_length: int) -> "SequenceClassificationData":
        """See ``DataConfig``; an imported model reads one or two texts."""
        data = super().of_imported_model(target, max_length)
        return replace(data, target=target, source=IMPORTED, validation=None)

    def assumed_labels(self) -> tuple[str, ...]:
        """See ``DataConfig``; assumes one label for regression and binary targets, else two."""
        return self._labels.assumed

    def batch_spec(self, num_labels: int, num_choices: int) -> BatchSpec:
        """See ``DataConfig`` and the module docstring."""
        return {**token_specs(self.length), "labels": self._labels.spec(num_labels)}

    def encode(
        self,
        examples: Sequence[ClassificationExample],
        tokenizer: Tokenizer,
        labels: tuple[str, ...],
        *,
        training: bool = False,
    ) -> "SequenceClassificationExamples":
        """See ``LabelledData``; the arrays are the same for training and evaluation."""
        # Tokenize only once for all epochs, so that `example` only has to add padding.
        tokens, notes = encoded_texts(
            [example.texts for example in examples],
            [example.location for example in examples],
            tokenizer,
            length=self.length,
            noun="example",
        )
        if empty := sum(not "".join(example.texts).strip() for example in examples):
            notes = (*notes, f"{empty:,} of them without a text")
        # If a label is unknown, the message states the location of the example.
        located = [(e.label, e.location) for e in examples]
        # In prediction, no example has a label.
        known = examples[0].label is not None
        return SequenceClassificationExamples(
            tokens=tokens,
            examples=tuple(examples),
            values=self._labels.encode(located, labels) if known else None,
            labels=labels,
            target=self.target,
            notes=notes,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class SequenceClassificationExamples(LabelledExamples[ClassificationExample]):
    """n examples with one sequence each; see ``dataset.ExampleSource``.

    The values are label ids, int32 [n]; or 0 and 1, float32 [n, L] (multi_label; binary with
    L = 1); or numbers, float32 [n] (regression).

    Attributes:
      labels: The names of the L labels.
      target: The type of the labels.
    """

    labels: tuple[str, ...]
    target: Target

    def decode(self, predictions: dict[str, np.ndarray]) -> list[Prediction]:
        """Converts logits to label names and their probabilities.

        Args:
          predictions: ``logits``, float [n, L].

        Returns:
          For each example, ``{"text": …, "label": name, "probabilities": {name: p}}``, with
          ``text_b`` if there is a second text. For multi_label, ``"labels": [names]`` replaces the
          label and contains all labels whose probability is above 0.5. For regression, the result
          is ``{"text": …, "score": number}``. For binary, the label is the name, or ``not`` and the
          name.
        """
        logits = output(predictions, "logits", len(self.tokens))  # [n, L]
        predicted = TARGETS[self.target].decode(logits, self.labels)
        return [
            {**dict(zip(("text", "text_b"), example.texts, strict=False)), **prediction}
            for example, prediction in zip(self.examples, predicted, strict=True)
        ]


def _check_first_lines(
    records: Sequence[Record], examples: Sequence[ClassificationExample]
) -> None:
    """Rejects a first line that is probably a header and not an example.

    A first line is probably a header if its label is a word that is not the label of any other
    line, its texts are single words, and every other label occurs at least twice.

    Raises:
      DataError: A first line is probably a header.
    """
    # Count the labels of all lines except the first line of each file.
    counts = Counter(str(e.label) for r, e in zip(records, examples, strict=True) if not r.first)
    if min(counts.values(), default=0) < 2:
        return
    for record, example in zip(records, examples, strict=True):
        label, words = str(example.label), [text.strip() for text in example.texts]
        if record.first and label not in counts and all(map(str.isidentifier, [label, *words])):
            raise DataError(
                f"{record.location} seems to contain column names, because no other line "
                f"has the label {label!r}: name the columns after a #, as "
                f"#{','.join([label, *words])}, or, if the line is an example, move it down"
            )


def _example(
    texts: Sequence[Any], label: Label | None, location: str, part: str | None = None
) -> ClassificationExample:
    for text in texts:
        if not isinstance(text, str):
            raise DataError(
                f"{location} has a {type(text).__name__} instead of a text: give a string; the "
                "name of a source has the label first and then the text, as #LABEL,TEXT"
            )
    second = next(iter(texts[1:]), None)
    return ClassificationExample(texts[0], second, label, location, part)
