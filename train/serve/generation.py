"""Generates and scores texts for requests, in a continuous batch."""

import collections
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable
from typing import Literal, TypeAlias

from ...data.common.progress import LogFn
from ...models.decoding.continuous_batch import Written, read_length
from ...models.decoding.request import check_token_ids
from ...models.decoding.serving.row_sampling import PLAIN, TextSampling, every_sampling, text_key
from ...models.decoding.serving.score_tokens import TokenAlternatives
from ...models.text.completions import FinishReason, Prompt
from ...models.text.generate import TextGenerator
from ...models.text.growing_text import GrowingText
from .app import Served
from .engine import Task, fail_tasks
from .fields import require_valid
from .rows.settings import RowSettings
from .text_fields import TextFields

GENERATION, SCORING = "generation", "scoring"
STREAM_INTERVAL = 0.025
"""The minimum time between two pieces of a stream, in seconds. Tokens that are generated faster are
sent together."""
PIECES_PER_SECOND = 400
"""The maximum number of pieces per second in all streams together. A piece takes about 0.1 ms in
the event loop."""
MOST_ALTERNATIVES = 5
"""The number of most probable tokens that are computed at each position of a prompt."""


@dataclasses.dataclass
class Piece:
    """A part of a text, which is either the text since the previous piece or the whole text."""

    text: str
    tokens: list[int]
    log_probabilities: list[float]
    alternatives: list[list[tuple[int, float]]]
    """The most probable tokens at each position, if requested."""
    reason: FinishReason | None
    """The reason why the text ended, or None if it has not ended."""
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
    index: int
    """The index of the text among all texts with the same seed."""
    streamed: bool
    """Whether pieces are sent while the text is generated."""
    ends: Callable[[str], int | None] | None = None
    """Returns the index where a text must end, for example after a tool call, or None if the
    text may continue."""
    alternatives: list[list[tuple[int, float]]] = dataclasses.field(default_factory=list)
    created: float = dataclasses.field(default_factory=time.monotonic)
    first_token: float = 0.0
    """The number of seconds until the first token."""
    shown: int = 0
    """The number of tokens that have been sent."""

    def grow(self, tokens: list[int], log_probabilities: list[float]) -> None:
        """Appends new tokens."""
        self.growing.grow(tokens, log_probabilities)
        end = None if self.ends is None else self.ends(self.growing.text)
        if end is not None:
            self.growing.text, self.growing.reason = self.growing.text[:end], "stop"

    def piece(self) -> Piece | None:
        """Returns the new part of the text, or None without new final characters."""
        growing = self.growing
        # A stream sends only final characters, which later tokens cannot change.
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


TextTask: TypeAlias = Task[TextWork, Piece]


class GenerationWorker:
    """Generates texts in the rows of an open batch.

    Args:
        generator: the model.
        settings: how many texts are generated at once, and which programs are compiled in the
          warm-up.
        log: called with lines about the warm-up.
    """

    def __init__(self, generator: TextGenerator, settings: RowSettings, log: LogFn) -> None:
        self.generator, self._log, self._settings = generator, log, settings
        self.batch = generator.open_batch(settings.rows)
        self._due = 0.0
        """The earliest time of the next pieces."""
        self._tasks: dict[int, TextTask] = {}
        self._ids: dict[TextTask, int] = {}
        self._next = 0

    @property
    def wait(self) -> float | None:
        """The seconds until the next step: 0 while a text waits or is generated, else None."""
        return 0.0 if self.batch.is_busy else None

    def add(self, task: TextTask) -> None:
        """Adds a text to the batch."""
        work = task.work
        text_id, self._next = self._next, self._next + 1
        self._tasks[text_id], self._ids[task] = task, text_id
        self.batch.enter(
            text_id,
            work.ids,
            key=text_key(work.seed, work.index),
            limit=work.limit,
            sampling=work.sampling,
        )

    def cancel(self, task: TextTask) -> None:
        """Frees the row of a text."""
        text_id = self._ids.pop(task, None)
        if text_id is not None:
            del self._tasks[text_id]
            self.batch.stop(text_id)

    def reset(self) -> None:
        """Removes all texts."""
        self.batch.clear()
        self._tasks.clear()
        self._ids.clear()

    def step(self) -> None:
        """Advances all texts, and sends their new parts."""
        every, now = self.batch.step(), time.monotonic()
        # All streams get a piece at the same time, because waking the event loop takes long.
        sends = now >= self._due
        if sends:
            interval = self.batch.num_growing / PIECES_PER_SECOND
            self._due = now + max(STREAM_INTERVAL, interval)
        for written in every:
            task = self._tasks.get(written.text)
            # A step may add two tokens to a text, and the first of them may end the text.
            if task is not None:
                try:
                    self._send(task, written, sends=sends)
                except Exception as error:  # the error must not end other texts
                    fail_tasks([task], error)
                    self.cancel(task)

    def _send(self, task: TextTask, written: Written, *, sends: bool) -> None:
        """Appends new tokens to a text, and sends a piece. Ends the text if it is complete."""
        work = task.work
        work.first_token = work.first_token or time.monotonic() - work.created
        work.alternatives += written.alternatives
        work.grow(written.tokens, written.log_probs)
        ended = work.growing.reason is not None
        # The first piece of a text is sent immediately.
        due = ended or (work.streamed and (sends or work.shown == 0))
        if due and (piece := work.piece()) is not None:
            task.send(piece, last=ended)
        if ended:
            self.cancel(task)

    def warm_up(self) -> list[Callable[[], None]]:
        """Compiles the programs for one short text, or all programs, and logs what it leaves out.

        Returns:
            Functions that compile the programs for several short texts at once.
        """
        batch, settings = self.batch, self._settings
        longest, samplings = max(1, settings.warm_up_length), PLAIN
        lengths, sizes = batch.cache_lengths, batch.row_numbers
        if settings.warm_up_all:
            longest, samplings = self.generator.max_length, every_sampling()
        else:
            # A cache has space for the context and at least one new token.
            lengths = lengths[: 1 + sum(length <= longest for length in lengths)]

        def compile_rows(size: int, length: int) -> None:
            begun = time.monotonic()
            if size == sizes[0]:
                batch.compile_reading(length, samplings, longest)
            batch.compile_rows(size, length, samplings)
            what = f"generation: rows {size} × {length} tokens"
            self._log(f"{what} compiled in {time.monotonic() - begun:.1f} s")

        every = [functools.partial(compile_rows, *one) for one in itertools.product(sizes, lengths)]
        first = len(every if settings.warm_up_all else lengths)
        for function in every[:first]:
            function()
        if not settings.warm_up_all:
            further = ", ".join(map(str, sizes[1:])) or "no further"
            self._log(
                f"generation: {further} rows compile while the server is idle; prompts of more "
                f"than {longest} tokens, texts of more than {lengths[-1]}, top_k, top_p, min_p, "
                "penalties, logit_bias and logprobs compile at first use; --warm-up-all compiles "
                "all of them before the first request"
            )
        return every[first:]


