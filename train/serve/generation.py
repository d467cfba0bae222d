"""Generation by a continuous batch, and the settings that requests share."""

import collections
import dataclasses
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Literal

from ...data.common.fields import (
    Checked,
    Fraction,
    NonNegativeInt,
    Range,
    Seed,
    require,
)
from ...data.common.json_text import JsonValue
from ...data.common.progress import LogFn
from ...models.decoding.continuous_batch import Written
from ...models.decoding.generator import SEEDS
from ...models.decoding.request import TopP, check_token_ids
from ...models.decoding.serving.row_sampling import Penalty, TextSampling, text_key
from ...models.text.completions import FinishReason, Prompt
from ...models.text.generate import TextGenerator, merged_request
from ...models.text.growing_text import GrowingText
from .app import Served
from .engine import Task, fail_tasks
from .fields import ApiError

GENERATION, SCORING = "generation", "scoring"
MOST_CHOICES, MOST_STOPS, LONGEST_STOP, MOST_BIASES = 8, 16, 200, 1024
"""The largest `n`, the number of stop strings, their length in characters, and the number of tokens
in `logit_bias`."""

STREAM_INTERVAL = 0.025
"""Seconds between two pieces of a stream. Faster tokens share a piece."""

Choices = Annotated[int, Range(least=1, most=MOST_CHOICES)]
Bias = Annotated[float, Range(least=-100, most=100)]
# The logits overflow float32 with larger values, and would be NaN.
Temperature = Annotated[float, Range(least=0, most=100)]
Repetition = Annotated[float, Range(least=0.01, most=100)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamOptions(Checked):
    """Settings of a stream."""

    include_usage: bool = False
    """Whether the last part has the numbers of tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextFields(Checked):
    """The fields that all requests for text have."""

    model: str | None = None
    """The name of the model. It may be left out if only one is served."""
    temperature: Temperature | None = None
    """With 0, decoding is greedy. Defaults to the setting stored with the model, or 1."""
    top_p: TopP | None = None
    """Samples from the most probable tokens whose probabilities sum to p."""
    top_k: NonNegativeInt | None = None
    """Samples from the k most probable tokens."""
    min_p: Fraction | None = None
    """Samples from the tokens that are at least p times as probable as the best one."""
    repetition_penalty: Repetition | None = None
    """Above 1 makes tokens of the prompt and the text less likely."""
    presence_penalty: Penalty = 0.0
    """Subtracted from the logits of tokens that the text has."""
    frequency_penalty: Penalty = 0.0
    """Subtracted from the logits of tokens for each time that the text has them."""
    logit_bias: Mapping[str, Bias] = dataclasses.field(default_factory=dict)
    """Token id → what is added to its logit."""
    n: Choices = 1
    """The number of texts."""
    seed: Seed | None = None
    """The same seed gives the same text. Defaults to a random seed."""
    stop: str | tuple[str, ...] = ()
    """Strings that end a text and are not part of it."""
    stream: bool = False
    """Whether the text is sent piece by piece."""
    stream_options: StreamOptions | None = None
    """Settings of the stream."""
    user: str | None = None
    """Ignored."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            len(self.stops) <= MOST_STOPS and all(0 < len(x) <= LONGEST_STOP for x in self.stops),
            f"stop must have at most {MOST_STOPS} strings of 1 to {LONGEST_STOP} characters",
        )
        require(
            len(self.logit_bias) <= MOST_BIASES,
            f"logit_bias must have at most {MOST_BIASES:,} tokens, got {len(self.logit_bias):,}",
        )
        require(
            self.stream or self.stream_options is None,
            "stream_options must be left out unless stream is true",
        )

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, stored: Mapping[str, JsonValue], *, alternatives: int = 0) -> TextSampling:
        """Returns how tokens are chosen.

        Args:
            stored: the settings stored with the model.
            alternatives: the number of alternatives to report at each position.

        Raises:
            UserError: a setting is out of range.
        """
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        given = {name: x for name in names if (x := getattr(self, name)) is not None}
        # The stored settings may request beam search, which a continuous batch does not support.
        request = merged_request(stored, {"num_beams": 1, "num_return_sequences": 1, **given})
        merged = {x.name: getattr(request, x.name) for x in dataclasses.fields(request)}
        return TextSampling(
            **merged,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias={_token_id(name): bias for name, bias in self.logit_bias.items()},
            num_alternatives=alternatives,
        )


def _token_id(name: str) -> int:
    require(
        name.isascii() and name.isdigit() and len(name) < 10,
        f"logit_bias must have token ids as names, got {name[:20]!r}",
    )
    return int(name)


