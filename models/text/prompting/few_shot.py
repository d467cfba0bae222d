"""Accuracy on local data by the number of examples in the prompt (Brown et al. 2020, figure 1.2).

If answers are labels, each label is scored after the prompt, and the most probable label is the
answer. An answer that is not a label is right if greedy decoding generates it, followed by the text
that ends an answer.
"""

import dataclasses
import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from ....data.common.errors import UserError
from ....data.common.fields import PositiveInt, check_value, require
from ....data.common.progress import LogFn, Progress
from ....data.prompts.examples import PromptExample
from ....data.prompts.few_shot import FewShot
from ....data.prompts.pattern import PromptPattern
from .continuations import ContinuationScore, ContinuationScorer

AnswerKind = Literal["labels", "texts"]
"""How an answer is found: the most probable of all labels, or the text of greedy decoding."""

MOST_LABELS = 20
"""With more distinct answers than this, answers are treated as texts."""
LIMIT = 500
"""Default number of questions."""


@dataclasses.dataclass(frozen=True)
class FewShotAccuracy:
    """The accuracy of a model with some number of examples in its prompt."""

    accuracy: float
    """The fraction of questions with the right answer."""
    accuracy_normalized: float | None
    """The accuracy with the log-probability of each label divided by its number of characters, or
    None if answers are not labels."""
    questions: int
    """The number of questions."""

    def to_json(self) -> dict[str, float | int]:
        """Returns the figures by name, without figures that are None."""
        fields = dataclasses.asdict(self)
        return {name: value for name, value in fields.items() if value is not None}


class _Question(NamedTuple):
    """A query with a number of examples before it."""

    shots: int
    prompt: str
    answers: Sequence[str]
    """The scored continuations; a space before an answer is a part of it."""
    right: int | None
    """The index of the right continuation, or None if the answer is a generated text."""
    letters: Sequence[int]
    """The number of letters of each label."""


def few_shot_accuracy(
    scorer: ContinuationScorer,
    pattern: PromptPattern,
    examples: Sequence[PromptExample],
    queries: Sequence[PromptExample] | None = None,
    *,
    shots: Sequence[int] = (0, 1, 4, 16),
    answers: AnswerKind | None = None,
    limit: int | None = LIMIT,
    seed: int | None = None,
    balanced: bool = False,
    log: LogFn = print,
) -> dict[int, FewShotAccuracy]:
    """Measures accuracy on queries with different numbers of examples in the prompt.

    Example::

        scorer = models.ContinuationScorer.of_run("runs/in-context")
        examples = data.prompt_examples("builtin:patterns")
        found = models.few_shot_accuracy(scorer, data.PATTERNS["patterns"], examples, shots=[0, 4])
        print(found[4].accuracy - found[0].accuracy)

    Args:
        scorer: the model.
        pattern: the text of an example.
        examples: the examples to choose from; a query is never an example in its prompt.
        queries: the questions, with their answers. If None, the examples.
        shots: the numbers of examples in a prompt.
        answers: whether answers are labels, scored by probability, or generated texts. Defaults to
          labels if there are at most 20 and each occurs at least twice on average.
        limit: the number of questions, chosen by the seed (0 if `seed` is None). If None, all
          questions.
        seed: shuffles the examples. If None, the prompts contain the first examples, in their
          order. All questions have the same examples, unlike in lm-eval, which draws examples for
          each question.
        balanced: whether each answer occurs equally often among the examples of a prompt.
        log: called with a line if questions or examples are left out.

    Returns:
        The accuracy for each number of examples.

    Raises:
        UserError: there are fewer examples than shots, an example lacks a field, or a query is
          longer than the model reads.
    """
    queries = examples if queries is None else queries
    require(queries, "queries must not be empty: give at least one query with its answer")
    require(shots, "shots is empty: give at least one number of examples, such as --shots 0 4")
    check_value("limit", limit, PositiveInt | None)
    # Choose how answers are found, and which questions are asked.
    labels = _labels(pattern, examples, queries, answers)
    way = "written by greedy decoding" if labels is None else f"one of {len(labels)} labels"
    log(f"an answer is {way}")
    if limit is not None and limit < len(queries):
        log(f"{limit:,} of {len(queries):,} questions are asked, chosen by the seed (--limit)")
        chosen = sorted(random.Random(seed or 0).sample(range(len(queries)), limit))
        queries = [queries[i] for i in chosen]
    # Score all answers of all questions in one call, so that prefixes are shared.
    questions = [
        question
        for number in dict.fromkeys(shots)
        for question in _questions(
            scorer, FewShot(pattern, examples, number, seed, balanced), queries, labels, log=log
        )
    ]
    pairs = [(question.prompt, answer) for question in questions for answer in question.answers]
    with Progress().counter("answers", len(pairs)) as advance:
        requests = [scorer.encode_pair(*pair) for pair in pairs]
        scores = iter(scorer.score(requests, on_batch=advance, log=log))
    # Count the questions with the right answer for each number of examples.
    right: dict[int, list[tuple[bool, bool]]] = {number: [] for number in shots}
    for question in questions:
        own = [next(scores) for _ in question.answers]
        right[question.shots].append(_is_right(question, own))
    return {
        number: FewShotAccuracy(
            accuracy=sum(plain for plain, _ in results) / len(results),
            accuracy_normalized=None
            if labels is None
            else sum(normalized for _, normalized in results) / len(results),
            questions=len(results),
        )
        for number, results in right.items()
    }


