"""Multiple choice: a context, an optional question, and several choices with one correct choice.

Devlin et al. 2018, section 4.4 (SWAG): each choice is a separate sequence, a pair of the context
and the choice with the special tokens of the tokenizer's frame, and the sequences of an example
compete. A question is prepended to each choice (RACE, CosmosQA).

The arrays of a batch are int32: ``input_ids``, ``attention_mask``, ``token_type_ids`` [B, C, T] and
``labels`` [B], the index of the correct choice.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from ..common.errors import DataError, UserError
from ..common.files import input_lines
from ..dataset import ArraySpec, BatchSpec, Values, too_long
from ..features.bert_inputs import BertInputs, Template, encode_texts, token_specs
from ..features.predictions import Prediction, output, softmax
from ..sources.hash_split import Split
from ..sources.labelled_names import LabelledSource, Record
from ..sources.labelled_records import read_objects
from ..sources.tables import CHOICES, ColumnRoles
from ..sources.tfds_records import PublishedRecords
from ..tokenizers.base import Tokenizer
from .base import SourceField
from .labelled import ExampleSet, LabelledData, LabelledExamples, LabelledLength


@dataclass(frozen=True)
class ChoiceExample:
    """A context with choices.

    Attributes:
      context: The text before the choices.
      question: The question, or None.
      choices: The choices, at least two.
      label: The index of the correct choice, or None if unknown (prediction).
      location: The location of the example, for messages: `train.tsv line 7`.
    """

    context: str
    question: str | None
    choices: tuple[str, ...]
    label: int | None
    location: str = field(repr=False)

    @property
    def texts(self) -> tuple[str, ...]:
        """The context, the question if present, and the choices."""
        question = () if self.question is None else (self.question,)
        return (self.context, *question, *self.choices)

    @property
    def group(self) -> str:
        """See ``Example``; all questions about a context are in the same split."""
        return self.context

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The two texts of each choice's sequence."""
        before = "" if self.question is None else f"{self.question} "
        return [(self.context, before + choice) for choice in self.choices]


@dataclass(frozen=True, kw_only=True)
class MultipleChoiceData(LabelledData[ChoiceExample]):
    """Contexts with several choices each and one correct choice."""

    kind: ClassVar[str] = "multiple_choice"
    forms: ClassVar[dict[str, str]] = {
        "jsonl": "label,context,choices",
        "tsv": "1,2,3+4",
        "csv": "1,2,3+4",
        "tfds": "label,context,choices",
        "memory": "label,context,question?,choices",
    }
    columns: ClassVar[ColumnRoles] = CHOICES
    published_fields: ClassVar[dict[str, str]] = {
        "hellaswag": "label,context,endings",
        "piqa": "label,goal,sol1+sol2",
        "cosmos_qa": "label,context,question,answer0+answer1+answer2+answer3",
        "winogrande": "label,sentence,option1+option2",
    }

    source: SourceField
    """jsonl:GLOB#label,context[,question],choices (or choice1+choice2), or tfds:hellaswag."""
    length: LabelledLength = 128
    """Tokens in the sequence of a choice, T."""

    def read(
        self, source: LabelledSource, published: PublishedRecords | None, split: Split
    ) -> ExampleSet[ChoiceExample]:
        """See ``LabelledData``; the fields are label, context, an optional question, choices."""
        # The question is optional; choices may be one list or fields joined by a plus sign.
        if not 3 <= len(source.fields) <= 4:
            raise DataError(
                f"{source.name!r} names {len(source.fields)} fields: name the label, the context, "
                "perhaps a question, and the choices, as #label,context,choice1+choice2"
            )
        records, lines = self.read_records(source, published, split)
        examples = [_from_record(record, labelled=True) for record in records]
        return ExampleSet(_equally_many(examples), lines=lines)

    def label_names(self, example: ChoiceExample) -> tuple[str, ...]:
        """See ``LabelledData``."""
        return () if example.label is None else (str(example.label),)

    def unlabelled(self, records: Iterable[Record]) -> list[ChoiceExample]:
        """See ``LabelledData``."""
        examples = [_from_record(Record(r.location, (None, *r.values))) for r in records]
        return list(_equally_many(examples))

    def examples_to_predict(self, path: str, unread: set[str]) -> list[ChoiceExample]:
        """Reads JSON lines with the fields of the source except the label.

        If the source has numbered columns, the lines are ``{"context": …, "choices": [...]}``, with
        ``"question"`` if the source has questions.
        """
        question = ("question",) if len(self.fields) == 4 else ()
        fields = self.fields_to_predict(("context", *question, "choices"))
        return self.unlabelled(read_objects(input_lines(path), fields, unread=unread))

    def batch_spec(self, num_labels: int, num_choices: int) -> BatchSpec:
        """See ``DataConfig`` and ``MultipleChoiceExamples.example``."""
        label = ArraySpec((), Values.LABEL, num_classes=num_choices)
        return {**token_specs(num_choices, self.length), "labels": label}

    def encode(
        self,
        examples: Sequence[ChoiceExample],
        tokenizer: Tokenizer,
        labels: tuple[str, ...],
        *,
        training: bool = False,
    ) -> "MultipleChoiceExamples":
        """See ``LabelledData``; the arrays are the same for training and evaluation."""
        template = Template.of(tokenizer, self.length)
        # Flatten the choices of all examples; all have the same number of choices.
        pairs = [(pair, example.location) for example in examples for pair in example.pairs]
        texts, locations = zip(*pairs, strict=True)
        tokens, num_truncated = encode_texts(texts, tokenizer, template, locations)
        number = len(examples[0].choices)
        limit = f"data.length {self.length}"
        cut = too_long(num_truncated, len(pairs), "choice", limit, consequence="truncated")
        notes = (f"{number} choices each", *cut)
        correct = [example.label for example in examples]
        # Examples for prediction have no labels at all.
        values = None if None in correct else np.array(correct, np.int32)
        return MultipleChoiceExamples(tokens, values, tuple(examples), number, notes)


