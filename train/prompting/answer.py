"""Answers to queries by a model that is shown a task in its prompt."""

import dataclasses
from collections.abc import Mapping, Sequence

from ...data.errors import UserError
from ...data.io.json_text import JsonValue
from ...data.prompts.examples import PromptExample
from ...data.prompts.few_shot import FewShot
from ..inference.generate import TextGenerator
from ..progress import LogFn

LONGEST_ANSWER = 64
"""The number of new tokens by default, if that is at most a quarter of what the model reads."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """A query with its prompt and the model's answer."""

    query: Mapping[str, str]
    """The fields of the query."""
    prompt: str
    text: str
    """The answer, without the white space around it."""
    finished: bool
    """Whether the model ended the answer; otherwise its length did."""


def answer_queries(
    generator: TextGenerator,
    few_shot: FewShot,
    queries: Sequence[PromptExample | Mapping[str, str]],
    *,
    stop: Sequence[str] = (),
    drop: bool = True,
    seed: int = 0,
    log: LogFn = print,
    **options: JsonValue,
) -> list[Answer]:
    """Answers queries, all in one batch, up to a line feed or the next label.

    Args:
        generator: the model.
        few_shot: makes the prompt of each query.
        queries: fields of the queries.
        stop: further strings that end an answer.
        drop: whether a prompt that is too long loses its first examples; otherwise it is an error.
        seed: the seed of the random choices, if `options` make the model sample.
        log: called with a line if examples are dropped.
        **options: arguments of `models.generate`. By default the most probable token is taken each
          time, at most 64 of them.

    Raises:
        UserError: there are no queries, a field is missing, a prompt is too long, or an option is
          out of range.
    """
    if not queries:
        raise UserError("there is no query: give at least one")
    length = generator.max_length
    defaults = {"max_new_tokens": min(LONGEST_ANSWER, length // 4), "temperature": 0.0}
    if any(name in options for name in ("top_k", "top_p", "num_beams")):
        del defaults["temperature"]
    options = {**defaults, **options}
    whole = [few_shot.prompt(query) for query in queries]
    request = generator.request(whole, **options)
    room = length - (request.max_new_tokens or 0)
    if room < 1:
        raise UserError(
            f"max_new_tokens {request.max_new_tokens} leaves no room for a prompt in the {length} "
            "tokens that the model reads: lower it"
        )
    prompts = [few_shot.fitting(query, generator.num_tokens, room, drop=drop) for query in queries]
    cut = sum(prompt != text for prompt, text in zip(prompts, whole, strict=True))
    if cut:
        log(
            f"{cut:,} of {len(prompts):,} prompts lost their first examples: with "
            f"{request.max_new_tokens} tokens for the answer there is room for {room}"
        )
    stops = (*few_shot.pattern.stops, *stop)
    samples = generator.write(prompts, request, stop=stops, seed=seed, log=log)
    return [
        Answer(_fields(query), prompt, sample.text.strip(), sample.finished)
        for query, prompt, sample in zip(queries, prompts, samples, strict=True)
    ]


def _fields(query: PromptExample | Mapping[str, str]) -> Mapping[str, str]:
    return query.fields if isinstance(query, PromptExample) else query