@dataclasses.dataclass
class Piece:
    """A part of a text: the text since the previous piece, or the whole text."""

    text: str
    tokens: list[int]
    log_probabilities: list[float]
    alternatives: list[list[tuple[int, float]]]
    """The most probable tokens at each position, if requested."""
    reason: FinishReason | None
    """Why the text ended, or None while it grows."""
    num_tokens: int
    """The number of tokens that the model has chosen so far."""


@dataclasses.dataclass
class TextWork:
    """A text to generate."""

    ids: list[int]
    """The tokens of the prompt."""
    growing: GrowingText
    limit: int
    """The maximum number of new tokens."""
    sampling: TextSampling
    seed: int
    number: int
    """The index of the text among the texts with the same seed."""
    streamed: bool
    """Whether pieces are sent while the text grows."""
    ends: Callable[[str], int | None] | None = None
    """Returns the index where the text ends for another reason, such as a tool call, or None."""
    alternatives: list[list[tuple[int, float]]] = dataclasses.field(default_factory=list)
    created: float = dataclasses.field(default_factory=time.monotonic)
    first_token: float = 0.0
    """Seconds until the first token."""
    due: float = 0.0
    """The earliest time of the next piece."""
    shown: int = 0
    """The number of tokens that were sent."""

    def grow(self, tokens: list[int], log_probabilities: list[float]) -> None:
        """Appends new tokens."""
        self.growing.grow(tokens, log_probabilities)
        end = None if self.ends is None else self.ends(self.growing.text)
        if end is not None:
            self.growing.text, self.growing.reason = self.growing.text[:end], "stop"

    def piece(self) -> Piece | None:
        """Returns the new part of the text, or None if no further character is settled."""
        growing = self.growing
        # A stream sends only characters that no later token can change.
        text = growing.take_settled() if self.streamed else growing.text
        if growing.reason is None and not text:
            return None
        begin, self.shown = self.shown, len(growing.tokens)
        return Piece(
            text,
            growing.tokens[begin:],
            growing.log_probabilities[begin:],
            self.alternatives[begin : self.shown],
            growing.reason,
            growing.num_chosen,
        )


class GenerationWorker:
    """Generates texts in the rows of an open batch.

    Args:
        generator: the model.
        max_rows: the maximum number of texts that grow at once.
        log: called with lines about the warm-up.
    """

    def __init__(self, generator: TextGenerator, max_rows: int, log: LogFn) -> None:
        self.generator, self._log, self._max_rows = generator, log, max_rows
        self.batch = generator.open_batch(max_rows)
        self._tasks: dict[int, Task] = {}
        self._numbers: dict[Task, int] = {}
        self._next = 0

    @property
    def wait(self) -> float | None:
        """Seconds until the next step: 0 while a text waits or grows, else None."""
        return 0.0 if self.batch.is_busy else None

    def add(self, task: Task) -> None:
        """Adds a text to the batch."""
        work: TextWork = task.work
        number, self._next = self._next, self._next + 1
        self._tasks[number], self._numbers[task] = task, number
        self.batch.enter(
            number,
            work.ids,
            key=text_key(work.seed, work.number),
            limit=work.limit,
            sampling=work.sampling,
        )

    def cancel(self, task: Task) -> None:
        """Frees the row of a text."""
        number = self._numbers.pop(task, None)
        if number is not None:
            del self._tasks[number]
            self.batch.stop(number)

    def reset(self) -> None:
        """Removes all texts."""
        self.batch.clear()
        self._tasks.clear()
        self._numbers.clear()

    def step(self) -> None:
        """Advances all texts, and sends their new parts."""
        for written in self.batch.step():
            task = self._tasks.get(written.text)
            # A step may give a text two tokens, of which the first ended the text.
            if task is not None:
                try:
                    self._send(task, written)
                except Exception as error:  # the other texts must outlive it
                    fail_tasks([task], error)
                    self.cancel(task)

    def _send(self, task: Task, written: Written) -> None:
        """Sends the new part of a text, and ends the text if it is complete."""
        work: TextWork = task.work
        now = time.monotonic()
        work.first_token = work.first_token or now - work.created
        work.alternatives += written.alternatives
        work.grow(written.tokens, written.log_probs)
        ended = work.growing.reason is not None
        # Each piece of a stream costs the event loop as much as a token costs the engine.
        if (ended or (work.streamed and now >= work.due)) and (piece := work.piece()) is not None:
            work.due = now + STREAM_INTERVAL
            task.send(piece, last=ended)
        if ended:
            self.cancel(task)

    def warm_up(self) -> None:
        """Compiles the programs for short texts in each number of rows."""
        start = time.monotonic()
        for number in self.batch.row_numbers:
            for temperature in (0.0, 1.0):
                sampling = TextFields(temperature=temperature).sampling({})
                # Only the last text has a second token, so that the rows also advance once.
                for text in range(-number, 0):
                    limit = 1 + (text == -1)
                    self.batch.enter(text, [0], key=text_key(0), limit=limit, sampling=sampling)
                while self.batch.is_busy:
                    self.batch.step()
        rows = ", ".join(map(str, self.batch.row_numbers))
        self._log(f"compiled rows of {rows} in {time.monotonic() - start:.1f} s")