@dataclass(frozen=True, eq=False)
class MultipleChoiceExamples(LabelledExamples):
    """C sequences for each of n examples; see ``dataset.ExampleSource``.

    Attributes:
      tokens: The n * C sequences with special tokens, grouped by example.
      values: The index of the correct choice, int32 [n], or None if unknown (prediction).
      examples: The examples, for predictions.
      number: The number of choices of each example, C.
      notes: Remarks for the log.
    """

    tokens: BertInputs
    values: np.ndarray | None
    examples: tuple[ChoiceExample, ...]
    number: int
    notes: tuple[str, ...] = ()

    @property
    def num_examples(self) -> int:
        """The number of examples."""
        return len(self.tokens) // self.number

    def example(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Makes one example; the same in every epoch.

        Returns:
          ``input_ids``, ``attention_mask``, ``token_type_ids`` int32 [C, T] and, if known,
          ``labels`` int32 [].
        """
        # The sequences of an example are consecutive.
        rows = [self.tokens.example(index * self.number + choice) for choice in range(self.number)]
        row = {name: np.stack([one[name] for one in rows]) for name in rows[0]}
        if self.values is not None:
            row["labels"] = np.asarray(self.values[index])
        return row

    def gold(self) -> list[int]:
        """Returns the index of the correct choice of each example."""
        if self.values is None:
            raise UserError("examples to predict have no labels")
        return self.values.tolist()

    def decode(self, predictions: dict[str, np.ndarray]) -> list[Prediction]:
        """Chooses the most probable choice of each example.

        Args:
          predictions: ``logits`` float [n, C].

        Returns:
          For each example ``{"context": …, "choice": index, "text": the choice,
          "probabilities": [...]}``, with ``question`` if it has one.
        """
        # The choices of an example compete, so their probabilities sum to one.
        table = softmax(output(predictions, "logits", self.num_examples))  # [n, C]
        decoded = []
        for example, row in zip(self.examples, table, strict=True):
            question = {} if example.question is None else {"question": example.question}
            index = int(row.argmax())
            chosen = {"choice": index, "text": example.choices[index]}
            decoded.append(
                {"context": example.context, **question, **chosen, "probabilities": row.tolist()}
            )
        return decoded


def _from_record(record: Record, *, labelled: bool = False) -> ChoiceExample:
    label, context, *question, choices = record.values
    texts = (context, *question, *(choices if isinstance(choices, list) else ()))
    if not isinstance(choices, list) or not all(isinstance(text, str) for text in texts):
        raise DataError(
            f"{record.location} is not a context with a list of choices, all of them texts: name "
            "the fields as #label,context,choices or #label,context,choice1+choice2"
        )
    if len(choices) < 2:
        raise DataError(f"{record.location} has {len(choices)} choices: give at least two")
    index = _index(label, len(choices), record.location) if labelled else None
    asked = question[0] if question else None
    return ChoiceExample(context, asked, tuple(choices), index, record.location)


def _index(label: object, number: int, location: str) -> int:
    index = -1
    # Accept a number, or its digits as text.
    if isinstance(label, int) or str(label).isdecimal():
        index = int(label) if isinstance(label, int) else int(str(label))
    if not 0 <= index < number:
        raise DataError(
            f"{location} has the label {label!r}: with {number} choices it must be from 0 to "
            f"{number - 1}"
        )
    return index


def _equally_many(examples: Sequence[ChoiceExample]) -> tuple[ChoiceExample, ...]:
    # A batch is an array [B, C, T], so C must be the same for all examples.
    for example in examples:
        if len(example.choices) != len(examples[0].choices):
            raise DataError(
                f"{example.location} has {len(example.choices)} choices where "
                f"{examples[0].location} has {len(examples[0].choices)}: give every example "
                "as many"
            )
    return tuple(examples)
