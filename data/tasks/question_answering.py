"""Questions whose answer is a span of a passage.

Devlin et al. 2018, section 4.2 and 4.3: ``[CLS] question [SEP] passage [SEP]``; a start and
an end are predicted, and no answer at ``[CLS]``. Long passages are read through windows.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np

from ..dataset import ArraySpec, BatchSpec, Values
from ..errors import DataError, UserError
from ..features.answer_decoding import SpanDecoding
from ..features.bert_inputs import BertInputs, Template, token_specs
from ..features.sliding_windows import windows
from ..io.files import input_lines
from ..sources.documents import Split
from ..sources.labelled_records import LabelledSource, Record, parse_labelled
from ..sources.squad import (
    SpanExample,
    from_record,
    in_groups,
    questions_to_predict,
    read_questions,
    unanswered,
)
from ..sources.tfds_records import PublishedRecords
from ..tokenizers.base import Tokenizer
from .labelled import ExampleSet, LabelledData

NO_ANSWER = "no answer"
"""The one label there may be: that the training data have questions without an answer."""
_UNSURE = "no answer whose place is sure"
_PARTED = "an answer that is whole in no window"
_NAMED_IN_FACTS = 3


@dataclass(frozen=True, kw_only=True)
class QuestionAnsweringData(LabelledData[SpanExample]):
    """Questions whose answer is a span of a passage."""

    kind: ClassVar[str] = "question_answering"
    former_kind: ClassVar[str] = "span"
    forms: ClassVar[dict[str, str]] = {"squad": "", "tfds": "context,question,answers,id"}
    label_field: ClassVar[int] = 2
    noun: ClassVar[str] = "questions"

    source: str
    """squad:GLOB or tfds:squad/v1.1."""
    length: int = 384
    """Tokens in a sequence, T."""
    stride: int = 128
    """Tokens between the starts of two windows of a passage; at most half a window."""
    max_question_length: int = 64
    """Longest question, in tokens; longer ones are truncated. At most half of a sequence."""
    max_answer_length: int = 30
    """Longest predicted answer, in tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("stride", "max_question_length", "max_answer_length"):
            if getattr(self, name) < 1:
                raise UserError(f"data.{name} {getattr(self, name)} must be at least 1")

    def read(
        self, source: LabelledSource, published: PublishedRecords | None, split: Split
    ) -> ExampleSet[SpanExample]:
        """See ``LabelledData``; the fields are passage, question, answers and perhaps an id."""
        if published is None:
            examples = in_groups(list(read_questions(source)))
        else:
            if not 3 <= len(source.fields) <= 4:
                raise DataError(f"{source.name!r} must name #context,question,answers[,id]")
            examples = in_groups([from_record(record) for record in published.read(split)])
        _check_ids(examples)
        if examples and not any(example.answers for example in examples):
            raise DataError(f"no question of {source.name!r} has an answer: give a labelled source")
        wrong = [example for example in examples for _ in _misplaced(example)]
        note = f"{len(wrong):,} answers are not where they should be ({_named(wrong)})"
        return ExampleSet(examples, notes=(note,) if wrong else ())

    def unlabelled(self, records: Iterable[Record]) -> list[SpanExample]:
        """See ``LabelledData``."""
        return [unanswered(record) for record in records]

    def examples_of_source(self, name: str) -> list[SpanExample]:
        """See ``LabelledData``."""
        source = parse_labelled(name, self.forms)
        if source.kind == "squad":
            examples = list(read_questions(source, labelled=False))
        else:
            examples = super().examples_of_source(name)
        _check_ids(examples)
        return examples

    def examples_to_predict(self, path: str) -> list[SpanExample]:
        """Reads SQuAD's JSON, or JSON lines ``{"question": …, "context": …}``."""
        examples = tuple(questions_to_predict(input_lines(path)))
        _check_ids(examples)
        return list(examples)

    def labels(self) -> tuple[str, ...]:
        """``no answer`` if some questions have none; then a model may say so."""
        some = any(example.answers == () for example in self._whole().examples)
        return (NO_ANSWER,) if some else ()

    def batch_spec(self, num_labels: int, num_choices: int) -> BatchSpec:
        """See ``DataConfig``; the arrays are those of ``QuestionAnsweringExamples.row``."""
        position = ArraySpec((), Values.INDEX)
        positions = {"start_positions": position, "end_positions": position}
        return token_specs(self.length) | positions

    def encode(
        self,
        examples: Sequence[SpanExample],
        tokenizer: Tokenizer,
        labels: tuple[str, ...],
        *,
        training: bool = False,
    ) -> "QuestionAnsweringExamples":
        """See ``LabelledData``; one is not trained on questions without a sure answer."""
        return question_examples(examples, tokenizer, self, NO_ANSWER in labels, training)


