"""Prepares data for question answering, where an answer is a span of a passage.

As in Devlin et al. 2018, sections 4.2 and 4.3, the input is a pair of the question and the passage,
with the special tokens of the tokenizer's frame. The model predicts the start and the end of the
answer; for "no answer" both are the first token of the row (``[CLS]``). A long passage is divided
into overlapping windows, and each window is an example.

The arrays of a batch are int32: ``input_ids``, ``attention_mask``, ``token_type_ids`` [B, T], and
``start_positions``, ``end_positions`` [B], the first and the last token of the answer.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from ..common.errors import DataError, counted
from ..common.fields import PositiveInt, require
from ..common.files import input_lines
from ..dataset import ArraySpec, BatchSpec, Values, too_long
from ..features.answer_decoding import SpanDecoding
from ..features.bert_inputs import BertInputs, Template, token_specs
from ..features.predictions import Prediction
from ..features.sliding_windows import windows
from ..sources.hash_split import Split
from ..sources.labelled_names import PUBLISHED, Record, parse_labelled
from ..sources.published.records import OpenedRecords
from ..sources.squad import (
    SpanExample,
    from_record,
    in_groups,
    questions_to_predict,
    read_questions,
    unanswered,
)
from ..tokenizers.base import Tokenizer
from .base import SourceField
from .labelled import LabelledData, LabelledLength
from .labelled_examples import ExampleSet, LabelledExamples

NO_ANSWER = "no answer"
"""The only label. It exists if some training questions have no answer."""
_UNSURE = "no answer whose location is certain"
_SPLIT = "an answer that does not fit in any window"
# In arrays, this span means that the location of the answer is unknown.
_UNKNOWN = (-2, -2)
# The maximum number of question ids that a summary lists.
_NUM_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class QuestionAnsweringData(LabelledData[SpanExample]):
    """Questions whose answer is a span of a passage."""

    kind: ClassVar[str] = "question_answering"
    forms: ClassVar[dict[str, str]] = {
        "squad": "",
        **dict.fromkeys(PUBLISHED, "context,question,answers,id"),
        "memory": "context,question,answers,id?",
    }
    label_field: ClassVar[int] = 2
    noun: ClassVar[str] = "questions"
    imported_length: ClassVar[int | None] = 384  # the length of BERT's windows on SQuAD
    field_names: ClassVar[str] = "context,question,answers[,id]"

    source: SourceField
    """squad:GLOB, tfds:squad/v1.1 or hf:rajpurkar/squad."""
    length: LabelledLength = 384
    """The number of tokens in a sequence, T."""
    stride: PositiveInt = 128
    """The number of tokens between the starts of consecutive windows of a passage. It is limited to
    half a window."""
    max_question_length: PositiveInt = 64
    """The maximum length of a question in tokens. It is limited to half a sequence. Longer
    questions are truncated."""
    max_answer_length: PositiveInt = 30
    """The maximum length of a predicted answer, in tokens."""

    def read(self, records: OpenedRecords, split: Split) -> ExampleSet[SpanExample]:
        """See ``LabelledData``; the name of a source ``squad:GLOB`` specifies no fields."""
        source = records.source
        if source.kind == "squad":
            loaded = ExampleSet(in_groups(list(read_questions(source))))
        else:
            loaded = super().read(records, split)
        examples = loaded.examples
        _check_ids(examples)
        problem = f"no question of {source.name!r} has an answer: give a labeled source"
        require(not examples or any(example.answers for example in examples), problem, DataError)
        # Log the answers that are not at their stated positions, because training omits them.
        wrong = [x for x in examples for answer in x.known_answers if answer.start is None]
        note = f"{len(wrong):,} answers are not at the stated locations ({_named(wrong)})"
        return replace(loaded, notes=(note,) if wrong else ())

    def labelled(
        self, records: Sequence[Record], names: tuple[str, ...] | None, split: Split
    ) -> ExampleSet[SpanExample]:
        """See ``LabelledData``; the fields are passage, question, answers and an optional id."""
        return ExampleSet(in_groups(list(map(from_record, records))))

    def labels_in(self, example: SpanExample) -> tuple[str, ...]:
        """See ``LabelledData``; counts the questions with and without an answer."""
        return () if example.answers is None else ("answer" if example.answers else NO_ANSWER,)

    def unlabelled(self, records: Iterable[Record]) -> list[SpanExample]:
        """See ``LabelledData``."""
        return list(map(unanswered, records))

    def examples_of_source(self, name: str, unread: set[str]) -> list[SpanExample]:
        """See ``LabelledData``."""
        source = parse_labelled(name, self.forms)
        if source.kind == "squad":
            examples = list(read_questions(source, labelled=False))
        else:
            examples = super().examples_of_source(name, unread)
        _check_ids(examples)
        return examples

    def examples_to_predict(self, path: str, unread: set[str]) -> list[SpanExample]:
        """Reads a file in the SQuAD format, or JSON lines ``{"question": …, "context": …}``."""
        examples = tuple(questions_to_predict(input_lines(path), unread))
        _check_ids(examples)
        return list(examples)

    def labels(self) -> tuple[str, ...]:
        """Returns the label ``no answer`` if some questions have no answer, otherwise no label."""
        return (NO_ANSWER,) if NO_ANSWER in self._counts(self._whole().examples) else ()

    def batch_spec(self, num_labels: int, num_choices: int) -> BatchSpec:
        """See ``DataConfig`` and ``QuestionAnsweringExamples.example``."""
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
        """Divides passages into windows; see ``LabelledData``.

        Training omits a question if the location of its answer is uncertain, or if no window
        contains the whole answer. If such questions had the label [CLS], the model would learn that
        they have no answer.

        Raises:
          DataError: No question remains for training.
        """
        template = Template.of(tokenizer, self.length)
        tokens, offsets = _tokens_of_passages(examples, tokenizer)
        # A question may fill at most half of a row, so that a window of the passage has enough
        # context.
        longest = min(self.max_question_length, template.room(2) // 2)
        encoded = tokenizer.encode_batch([example.question for example in examples])
        windowed = functools.partial(self._windowed, room=template.room(2), training=training)
        questions = [
            windowed(
                example,
                ids[:longest],
                tokens=tokens[example.passage],
                offsets=offsets[example.passage],
            )
            for example, ids in zip(examples, encoded, strict=True)
        ]
        # Evaluation keeps all questions, because it scores the texts of the answers.
        kept = [question for question in questions if not (training and question.problem)]
        require(
            kept,
            "no question has an answer whose location in its passage is certain and that fits in a "
            "window: give other questions, or a greater length",
            error=DataError,
        )
        # Make one row for each window of each kept question.
        pairs = [(q.ids, q.passage[start:end]) for q in kept for start, end in q.windows]
        ranges = np.concatenate([question.windows for question in kept], dtype=np.int32)  # [R, 2]
        inputs = BertInputs.of(template, pairs)
        # "No answer" is predicted at the first token, which must not belong to the passage.
        require(
            inputs.second.all(),
            f"a question is empty (from {kept[0].example.location} on), so with this "
            f"{tokenizer.kind} tokenizer its row begins with the passage and has no position for "
            '"no answer": leave the question out',
            error=DataError,
        )
        num_truncated = sum(len(ids) > longest for ids in encoded)
        limit = f"{longest} tokens (data.max_question_length, at most half a sequence)"
        # The log states what happens to questions that have no usable answer.
        consequence = "left out" if training else "left out of the loss"
        return QuestionAnsweringExamples(
            tokens=inputs,
            examples=tuple(question.example for question in kept),
            values=_positions(kept, ranges, inputs.second),
            notes=(
                f"{counted(len(inputs), 'window')} of {self.length} tokens",
                *too_long(num_truncated, len(encoded), "question", limit, consequence="truncated"),
                *_problems(questions, consequence),
            ),
            decoding=SpanDecoding(
                ranges,
                np.cumsum([0, *(len(question.windows) for question in kept)], dtype=np.int64),
                offsets,
                self.max_answer_length,
                NO_ANSWER in labels,
            ),
        )

    def _windowed(
        self,
        example: SpanExample,
        ids: list[int],
        *,
        tokens: list[int],
        offsets: np.ndarray,
        room: int,
        training: bool,
    ) -> "_Question":
        """Divides the passage of a question into windows that fit into a row with the question."""
        found = windows(len(tokens), room - len(ids), self.stride)
        span, problem = _answer_in(found, _answer_tokens(example, offsets, training), training)
        return _Question(example, ids, tokens, found, span, problem)


@dataclass(frozen=True, eq=False, kw_only=True)
class QuestionAnsweringExamples(LabelledExamples[SpanExample]):
    """The windows of questions; see ``dataset.ExampleSource``.

    The values are the first and the last token of the answer in each of R windows, int32 [R, 2].
    They are -1 if unknown.

    Attributes:
      decoding: The question that each window belongs to, and the passage tokens in the window.
    """

    decoding: SpanDecoding

    def labels_of(self, index: int, values: np.ndarray) -> dict[str, np.ndarray]:
        """Returns ``start_positions`` and ``end_positions``; each is int32 []."""
        start, end = values[index]
        return {"start_positions": np.asarray(start), "end_positions": np.asarray(end)}

    def gold(self) -> list[Prediction]:
        """Returns ``{"id": …, "answers": [texts]}`` per question; the list may be empty."""
        return [
            {"id": example.id, "answers": [answer.text for answer in example.known_answers]}
            for example in self.examples
        ]

    def decode(self, predictions: dict[str, np.ndarray], n_best: int = 5) -> list[Prediction]:
        """Extracts the answers from the passages; see ``SpanDecoding.decode``."""
        return self.decoding.decode(predictions, self.tokens, self.examples, n_best)


@dataclass(frozen=True)
class _Question:
    """A question and the windows of its passage.

    Attributes:
      example: The question as it was read.
      ids: The tokens of the question.
      passage: The tokens of the passage.
      windows: The half-open range of passage tokens in each window.
      span: The first and the last passage token of the answer. It is (-1, -1) without an answer,
        and None if the location is unknown or no window contains the whole answer.
      problem: The reason why training omits the question; empty if there is none.
    """

    example: SpanExample
    ids: Sequence[int]
    passage: Sequence[int]
    windows: Sequence[tuple[int, int]]
    span: tuple[int, int] | None
    problem: str


def _tokens_of_passages(
    examples: Sequence[SpanExample], tokenizer: Tokenizer
) -> tuple[dict[str, list[int]], dict[str, np.ndarray]]:
    """Returns the tokens of each passage, and their offsets in the passage, int32 [n, 2]."""
    # Tokenize each distinct passage only once, because many questions share a passage.
    encoded = {
        text: tokenizer.encode_with_offsets(text, add_special_tokens=False)
        for text in dict.fromkeys(example.passage for example in examples)
    }
    tokens = {text: ids for text, (ids, _) in encoded.items()}
    return tokens, {text: np.array(x, np.int32).reshape(-1, 2) for text, (_, x) in encoded.items()}


def _positions(
    questions: Sequence[_Question], ranges: np.ndarray, before: np.ndarray
) -> np.ndarray | None:
    """Returns the first and the last token of the answer in each row, int32 [R, 2].

    If a row does not contain all tokens of the answer, the positions are (0, 0). If the answer is
    unknown, they are (-1, -1), which the loss ignores. Returns None in prediction.

    Args:
      questions: The questions.
      ranges: The half-open range of passage tokens in each row, int32 [R, 2].
      before: The number of tokens before the passage in each row, int32 [R].
    """
    if all(q.example.answers is None for q in questions):
        return None
    # All windows of a question have the same answer.
    numbers = [len(q.windows) for q in questions]
    spans = np.repeat([q.span or _UNKNOWN for q in questions], numbers, axis=0)  # [R, 2]
    starts, ends = ranges[:, :1], ranges[:, 1:]
    is_inside = (starts <= spans[:, :1]) & (spans[:, 1:] < ends)  # [R, 1]
    positions = np.where(is_inside, spans - starts + before[:, None], 0)
    return np.where(spans == _UNKNOWN, -1, positions).astype(np.int32)


def token_span(
    offsets: np.ndarray | Sequence[tuple[int, int]], start: int, end: int
) -> tuple[int, int] | None:
    """Finds the tokens that contain a span of characters.

    Args:
      offsets: The half-open character range of each token, in order, int [num_tokens, 2].
      start: The index of the first character of the span.
      end: The index of the first character after the span.

    Returns:
      The first and the last token, or None if no token overlaps the span.
    """
    firsts, ends = np.asarray(offsets).reshape(-1, 2).T
    found = np.flatnonzero((firsts < end) & (ends > start))
    return (int(found[0]), int(found[-1])) if len(found) else None


def _answer_tokens(
    example: SpanExample, offsets: np.ndarray, training: bool
) -> tuple[int, int] | None:
    """Returns the token span of the first usable answer; (-1, -1) if none, None if unknown."""
    if example.answers == ():
        return (-1, -1)
    # Evaluation uses uncertain positions only for the loss, because the scores compare texts.
    spans = (
        token_span(offsets, answer.start, answer.start + len(answer.text))
        for answer in example.known_answers
        if answer.start is not None and (answer.sure or not training)
    )
    return next(filter(None, spans), None)


def _answer_in(
    windows: Sequence[tuple[int, int]], span: tuple[int, int] | None, training: bool
) -> tuple[tuple[int, int] | None, str]:
    """Returns the span of an answer if a window contains it, else the reason for not using it."""
    if span is None:
        return None, _UNSURE if training else ""
    first, last = span
    # The span (-1, -1) means "no answer", which is possible in every window.
    if first < 0 or any(start <= first and last < end for start, end in windows):
        return span, ""
    return None, _SPLIT


def _check_ids(examples: Sequence[SpanExample]) -> None:
    seen: dict[str, SpanExample] = {}
    for example in examples:
        first = seen.setdefault(example.id, example)
        require(
            first is example,
            f"{example.location} has the id {example.id!r}, which {first.location} also "
            f"has: give every question a different id",
            error=DataError,
        )


def _problems(questions: Sequence[_Question], consequence: str) -> Iterator[str]:
    """Yields a line for the summary for each reason that makes questions unusable."""
    for problem in (_UNSURE, _SPLIT):
        found = [question.example for question in questions if question.problem == problem]
        if found:
            number = f"{len(found):,} of {counted(len(questions), 'question')}"
            yield f"{number} {consequence}: {problem} ({_named(found)})"


def _named(examples: Sequence[SpanExample]) -> str:
    """Returns the ids of the first few questions, for a summary."""
    ids = list(dict.fromkeys(example.id for example in examples))
    return ", ".join(ids[:_NUM_NAMED]) + (", …" if len(ids) > _NUM_NAMED else "")
