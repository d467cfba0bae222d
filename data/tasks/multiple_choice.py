"""Prepares data for multiple choice: a context, optionally a question, and one correct choice.

As in Devlin et al. 2018, section 4.4 (SWAG), each choice is a separate sequence: a pair of the
context and the choice, with the special tokens of the tokenizer's frame. The sequences of an
example compete. If there is a question, it is prepended to each choice (RACE, CosmosQA).

The arrays of a batch are int32: ``input_ids``, ``attention_mask``, ``token_type_ids`` [B, C, T] and
``labels`` [B], the index of the correct choice.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from ..common.errors import DataError
from ..common.fields import require
from ..common.files import input_lines
from ..dataset import ArraySpec, BatchSpec, Values, stacked
from ..features.bert_inputs import token_specs
from ..features.predictions import Prediction, output, softmax
from ..sources.hash_split import Split
from ..sources.labelled_names import Record, forms_of_rows
from ..sources.labelled_records import read_objects
from ..sources.tables import CHOICES, ColumnRoles
from ..tokenizers.base import Tokenizer
from .base import SourceField
from .labelled import LabelledData, LabelledLength
from .labelled_examples import ExampleSet, LabelledExamples, encoded_texts


@dataclass(frozen=True)
class ChoiceExample:
    """A context with several choices.

    Attributes:
      context: The text before the choices.
      question: The question, or None if there is none.
      choices: The choices, at least two.
      label: The index of the correct choice, or None if unknown (in prediction).
      location: The location of the example, for messages, such as `train.tsv line 7`.
    """

    context: str
    question: str | None
    choices: tuple[str, ...]
    label: int | None
    location: str = field(repr=False)

    @property
    def texts(self) -> tuple[str, ...]:
        """The context, the question if there is one, and the choices."""
        question = () if self.question is None else (self.question,)
        return (self.context, *question, *self.choices)

    @property
    def group(self) -> str:
        """See ``Example``; all examples with the same context are in the same split."""
        return self.context

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The two texts that form the sequence of each choice."""
        before = "" if self.question is None else f"{self.question} "
        return [(self.context, before + choice) for choice in self.choices]


@dataclass(frozen=True, kw_only=True)
class MultipleChoiceData(LabelledData[ChoiceExample]):
    """Contexts with several choices. Exactly one choice of each context is correct."""

    kind: ClassVar[str] = "multiple_choice"
    forms: ClassVar[dict[str, str]] = {
        **forms_of_rows("label,context,choices"),
        "tsv": "1,2,3+4",
        "csv": "1,2,3+4",
        "memory": "label,context,question?,choices",
    }
    field_names: ClassVar[str] = "label,context[,question],choices"
    columns: ClassVar[ColumnRoles] = CHOICES
    published_fields: ClassVar[dict[str, str]] = {
        "hellaswag": "label,context,endings",
        "piqa": "label,goal,sol1+sol2",
        "cosmos_qa": "label,context,question,answer0+answer1+answer2+answer3",
        "winogrande": "label,sentence,option1+option2",
    }

    source: SourceField
    """jsonl:GLOB#label,context[,question],choices (or choice1+choice2),
    parquet:GLOB, tfds:hellaswag or hf:NAME."""
    length: LabelledLength = 128
    """The number of tokens in the sequence of a choice, T."""

    def labelled(
        self, records: Sequence[Record], names: tuple[str, ...] | None, split: Split
    ) -> ExampleSet[ChoiceExample]:
        """See ``LabelledData``; choices are one list, or several fields joined with plus signs."""
        return ExampleSet(_equally_many(list(map(_from_record, records))))

    def labels_in(self, example: ChoiceExample) -> tuple[str, ...]:
        """See ``LabelledData``."""
        return () if example.label is None else (str(example.label),)

    def unlabelled(self, records: Iterable[Record]) -> list[ChoiceExample]:
        """See ``LabelledData``."""
        unknown = [_from_record(Record(r.location, (None, *r.values)), False) for r in records]
        return list(_equally_many(unknown))

    def examples_to_predict(self, path: str, unread: set[str]) -> list[ChoiceExample]:
        """Reads JSON lines that have all fields of the source except the label.

        If the fields of the source are column numbers, the lines must have the form
        ``{"context": …, "choices": [...]}``, with a ``"question"`` if the source has questions.
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
        # Put the choices of all examples into one list. Each example has the same number of them.
        pairs = [(pair, example.location) for example in examples for pair in example.pairs]
        texts, locations = zip(*pairs, strict=True)
        tokens, cut = encoded_texts(texts, locations, tokenizer, length=self.length, noun="choice")
        correct = [example.label for example in examples]
        return MultipleChoiceExamples(
            tokens=tokens,
            examples=tuple(examples),
            # In prediction, no example has a label.
            values=None if None in correct else np.array(correct, np.int32),
            notes=(f"{len(examples[0].choices)} choices each", *cut),
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class MultipleChoiceExamples(LabelledExamples[ChoiceExample]):
    """n examples with C sequences each; see ``dataset.ExampleSource``.

    The values are the indices of the correct choices, int32 [n]. The sequences of an example are
    consecutive, so each array of an example is int32 [C, T].
    """

    @property
    def num_examples(self) -> int:
        """The number of examples."""
        return len(self.examples)

    def row(self, index: int) -> dict[str, np.ndarray]:
        """Returns the arrays that contain the choices of an example."""
        number = len(self.examples[index].choices)
        rows = [self.tokens.example(index * number + choice) for choice in range(number)]
        return stacked(rows)

    def decode(self, predictions: dict[str, np.ndarray]) -> list[Prediction]:
        """Selects the most probable choice of each example.

        Args:
          predictions: ``logits``, float [n, C].

        Returns:
          For each example, a dictionary with its "context", the index of the selected choice
          ("choice"), the "text" of that choice, the "probabilities" of all choices, and the
          "question" if there is one.
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


def _from_record(record: Record, labelled: bool = True) -> ChoiceExample:
    label, context, *question, choices = record.values
    location = record.location
    # If the choices are not a list, use None, which makes the next check fail.
    texts = (context, *question, *(choices if isinstance(choices, list) else (None,)))
    require(
        all(isinstance(text, str) for text in texts),
        f"{location} is not a context with a list of choices, all of them texts: name the fields "
        "as #label,context,choices or #label,context,choice1+choice2",
        error=DataError,
    )
    number = len(choices)
    require(number > 1, f"{location} has {number} choices: give at least two", error=DataError)
    # Accept an integer, or a text that consists of digits.
    index = int(str(label)) if str(label).isdecimal() else -1
    require(
        not labelled or 0 <= index < number,
        f"{location} has the label {label!r}: with {number} choices it must be from 0 to "
        f"{number - 1}",
        error=DataError,
    )
    shown = next(iter(question), None)
    return ChoiceExample(context, shown, tuple(choices), index if labelled else None, location)


def _equally_many(examples: Sequence[ChoiceExample]) -> tuple[ChoiceExample, ...]:
    # The arrays of a batch are [B, C, T], so C must be the same for all examples.
    for example in examples:
        found, number = len(example.choices), len(examples[0].choices)
        require(
            found == number,
            f"{example.location} has {found} choices, but {examples[0].location} has "
            f"{number}: give every example the same number",
            error=DataError,
        )
    return tuple(examples)
