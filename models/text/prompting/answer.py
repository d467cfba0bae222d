"""Answers queries with few-shot prompts."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ....data.common.fields import require
from ....data.common.progress import AdvanceFn, LogFn, ignore
from ....data.prompts.examples import PromptExample
from ....data.prompts.few_shot import FewShot
from ..completions import Completion
from ..generate import BATCH_SIZE, TextGenerator
from ..text_model import require_texts

LONGEST_ANSWER = 64
"""The default of `max_new_tokens`, but at most a quarter of the model's maximum length."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """A query, its prompt, and the model's answer."""

    query: Mapping[str, str]
    """The values of the query's fields."""
    prompt: str
    text: str
    """The answer, without the white space around it."""
    finished: bool
    """Whether the model ended the answer. If False, the answer reached the maximum length."""
    completions: tuple[Completion, ...] = dataclasses.field(compare=False)
    """All answers to the query, including the first, with their log-probabilities and the reasons
    why they ended.
    """


def answer_queries(
    generator: TextGenerator,
    few_shot: FewShot,
    queries: Sequence[PromptExample | Mapping[str, str]],
    *,
    stop_strings: Sequence[str] = (),
    drop: bool = True,
    seed: int = 0,
    batch_size: int = BATCH_SIZE,
    on_batch: AdvanceFn = ignore,
    log: LogFn = print,
    **options: Any,
) -> list[Answer]:
    """Answers queries. An answer ends before a line feed or the label of the next example.

    The answer to a query does not depend on the other queries.

    Args:
        generator: the model.
        few_shot: creates the prompt of each query.
        queries: the fields of each query.
        stop_strings: additional strings that end an answer.
        drop: whether to drop the first examples of a prompt that is too long. If False, such a
          prompt raises an error.
        seed: the seed of the first query. It is incremented for each later query. Used only if
          `options` make the model sample.
        batch_size: the number of answers generated at a time.
        on_batch: called after each batch with the number of its answers and the number of their
            tokens.
        log: called with a line if examples are dropped, and with a line that states the fraction of
            padding in the batches.
        **options: arguments of `models.generate`. By default decoding is greedy, with at most 64
          new tokens.

    Raises:
        UserError: `queries` is empty, a field is missing, a prompt is too long, or an option is
          out of range.
    """
    require_texts(stop_strings, "stop_strings")
    require(queries, "queries must not be empty: give at least one query")
    # Use greedy decoding, unless an option requests sampling or beam search.
    length = generator.max_length
    defaults = {"max_new_tokens": max(1, min(LONGEST_ANSWER, length // 4)), "temperature": 0.0}
    chosen = {"do_sample", "top_k", "top_p", "min_p", "num_beams", "num_return_sequences"}
    if chosen & options.keys():
        del defaults["temperature"]
    options = {**defaults, **options}
    # Drop the first examples of each prompt that leaves too little room for the answer.
    full = list(map(few_shot.prompt, queries))
    request = generator.request(full, **options)
    room = length - (request.max_new_tokens or 0)
    require(
        room >= 1,
        f"max_new_tokens {request.max_new_tokens} leaves no room for a prompt in the {length} "
        "tokens that the model reads: lower it",
    )
    prompts = [few_shot.fitting(query, generator.num_tokens, room, drop=drop) for query in queries]
    cut = sum(prompt != text for prompt, text in zip(prompts, full, strict=True))
    if cut:
        log(
            f"{cut:,} of {len(prompts):,} prompts lost their first examples: with "
            f"{request.max_new_tokens} tokens for the answer, prompts have at most {room}"
        )
    # Generate, and strip the whitespace around each answer.
    stops = (*few_shot.pattern.stops, *stop_strings)
    completed = generator.complete(
        prompts,
        stop_strings=stops,
        seed=seed,
        batch_size=batch_size,
        on_batch=on_batch,
        log=log,
        **options,
    )
    answers = []
    for query, each in zip(queries, completed, strict=True):
        first, finished = each.completions[0], each.completions[0].finish_reason != "length"
        text = first.text.strip()
        fields = dict(query.fields if isinstance(query, PromptExample) else query)
        answers.append(Answer(fields, each.prompt.text, text, finished, each.completions))
    return answers
