"""A context, perhaps a question, and several continuations of which one is right.

Devlin et al. 2018, section 4.4 (SWAG): each choice is a row of its own, ``[CLS] context
[SEP] choice [SEP]``, and the rows of an example compete. A question stands before each
choice (RACE, CosmosQA).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from ..dataset import ArraySpec, BatchSpec, Values
from ..errors import DataError, UserError
from ..features.bert_inputs import Frame, FramedTokens, frame_texts, token_specs
from ..features.predictions import output, softmax
from ..io.files import input_lines
from ..sources.documents import Split
from ..sources.labelled_records import LabelledSource, Record, read_fields, read_objects
from ..sources.tfds_records import PublishedRecords
from ..tokenizers.base import Tokenizer
from .labelled import LabelledData, Loaded


@dataclass(frozen=True)
class ChoiceExample:
    """Something to choose.

    Attributes:
        context: What comes before.
        question: What is asked of it, or None.
        choices: At least two.
        label: Which is right, from 0; None if it is to be predicted.
        place: Where it stands, for messages.
    """

    context: str
    question: str | None
    choices: tuple[str, ...]
    label: int | None
    place: str = field(repr=False)

    @property
    def texts(self) -> tuple[str, ...]:
        """All of them."""
        asked = () if self.question is None else (self.question,)
        return (self.context, *asked, *self.choices)

    @property
    def group(self) -> str:
        """All that is asked of a context stays together."""
        return self.context

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The two texts of each row."""
        before = "" if self.question is None else f"{self.question} "
        return [(self.context, before + choice) for choice in self.choices]


@dataclass(frozen=True, kw_only=True)
class ChoiceData(LabelledData[ChoiceExample]):
    """Contexts with several choices each, of which one is right."""

    kind: ClassVar[str] = "choice"
    forms: ClassVar[dict[str, str]] = {
        "jsonl": "label,context,choices",
        "tsv": "1,2,3+4",
        "tfds": "label,context,choices",
    }
    published_fields: ClassVar[dict[str, str]] = {
        "hellaswag": "label,context,endings",
        "piqa": "label,goal,sol1+sol2",
        "cosmos_qa": "label,context,question,answer0+answer1+answer2+answer3",
        "winogrande": "label,sentence,option1+option2",
    }

    source: str
    """jsonl:GLOB#label,context[,question],choices (or choice1+choice2), or tfds:hellaswag."""
    length: int = 128
    """Tokens in the sequence of a choice, T."""

    def read(
        self, source: LabelledSource, published: PublishedRecords | None, split: Split
    ) -> Loaded[ChoiceExample]:
        """See ``LabelledData``; the fields are label, context, perhaps a question, choices."""
        if not 3 <= len(source.fields) <= 4:
            raise DataError(
                f"{source.name!r} names {len(source.fields)} fields: name the label, the context, "
                "perhaps a question, and the choices, as #label,context,choice1+choice2"
            )
        records = published.read(split) if published is not None else read_fields(source)
        examples = [_from_record(record, labelled=True) for record in records]
        return Loaded(_equally_many(examples))

    def unlabelled(self, records: Iterable[Record]) -> list[ChoiceExample]:
        """See ``LabelledData``."""
        examples = [_from_record(Record(r.place, (None, *r.values))) for r in records]
        return list(_equally_many(examples))

    def examples_to_predict(self, path: str) -> list[ChoiceExample]:
        """Reads JSON lines with the source's fields but the label.

        Of a source with numbered columns they are ``{"context": …, "choices": [...]}``, and
        between them ``"question"`` if it has one.
        """
        asked = ("question",) if len(self.fields) == 4 else ()
        fields = self.fields_to_predict(("context", *asked, "choices"))
        return self.unlabelled(read_objects(input_lines(path), fields))

    def batch_spec(self, num_labels: int, num_choices: int) -> BatchSpec:
        """See ``DataConfig``; the arrays are those of ``ChoiceRows.row``."""
        label = ArraySpec((), Values.LABEL, num_classes=num_choices)
        return {**token_specs(num_choices, self.length), "labels": label}

    def rows(
        self,
        examples: Sequence[ChoiceExample],
        tokenizer: Tokenizer,
        labels: tuple[str, ...],
        *,
        training: bool = False,
    ) -> "ChoiceRows":
        """See ``LabelledData``; training and evaluation have the same rows."""
        frame = Frame.of(tokenizer, self.length)
        pairs = [pair for example in examples for pair in example.pairs]
        tokens, cut = frame_texts(pairs, tokenizer, frame)
        number = len(examples[0].choices)
        notes = [f"{number} choices each"]
        if cut:
            notes.append(f"{cut:,} choices cut to {self.length} tokens")
        right = [example.label for example in examples]
        values = None if None in right else np.array(right, np.int32)
        return ChoiceRows(tokens, values, tuple(examples), number, tuple(notes))


