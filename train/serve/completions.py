"""The endpoint `/v1/completions`."""

import asyncio
import dataclasses
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Annotated, Literal

from ...data.common.fields import NonNegativeInt, Range, require
from ...data.common.json_text import JsonObject, JsonValue
from ...data.tokenizers.base import Tokenizer
from ...models.decoding.serving.score_tokens import TokenAlternatives
from ...models.text.completions import Prompt
from ...models.text.generate import TextGenerator
from .app import Answer, Endpoint, Served, Service, event_of
from .engine import Job
from .generation import (
    FINISH,
    GENERATION,
    SCORING,
    Piece,
    TextWork,
    make_works,
    num_tokens,
)
from .rows.inputs import texts_of
from .text_fields import TextFields, seeds_of

MOST_PROMPTS = 32
"""The maximum number of prompts in a request."""
DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""
SHORT = 4000
"""Prompts with fewer characters than this are tokenized in the thread of the event loop."""

Alternatives = Annotated[int, Range(least=0, most=5)]
Prompts = str | tuple[str, ...] | tuple[int, ...] | tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionFields(TextFields):
    """Prompts to continue."""

    prompt: Prompts
    """A text, a list of texts, the token ids of a text, or a list of lists of token ids."""
    max_tokens: NonNegativeInt = 16
    """The maximum number of new tokens of each text."""
    logprobs: Alternatives | None = None
    """How many of the most probable tokens to report at each position, in addition to the chosen
    token."""
    echo: bool = False
    """Whether the text begins with the prompt."""
    best_of: Literal[1] | None = None
    """Must be 1."""
    suffix: Literal[""] | None = None
    """Must be empty."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.max_tokens or self.echo, "max_tokens must be at least 1 unless echo is true, got 0"
        )
        problem = f"prompt must be 1 to {MOST_PROMPTS} texts, got {len(self.prompts)}"
        require(1 <= len(self.prompts) <= MOST_PROMPTS, problem)

    @property
    def prompts(self) -> Sequence[str | tuple[int, ...]]:
        """The prompts."""
        return texts_of(self.prompt)


@dataclasses.dataclass
class _Echo:
    """A prompt that the answer repeats before the completion, with the scores of its tokens.

    If prompts are not repeated, all fields are empty.
    """

    text: str = ""
    ids: Sequence[int] = ()
    scores: Sequence[float | None] = ()
    best: Sequence[Sequence[tuple[int, float]] | None] = ()

    @classmethod
    def of(cls, text: str, ids: Sequence[int], scores: Sequence[TokenAlternatives]) -> "_Echo":
        """Makes the echo of a prompt. The first token has no log-probability."""
        log_probabilities = [None, *(score.log_probability for score in scores)]
        return cls(text, ids, log_probabilities, [None, *(score.best for score in scores)])


_NO_TEXT = Piece("", [], [], [], "length", 0)
"""The empty completion for `max_tokens` 0."""


def head(model: Served, kind: str, prefix: str) -> JsonObject:
    """Returns the first fields of every answer."""
    identity = f"{prefix}-{uuid.uuid4().hex}"
    return {"id": identity, "object": kind, "created": int(time.time()), "model": model.name}


def usage(written: Iterable[int], prompts: int) -> JsonObject:
    """Returns the token counts of a request (`usage`).

    Args:
        written: the number of new tokens of each text.
        prompts: the number of tokens of all prompts.
    """
    new = sum(written)
    return {
        "prompt_tokens": prompts,
        "completion_tokens": new,
        "total_tokens": prompts + new,
    }


async def complete(service: Service, fields: CompletionFields) -> Answer:
    """Answers `/v1/completions`."""
    service.engine.check_admission()
    model, worker = service.worker(fields.model, GENERATION)
    arguments = model.front, fields
    short = sum(map(len, fields.prompts)) < SHORT
    prompts = _works(*arguments) if short else await asyncio.to_thread(_works, *arguments)
    works = [work for group in prompts for work in group]
    start = head(model, "text_completion", "cmpl")
    # If the answer includes log-probabilities of the prompts, score the prompts first.
    echoes = [_Echo()] * len(prompts)
    if fields.echo:
        scores: list[list[TokenAlternatives]] = [[] for _ in prompts]
        if fields.logprobs is not None:
            ids = [group[0].ids for group in prompts]
            _, scorer = service.worker(fields.model, SCORING)
            tokens = sum(map(len, ids))
            scores = await service.engine.submit(scorer, ids, tokens=tokens).results()
        echoes = [
            _Echo.of(_text_of(model.front, prompt, group[0].ids), group[0].ids, score)
            for prompt, group, score in zip(fields.prompts, prompts, scores, strict=True)
        ]
    # If max_tokens is 0, no tokens are generated, and the answer has only the prompt.
    to_generate = [] if fields.max_tokens == 0 else works
    job = service.engine.submit(worker, to_generate, tokens=num_tokens(to_generate))
    answer = _Answer(model.front.tokenizer, fields, start, works, echoes)
    if fields.stream:
        return _stream(service, model, job, answer)
    pieces = await job.results()
    service.metrics.texts(model.name, works)
    return answer.whole(pieces or [_NO_TEXT] * len(works))


def _works(generator: TextGenerator, fields: CompletionFields) -> list[list[TextWork]]:
    """Returns the texts to generate for each prompt."""
    sampling = fields.sampling(generator.stored, alternatives=fields.logprobs or 0)
    groups = []
    for item, seed in zip(fields.prompts, seeds_of(fields, len(fields.prompts)), strict=True):
        if isinstance(item, str):
            prompt, ids = Prompt(item, stop_strings=fields.stops), generator.encode(item)
        else:
            # A prompt of tokens has no text, so its completion is decoded without the prompt.
            prompt, ids = Prompt("", stop_strings=fields.stops, ids=item), list(item)
        groups.append(
            make_works(
                generator,
                prompt,
                ids,
                fields,
                sampling=sampling,
                seed=seed,
                param="prompt",
                limit=fields.max_tokens,
            )
        )
    return groups


def _text_of(generator: TextGenerator, prompt: str | tuple[int, ...], ids: list[int]) -> str:
    return prompt if isinstance(prompt, str) else generator.tokenizer.decode(ids)


@dataclasses.dataclass
class _Answer:
    """Converts generated texts to the answer to a request."""

    tokenizer: Tokenizer
    fields: CompletionFields
    start: JsonObject
    works: list[TextWork]
    echoes: list[_Echo]

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of all prompts."""
        # The n texts for a prompt are consecutive: take every n-th text to count each prompt once.
        return sum(len(work.ids) for work in self.works[:: self.fields.n])

    def whole(self, pieces: Sequence[Piece]) -> JsonObject:
        """Returns the whole answer, for a request without streaming."""
        written = (piece.num_tokens for piece in pieces)
        choices: list[JsonValue] = [self.choice(i, piece, 0) for i, piece in enumerate(pieces)]
        return {
            **self.start,
            "choices": choices,
            "usage": usage(written, self.prompt_tokens),
        }

    def choice(self, index: int, piece: Piece, offset: int) -> JsonObject:
        """Returns a choice, or a part of a streamed choice.

        Args:
            index: the index of the text in the answer.
            piece: the new part of the text.
            offset: the number of characters in the earlier parts of this text. If it is 0 and
              the request has `echo`, the part begins with the prompt.
        """
        echo = _Echo() if offset else self.echoes[index // self.fields.n]
        return {
            "index": index,
            "text": echo.text + piece.text,
            "logprobs": self._logprobs(echo, piece, offset),
            "finish_reason": FINISH[piece.reason],
        }

    def _logprobs(self, echo: _Echo, piece: Piece, offset: int) -> JsonValue:
        if self.fields.logprobs is None:
            return None
        ids = [*echo.ids, *piece.tokens]
        scores = [*echo.scores, *piece.log_probabilities]
        # If no alternatives are requested, each new token has an empty list.
        best = [*echo.best, *(piece.alternatives or [[]] * len(piece.tokens))]
        tokens = [self.tokenizer.decode([token], False) for token in ids]
        # The offset of a token is the number of characters before it in the whole text.
        *offsets, _ = itertools.accumulate(map(len, tokens), initial=offset)
        answer: JsonObject = {
            "tokens": [*tokens],
            "token_logprobs": [*scores],
            "top_logprobs": [
                self._named(row, token, score, self.fields.logprobs)
                for row, token, score in zip(best, ids, scores, strict=True)
            ],
            "text_offset": [*offsets],
        }
        return answer

    def _named(
        self,
        row: Sequence[tuple[int, float]] | None,
        token: int,
        score: float | None,
        num_alternatives: int,
    ) -> JsonValue:
        """Returns the log-probabilities of the alternatives and the chosen token, by their text."""
        if row is None:
            return None
        named: JsonObject = {}
        for one, value in [*row[:num_alternatives], (token, score)]:
            # Several tokens may have the same text, if each token is only a part of a character.
            named.setdefault(self.tokenizer.decode([one], False), value)
        return named


async def _stream(
    service: Service, model: Served, job: Job[Piece], answer: _Answer
) -> AsyncIterator[bytes]:
    """Yields the parts of a streamed answer."""
    offsets, written = [0] * len(answer.works), dict[int, int]()
    async with job:
        # If nothing is generated, the job has no tasks, so send the prompts here.
        if not answer.fields.max_tokens:
            for i in range(len(answer.works)):
                yield event_of({**answer.start, "choices": [answer.choice(i, _NO_TEXT, 0)]})
        async for i, piece in job:
            choice = answer.choice(i, piece, offsets[i])
            offsets[i] += len(str(choice["text"]))
            written[i] = piece.num_tokens
            yield event_of({**answer.start, "choices": [choice]})
    if answer.fields.includes_usage:
        counts = usage(written.values(), answer.prompt_tokens)
        yield event_of({**answer.start, "choices": [], "usage": counts})
    service.metrics.texts(model.name, answer.works)
    yield DONE


COMPLETIONS = (Endpoint("POST", "/v1/completions", complete, "Continue prompts", CompletionFields),)
"""The endpoint of this file."""