ScoringTask: TypeAlias = Task[list[int], list[TokenAlternatives]]


class ScoringWorker:
    """Computes the log-probabilities of the tokens of prompts; see `GenerationWorker`."""

    def __init__(self, generator: TextGenerator, settings: RowSettings, log: LogFn) -> None:
        """Creates the worker of a model."""
        self._generator, self._settings, self._log = generator, settings, log
        self._waiting: collections.deque[ScoringTask] = collections.deque()

    @property
    def wait(self) -> float | None:
        """The seconds until the next step: 0 if a prompt waits, else None."""
        return 0.0 if self._waiting else None

    def add(self, task: ScoringTask) -> None:
        """Adds the tokens of a prompt."""
        self._waiting.append(task)

    def cancel(self, task: ScoringTask) -> None:
        """Removes a prompt."""
        if task in self._waiting:
            self._waiting.remove(task)

    def reset(self) -> None:
        """Removes all prompts."""
        self._waiting.clear()

    def warm_up(self) -> tuple[()]:
        """Compiles the program for each length, if the settings request all programs."""
        longest = self._generator.max_length if self._settings.warm_up_all else 0
        for length in dict.fromkeys(read_length(n, longest) for n in range(1, longest + 1)):
            self._generator.token_scores([0] * length, MOST_ALTERNATIVES)
            self._log(f"scoring: prompts of {length} tokens compiled")
        return ()

    def step(self) -> None:
        """Scores one prompt."""
        task = self._waiting.popleft()
        try:
            scores = self._generator.token_scores(task.work, MOST_ALTERNATIVES)
        except Exception as error:  # the error must not end other prompts
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
        sampling: the sampling settings.
        seed: the seed of the prompt.
        param: the field of the prompt, for error messages.
        limit: the maximum number of new tokens. If None, as many tokens as fit into the context.

    Raises:
        ApiError: the prompt does not fit the context.
        UserError: a token id is not in the vocabulary.
    """
    longest = generator.max_length
    message = f"{param} has {len(ids):,} tokens, but the model reads 1 to {longest:,}"
    require_valid(1 <= len(ids) <= longest, message, param, "context_length_exceeded")
    check_token_ids(ids, generator.vocab_size, param)
    for token in sampling.logit_bias:
        check_token_ids([token], generator.vocab_size, "logit_bias")
    # The model does not read the last new token, so this token does not need a position.
    room = longest - len(ids) + 1
    limit = room if limit is None else limit
    message = (
        f"max_tokens must be at most {room:,} after a prompt of {len(ids):,} tokens, got {limit:,}"
    )
    require_valid(limit <= room, message, "max_tokens", "context_length_exceeded")
    # The limit is 0 if a request only scores its prompt, but `Prompt` requires at least 1.
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
            index,
            fields.stream,
        )
        for index in range(fields.n)
    ]


def num_tokens(works: list[TextWork]) -> int:
    """Returns the number of tokens that the texts add to the queue."""
    return sum(len(work.ids) + work.limit for work in works)


FINISH: dict[FinishReason | None, Literal["stop", "length"] | None] = {
    "stop": "stop",
    "end": "stop",
    "length": "length",
    None: None,
}
"""Maps the reasons why a text ended to OpenAI's names for them."""


def open_generation(
    name: str, folder: str, settings: RowSettings, log: LogFn, *, ema: bool
) -> Served:
    """Opens a causal language model."""
    generator = TextGenerator.of_run(folder, log=log, ema=ema)

    def named(line: str) -> None:
        log(f"{name}: {line}")

    workers = {
        GENERATION: GenerationWorker(generator, settings, named),
        SCORING: ScoringWorker(generator, settings, named),
    }
    return Served(name, generator, workers)