@dataclass(frozen=True, eq=False)
class ChoiceRows:
    """A row of C choices for each example; see ``pipeline.Rows``.

    Attributes:
        tokens: The framed choices, those of an example one after the other.
        values: Which is right, int32 [n]; None if it is to be predicted.
        examples: The examples, for predictions.
        number: The choices of each example, C.
        notes: For the log.
    """

    tokens: FramedTokens
    values: np.ndarray | None
    examples: tuple[ChoiceExample, ...]
    number: int
    notes: tuple[str, ...] = ()

    @property
    def rows_per_epoch(self) -> int:
        """The number of examples."""
        return len(self.tokens) // self.number

    def row(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Makes one example; the same in every epoch.

        Returns:
            ``input_ids``, ``attention_mask``, ``token_type_ids`` int32 [C, T] and, unless it
            is unknown, ``labels`` int32 [].
        """
        rows = [self.tokens.row(index * self.number + choice) for choice in range(self.number)]
        row = {name: np.stack([one[name] for one in rows]) for name in rows[0]}
        if self.values is not None:
            row["labels"] = np.asarray(self.values[index])
        return row

    def gold(self) -> list[int]:
        """Which choice is right, from 0."""
        if self.values is None:
            raise UserError("examples to predict have no labels")
        return self.values.tolist()

    def decode(self, predictions: dict[str, np.ndarray]) -> list[dict[str, Any]]:
        """Chooses.

        Args:
            predictions: ``logits`` float [n, C].

        Returns:
            For each example ``{"context": …, "choice": index, "text": the choice,
            "probabilities": [...]}``, with ``question`` if it has one.
        """
        table = softmax(output(predictions, "logits", self.rows_per_epoch))
        decoded = []
        for example, row in zip(self.examples, table, strict=True):
            asked = {} if example.question is None else {"question": example.question}
            index = int(row.argmax())
            chosen = {"choice": index, "text": example.choices[index]}
            decoded.append(
                {"context": example.context, **asked, **chosen, "probabilities": row.tolist()}
            )
        return decoded


def _from_record(record: Record, *, labelled: bool = False) -> ChoiceExample:
    label, context, *question, choices = record.values
    texts = (context, *question, *(choices if isinstance(choices, list) else ()))
    if not isinstance(choices, list) or not all(isinstance(text, str) for text in texts):
        raise DataError(
            f"{record.place} is not a context with a list of choices, all of them texts: name the "
            "fields as #label,context,choices or #label,context,choice1+choice2"
        )
    if len(choices) < 2:
        raise DataError(f"{record.place} has {len(choices)} choices: give at least two")
    index = _index(label, len(choices), record.place) if labelled else None
    asked = question[0] if question else None
    return ChoiceExample(context, asked, tuple(choices), index, record.place)


def _index(label: Any, number: int, place: str) -> int:
    index = int(label) if isinstance(label, int) or str(label).isdecimal() else -1
    if not 0 <= index < number:
        raise DataError(
            f"{place} has the label {label!r}: with {number} choices it must be from 0 to "
            f"{number - 1}"
        )
    return index


def _equally_many(examples: Sequence[ChoiceExample]) -> tuple[ChoiceExample, ...]:
    for example in examples:
        if len(example.choices) != len(examples[0].choices):
            raise DataError(
                f"{example.place} has {len(example.choices)} choices where {examples[0].place} has "
                f"{len(examples[0].choices)}: give every example equally many"
            )
    return tuple(examples)
