"""Tokens from any model that writes, asked for in Hugging Face's words and answered in its form.

Names, their meaning and their defaults are those of transformers' `generate`; what is not supported
is refused by name. `Generator` and `Searcher` do the work.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...data.errors import UserError
from ..decoding.beam_adapters import beams_of
from ..decoding.beam_search import BeamSearch, Hypothesis, Searcher
from ..decoding.sample import Generator, Sampling
from ..registry import create
from .generation_config import Request, request_of
from .tensor_mapping import WeightsError

WHERE = "models.generate"
# What transformers answers beside tokens.
BESIDE = (
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "return_dict_in_generate",
)
UNSEEN = 0
"""Token that pads rows where nothing says which: nobody sees it."""


def generate(
    model: Any,
    params: Any,
    input_ids: Any,
    *,
    attention_mask: Any = None,
    seed: int = 0,
    **asked: Any,
) -> np.ndarray:
    """Continues prompts, or writes the targets of sources, as transformers' `generate` does.

    Example::

        model, params = models.load(folder)
        asked = models.generation_arguments(folder)
        out = models.generate(model, params, ids, **asked | {"num_beams": 4, "max_new_tokens": 50})

    Args:
      model: a causal language model or an encoder-decoder.
      params: its parameters.
      input_ids: prompts, or sources with their end token: int[B, T], or rows of token ids. Rows of
        different lengths are padded as a tokenizer does it, prompts on the left.
      attention_mask: `[B, T]`, 1 where there is a token and 0 where padding, on either side. By
        default padding of a causal model is where `pad_token_id` stands, if that is no end token;
        elsewhere there is none.
      seed: of the random choices.
      **asked: `max_new_tokens` (by default 20) or `max_length` (with the prompt); `eos_token_id`
        (one or several), `pad_token_id`, `forced_eos_token_id`, `decoder_start_token_id`;
        `bad_words_ids`, `suppress_tokens`; `num_beams`, `length_penalty`, `early_stopping`,
        `renormalize_logits`; `num_return_sequences`; of causal models without beams also
        `repetition_penalty`, and `do_sample` with `temperature`, `top_k` (by default 50; None or
        0: all) and `top_p`. None: the default.

    Returns:
      int32[B · num_return_sequences, T']: the prompt (behind its padding), or the start token; what
      was written, its end token included; and `pad_token_id`, or the end token, up to the longest.
      Where it has room for no more tokens (`max_length` of the configuration) a search ends; rows
      without beams go on, and their oldest tokens fall out. RoBERTa's positions are counted as
      transformers' `generate` does, from 0; not so in its forward pass, nor by `Generator`.

    Raises:
      UserError: an argument is not supported or out of range, an id is not in the vocabulary, a
        row is empty, or the model writes no text.
    """
    beams_of(model)
    model = counting_from_zero(model)
    causal = model.config.head == "causal_lm"
    named = _named(asked)
    rows, prompts = _read(input_ids, attention_mask, named, causal)
    length, longest = prompts.shape[1] if causal else 1, model.config.max_length
    request = request_of(named, WHERE, causal=causal, prompt_length=length, longest=longest)
    write = _search if isinstance(request.method, BeamSearch) else _sample
    written = write(model, params, rows, request, seed)
    if not causal:
        prompts = np.full((len(rows), 1), request.start_id, np.int32)
    prompts = np.repeat(prompts, request.num_return, axis=0)
    return np.concatenate([prompts, _padded(written, _padding(request), left=False)], axis=1)


def counting_from_zero(model: Any) -> Any:
    """Of RoBERTa transformers' `generate` counts positions from the first row of their table on.

    Its forward pass, and ours, count from behind the rows of the padding.
    """
    config = model.config
    if not (offset := config.position_offset):
        return model
    longer = config.max_length + offset
    return create(
        dataclasses.replace(config, position_offset=0, max_length=longer), model.execution
    )


def _named(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as a file would hold them; None is not there."""
    for name in BESIDE:
        if asked.get(name):
            raise WeightsError(f"{WHERE} answers tokens alone: leave {name} {asked[name]!r} out")
    named = {name: _plain(value) for name, value in asked.items() if value is not None}
    # Of this one alone their None is not the default.
    return named | ({"top_k": 0} if asked.get("top_k", 0) is None else {})


def _plain(value: Any) -> Any:
    """Numbers and lists of Python's, of arrays too."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_plain(x) for x in value] if isinstance(value, list | tuple) else value


def _read(
    input_ids: Any, attention_mask: Any, named: Mapping[str, Any], causal: bool
) -> tuple[list[list[int]], np.ndarray]:
    """The tokens of each row; and the rows as they are given, padded to one length."""
    given = _plain(input_ids)
    if not isinstance(given, list) or not given or not all(isinstance(x, list) for x in given):
        raise UserError(f"input_ids {given!r} are no rows of token ids: give int[B, T]")
    end, pad = (_plain(named.get(name, [])) for name in ("eos_token_id", "pad_token_id"))
    ends = end if isinstance(end, list) else [end]
    filling = pad if isinstance(pad, int) else next(iter(ends), UNSEEN)
    prompts = _padded(given, filling, left=True)
    if attention_mask is None:
        unseen = {pad} - set(ends) if causal and isinstance(pad, int) else set()
        # Rows of different lengths are not padded yet.
        ragged = len(set(map(len, given))) > 1
        return (
            given if ragged else [[x for x in row if x not in unseen] for row in given]
        ), prompts
    mask = _plain(attention_mask)
    lengths = [len(row) if isinstance(row, list) else None for row in mask]
    if lengths != [len(row) for row in given]:
        raise UserError("attention_mask has not the shape of input_ids: give one for each token")
    rows = [
        [x for x, seen in zip(row, sees, strict=True) if seen]
        for row, sees in zip(given, mask, strict=True)
    ]
    return rows, prompts


def _search(
    model: Any, params: Any, rows: list[list[int]], request: Request, seed: int
) -> list[list[int]]:
    """What each row's best hypotheses are."""
    del seed
    assert isinstance(request.method, BeamSearch)
    found = search_for(Searcher(model, params), rows, request, request.method)
    return [
        hypothesis.tokens + ([] if hypothesis.end_id is None else [hypothesis.end_id])
        for row in found
        for hypothesis in row
    ]


def search_for(
    searcher: Searcher, rows: list[list[int]], request: Request, method: BeamSearch
) -> list[list[Hypothesis]]:
    """The `num_return` best hypotheses of each row.

    Raises:
      UserError: there are not so many, or a row is not the model's.
    """
    ends = request.search_ends(searcher.config.vocab_size)
    found = searcher.search(rows, ends, method, request.start_id)
    if (least := min(map(len, found))) < request.num_return:
        raise UserError(
            f"the search found only {least} of num_return_sequences {request.num_return}: there "
            "are not more tokens to choose from"
        )
    return found


def _sample(
    model: Any, params: Any, rows: list[list[int]], request: Request, seed: int
) -> list[list[int]]:
    """What each row is continued by, `num_return` times."""
    assert isinstance(request.method, Sampling)
    prompts = [row for row in rows for _ in range(request.num_return)]
    written: list[list[int]] = [[] for _ in prompts]
    stream = Generator(model, params).stream(
        prompts, max_new_tokens=request.max_new_tokens, sampling=request.method, seed=seed
    )
    for new in stream:
        for row, tokens in zip(written, new.tolist(), strict=True):
            row.extend(tokens)
        if all(_end(row, request) is not None for row in written):
            break
    for row in written:
        if request.forced_id is not None and len(row) == request.max_new_tokens:
            row[-1] = request.forced_id
    return [row[: _end(row, request)] for row in written]


def _end(row: Sequence[int], request: Request) -> int | None:
    """How many tokens of a row there are up to its end; None: it has none yet."""
    return next((i + 1 for i, token in enumerate(row) if token in request.eos_ids), None)


def _padding(request: Request) -> int:
    """What transformers fills rows up with that have ended."""
    end = next(iter(request.eos_ids), UNSEEN)
    # Its beam search takes a pad_token_id of 0 for none.
    if request.pad_id is None or (isinstance(request.method, BeamSearch) and request.pad_id == 0):
        return end
    return request.pad_id


def _padded(rows: Sequence[Sequence[int]], filling: int, *, left: bool) -> np.ndarray:
    """Rows of one length, int32[B, T]."""
    longest = max(map(len, rows), default=0)
    padded = np.full((len(rows), longest), filling, np.int32)
    for i, row in enumerate(rows):
        first = longest - len(row) if left else 0
        padded[i, first : first + len(row)] = row
    return padded