@dataclass(frozen=True, eq=False)
class QuestionAnsweringExamples:
    """The windows of questions; see ``dataset.ExampleSource``.

    Attributes:
        tokens: The framed windows, R.
        decoding: Which window is whose, and where its tokens are in the passage.
        positions: The tokens of the row that the answer starts and ends at, int32 [R, 2], -1
            where that is not known; None if it is to be predicted.
        examples: The questions.
        left_out: What was not trained on, and why, a line each.
        notes: For the log.
    """

    tokens: BertInputs
    decoding: SpanDecoding
    positions: np.ndarray | None
    examples: tuple[SpanExample, ...]
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def num_examples(self) -> int:
        """The number of windows."""
        return len(self.tokens)

    def example(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Makes one window; the same in every epoch.

        Returns:
            ``input_ids``, ``attention_mask``, ``token_type_ids`` int32 [T] and, unless they
            are unknown, ``start_positions``, ``end_positions`` int32 [].
        """
        row = self.tokens.example(index)
        if self.positions is not None:
            start, end = self.positions[index]
            row["start_positions"], row["end_positions"] = np.asarray(start), np.asarray(end)
        return row

    def gold(self) -> list[dict[str, Any]]:
        """``{"id": …, "answers": [texts]}`` for each question; no texts: no answer."""
        return [
            {"id": example.id, "answers": [answer.text for answer in example.answers or ()]}
            for example in self.examples
        ]

    def decode(self, predictions: dict[str, np.ndarray], n_best: int = 5) -> list[dict[str, Any]]:
        """Cuts the answers out of the passages; see ``SpanDecoding.decode``."""
        return self.decoding.decode(predictions, self.tokens, self.examples, n_best)


@dataclass(frozen=True)
class _Question:
    """A question and the windows to lay over its passage.

    Attributes:
        example: The question as it was read.
        ids: Its tokens.
        passage: The tokens of its passage.
        windows: Half-open ranges of these.
        span: The first and last of these that the answer has; (-1, -1) for no answer, None if
            its place is not known or whole in no window.
        problem: Why one is not trained on it, if so.
    """

    example: SpanExample
    ids: Sequence[int]
    passage: Sequence[int]
    windows: Sequence[tuple[int, int]]
    span: tuple[int, int] | None
    problem: str


def question_examples(
    examples: Sequence[SpanExample],
    tokenizer: Tokenizer,
    config: QuestionAnsweringData,
    unanswerable: bool,
    training: bool,
) -> QuestionAnsweringExamples:
    """Lays windows over passages.

    Args:
        examples: The questions.
        tokenizer: Any.
        config: The lengths.
        unanswerable: Whether "no answer" may be predicted.
        training: Leaves out questions without an answer of which the place is sure, and
            those whose answer is whole in no window: at [CLS] they would teach that there is
            none.

    Raises:
        DataError: No question is left to train on.
    """
    template = Template.of(tokenizer, config.length)
    passages = {
        text: tokenizer.encode_with_offsets(text, add_special_tokens=False)
        for text in dict.fromkeys(example.passage for example in examples)
    }
    longest = min(config.max_question_length, template.room(2) // 2)
    asked = tokenizer.encode_batch([example.question for example in examples])
    questions = [
        _question(
            example, ids[:longest], passages[example.passage], template, config.stride, training
        )
        for example, ids in zip(examples, asked, strict=True)
    ]
    kept = [question for question in questions if not (training and question.problem)]
    if not kept:
        raise DataError(
            "no question has an answer whose place in its passage is sure and that fits in a "
            "window: give others, or a greater length"
        )
    offsets = {text: np.array(o, np.int32).reshape(-1, 2) for text, (_, o) in passages.items()}
    tokens = _framed(kept, template)
    notes = [f"{len(tokens):,} windows of {config.length} tokens"]
    if cut := sum(len(ids) > longest for ids in asked):
        notes.append(f"{cut:,} questions cut to {longest} tokens")
    return QuestionAnsweringExamples(
        tokens,
        _decoding(kept, offsets, config.max_answer_length, unanswerable),
        _positions(kept),
        tuple(question.example for question in kept),
        tuple(_left_out(questions)) if training else (),
        (*notes, *_problems(questions, ": not trained on" if training else "")),
    )


def _question(
    example: SpanExample,
    ids: Sequence[int],
    passage: tuple[list[int], list[tuple[int, int]]],
    template: Template,
    stride: int,
    training: bool,
) -> _Question:
    tokens, offsets = passage
    held = windows(len(tokens), template.room(2) - len(ids), stride)
    span = _answer_tokens(example, offsets, training)
    problem = _UNSURE if training and span is None else ""
    if span is not None and _is_parted(span, held):
        span, problem = None, _PARTED
    return _Question(example, ids, tokens, held, span, problem)


def _framed(questions: Sequence[_Question], template: Template) -> BertInputs:
    pairs = [(q.ids, q.passage[start:end]) for q in questions for start, end in q.windows]
    return BertInputs.of(template, pairs)


def _decoding(
    questions: Sequence[_Question],
    offsets: dict[str, np.ndarray],
    max_answer_length: int,
    unanswerable: bool,
) -> SpanDecoding:
    ranges = np.array([window for q in questions for window in q.windows], np.int32)
    first_rows = np.array([0, *accumulate(len(q.windows) for q in questions)], np.int64)
    return SpanDecoding(ranges, first_rows, offsets, max_answer_length, unanswerable)


def _positions(questions: Sequence[_Question]) -> np.ndarray | None:
    """Where in each row the answer is, int32 [R, 2]; None if the questions are to be predicted."""
    if all(q.example.answers is None for q in questions):
        return None
    found = [_in_window(q.span, *window, len(q.ids) + 2) for q in questions for window in q.windows]
    return np.array(found, np.int32)


def token_span(offsets: Sequence[tuple[int, int]], start: int, end: int) -> tuple[int, int] | None:
    """Finds the tokens that hold a span of characters.

    Args:
        offsets: The characters of each token, in order.
        start: The first character.
        end: The character behind the last.

    Returns:
        The first and the last token; None if the tokenizer leaves nothing of the span.
    """
    held = [i for i, (first, last) in enumerate(offsets) if first < end and last > start]
    return (held[0], held[-1]) if held else None


def _answer_tokens(
    example: SpanExample, offsets: Sequence[tuple[int, int]], training: bool
) -> tuple[int, int] | None:
    """The tokens of the first answer to go by; (-1, -1) for no answer, None if not known."""
    if example.answers == ():
        return (-1, -1)
    for answer in example.answers or ():
        if answer.start is not None and (answer.sure or not training):
            end = answer.start + len(answer.text)
            if (found := token_span(offsets, answer.start, end)) is not None:
                return found
    return None


def _in_window(span: tuple[int, int] | None, start: int, end: int, before: int) -> tuple[int, int]:
    """Where a span of passage tokens is in a row; (0, 0), at [CLS], if it is not all there."""
    if span is None:
        return (-1, -1)  # a loss leaves it out
    if span[0] < start or span[1] >= end:
        return (0, 0)
    return span[0] - start + before, span[1] - start + before


def _check_ids(examples: Sequence[SpanExample]) -> None:
    seen: dict[str, str] = {}
    for example in examples:
        if example.id in seen:
            raise DataError(
                f"{example.location} has the id {example.id!r}, which {seen[example.id]} has too: "
                "give every question its own"
            )
        seen[example.id] = example.location


def _misplaced(example: SpanExample) -> list[str]:
    """The answers that are not where their source says."""
    return [answer.text for answer in example.answers or () if answer.start is None]


def _is_parted(span: tuple[int, int], held: Sequence[tuple[int, int]]) -> bool:
    """Whether an answer there is is whole in none of the windows."""
    return span[0] >= 0 and not any(start <= span[0] and span[1] < end for start, end in held)


def _problems(questions: Sequence[_Question], consequence: str) -> Iterator[str]:
    for problem in (_UNSURE, _PARTED):
        found = [question.example for question in questions if question.problem == problem]
        if found:
            yield f"{len(found):,} questions have {problem}{consequence} ({_named(found)})"


def _left_out(questions: Sequence[_Question]) -> Iterator[str]:
    for question in questions:
        for text in _misplaced(question.example):
            yield f"{question.example.location}: the answer {text!r} is not where it should be"
    for problem in (_UNSURE, _PARTED):
        found = (question for question in questions if question.problem == problem)
        yield from (f"{question.example.location}: {problem}" for question in found)


def _named(examples: Sequence[SpanExample]) -> str:
    """The ids of the first of some questions."""
    ids = list(dict.fromkeys(example.id for example in examples))
    return ", ".join(ids[:_NAMED_IN_FACTS]) + (", …" if len(ids) > _NAMED_IN_FACTS else "")