def _labels(
    pattern: PromptPattern,
    examples: Sequence[PromptExample],
    queries: Sequence[PromptExample],
    kind: AnswerKind | None,
) -> list[str] | None:
    """Returns the possible labels in alphabetic order, or None if answers are texts."""
    given = examples or queries  # not both, because the queries may repeat the examples
    different = {pattern.answer(example.fields) for example in given}
    if kind is None:
        kind = "labels" if len(different) <= min(MOST_LABELS, len(given) / 2) else "texts"
    if kind == "texts":
        return None
    return sorted(different | {pattern.answer(query.fields) for query in queries})


def _begin_others(labels: Sequence[str]) -> bool:
    """Returns whether any of some sorted labels is a prefix of the next one."""
    # Labels that begin with another label follow it in the sorted list, so compare neighbors.
    return any(b.startswith(a) for a, b in itertools.pairwise(labels))


def _questions(
    scorer: ContinuationScorer,
    few_shot: FewShot,
    queries: Sequence[PromptExample],
    labels: Sequence[str] | None,
    *,
    log: LogFn,
) -> list[_Question]:
    """Returns the prompt of each query, without the first examples if they do not fit."""
    pattern, dropped, questions = few_shot.pattern, 0, []
    # A label that is a prefix of another label is at least as probable as the other label, unless
    # its end is scored as well.
    end = "" if labels is None or not _begin_others(labels) else pattern.stop
    for query in queries:
        answer = pattern.answer(query.fields)
        if labels is None:
            answers = [f"{answer}{pattern.stop}"]
        else:
            answers = [f"{label}{end}" for label in labels]
        # Leave room for the longest answer.
        room = scorer.max_length
        if not scorer.is_encoder_decoder:  # the last token of a continuation is not read
            room += 1 - max(len(scorer.encode_pair("", text)[1]) for text in answers)
        prompt = few_shot.fitting(query, lambda text: len(scorer.encode_pair(text, "")[0]), room)
        dropped += prompt != few_shot.prompt(query)
        right = None if labels is None else labels.index(answer)
        letters = [max(len(label.lstrip()), 1) for label in labels or ()]
        questions.append(_Question(few_shot.num_shots, prompt, answers, right, letters))
    if dropped:
        log(
            f"{dropped:,} of {len(questions):,} prompts with {few_shot.num_shots} examples are "
            f"longer than the {scorer.max_length:,} tokens that the model reads: their first "
            "examples are left out"
        )
    return questions


def _is_right(question: _Question, scores: Sequence[ContinuationScore]) -> tuple[bool, bool]:
    """Returns whether the right answer is the best, in total and per letter."""
    if question.right is None:
        return scores[0].is_greedy, scores[0].is_greedy
    plain = [score.log_probability for score in scores]
    normalized = [value / length for value, length in zip(plain, question.letters, strict=True)]
    best = [values.index(max(values)) == question.right for values in (plain, normalized)]
    return best[0], best[1]


def table_of(found: Mapping[int, FewShotAccuracy]) -> list[str]:
    """Formats accuracies as the lines of a table."""
    normalized = any(result.accuracy_normalized is not None for result in found.values())
    lines = ["examples  accuracy" + "  per letter" * normalized + "  questions"]
    for shots, result in found.items():
        line = f"{shots:>8}  {result.accuracy:>8.1%}"
        if result.accuracy_normalized is not None:
            line += f"  {result.accuracy_normalized:>10.1%}"
        lines.append(f"{line}  {result.questions:>9,}")
    return lines


def check_picture(file: str | Path) -> None:
    """Raises UserError if no picture can be written to a file."""
    from matplotlib.figure import Figure

    path, known = Path(file), Figure().canvas.get_supported_filetypes()
    require(
        path.suffix.removeprefix(".") in known,
        f"the picture {file} has the suffix {path.suffix!r}: choose one of {', '.join(known)}",
    )
    require(
        path.parent.is_dir(),
        f"the picture {file} cannot be written: the folder {path.parent} does not exist",
    )


def draw_accuracy(found: Mapping[int, FewShotAccuracy], file: str | Path, title: str = "") -> None:
    """Draws the accuracy against the number of examples, by matplotlib.

    Args:
        found: the accuracies.
        file: the picture; its suffix determines its format.
        title: the title of the plot.

    Raises:
        UserError: the file cannot be written, or matplotlib does not support its suffix.
    """
    from matplotlib.figure import Figure

    # Use Figure instead of pyplot, which would choose a window system.
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    numbers = sorted(found)
    axes.plot(numbers, [found[n].accuracy for n in numbers], marker="o", label="accuracy")
    normalized = [found[n].accuracy_normalized for n in numbers]
    if None not in normalized:
        axes.plot(numbers, [x or 0.0 for x in normalized], marker="o", label="per letter")
        axes.legend()
    axes.set(xlabel="examples in the prompt", ylabel="accuracy", ylim=(0, 1), title=title)
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(-0.2, max(*numbers, 1) * 1.3)
    axes.set_xticks(numbers, [str(n) for n in numbers])
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise UserError(f"the picture {file} cannot be written: {error}") from None