class ScoringWorker:
    """Computes the log-probabilities of the tokens of prompts."""

    def __init__(self, generator: TextGenerator) -> None:
        """Creates the worker of a model."""
        self._generator = generator
        self._waiting: collections.deque[Task] = collections.deque()

    @property
    def wait(self) -> float | None:
        """Seconds until the next step: 0 if a prompt waits, else None."""
        return 0.0 if self._waiting else None

    def add(self, task: Task) -> None:
        """Adds a prompt: its tokens and the number of alternatives."""
        self._waiting.append(task)

    def cancel(self, task: Task) -> None:
        """Removes a prompt."""
        if task in self._waiting:
            self._waiting.remove(task)

    def reset(self) -> None:
        """Removes all prompts."""
        self._waiting.clear()

    def warm_up(self) -> None:
        """Compiles nothing, because most servers do not score prompts."""

    def step(self) -> None:
        """Scores one prompt."""
        task = self._waiting.popleft()
        ids, number = task.work
        try:
            scores = self._generator.token_scores(ids, number)
        except Exception as error:  # the other prompts must outlive it
            fail_tasks([task], error)
        else:
            task.send(scores, last=True)


def make_works(
    generator: TextGenerator,
    prompt: Prompt,
    ids: list[int],
    fields: TextFields,
    *,
    sampling: TextSampling,
    seed: int,
    param: str,
    limit: int | None,
) -> list[TextWork]:
    """Returns the texts to generate for one prompt.

    Args:
        generator: the model.
        prompt: the prompt.
        ids: its tokens.
        fields: the settings.
        sampling: how tokens are chosen.
        seed: the seed of the prompt.
        param: the field of the prompt, for messages.
        limit: the maximum number of new tokens. If None, as many as fit into the context.

    Raises:
        ApiError: the prompt does not fit the context.
        UserError: a token is not within the vocabulary.
    """
    longest = generator.max_length
    if not 1 <= len(ids) <= longest:
        message = f"{param} has {len(ids):,} tokens, but the model reads 1 to {longest:,}"
        raise ApiError(400, message, param, "context_length_exceeded")
    check_token_ids(ids, generator.vocab_size, param)
    for token in sampling.logit_bias:
        check_token_ids([token], generator.vocab_size, "logit_bias")
    # The model does not read the last new token, so this token needs no position.
    room = longest - len(ids) + 1
    if limit is not None and limit > room:
        message = f"max_tokens {limit:,} must be at most {room:,} after {len(ids):,} of {longest:,}"
        raise ApiError(400, message, "max_tokens", "context_length_exceeded")
    limit = room if limit is None else limit
    # The limit is 0 if a request only scores its prompt, and `Prompt` allows no 0.
    prompt = dataclasses.replace(prompt, max_new_tokens=max(limit, 1))
    forced = sampling.forced_eos_token_id is not None
    return [
        TextWork(
            ids,
            GrowingText(
                generator.tokenizer, prompt, ids, end_ids=sampling.eos_token_id, forced_end=forced
            ),
            limit,
            sampling,
            seed,
            number,
            fields.stream,
        )
        for number in range(fields.n)
    ]


def seeds_of(fields: TextFields, number: int) -> list[int]:
    """Returns the seeds of several prompts: the given one and the following, or random ones."""
    first = secrets.randbelow(SEEDS) if fields.seed is None else fields.seed
    return [(first + i) % SEEDS for i in range(number)]


def num_tokens(works: list[TextWork]) -> int:
    """Returns the number of tokens that texts count for in the queue."""
    return sum(len(work.ids) + work.limit for work in works)


FINISH: dict[FinishReason | None, Literal["stop", "length"] | None] = {
    "stop": "stop",
    "end": "stop",
    "length": "length",
    None: None,
}
"""Why a text ended, in OpenAI's terms."""


def open_generation(name: str, folder: str, log: LogFn, max_rows: int = 16) -> Served:
    """Opens a causal language model."""
    generator = TextGenerator.of_run(folder, log=log)
    workers = {
        GENERATION: GenerationWorker(generator, max_rows, log),
        SCORING: ScoringWorker(generator),
    }
    return Served(name, folder, generator, workers)
