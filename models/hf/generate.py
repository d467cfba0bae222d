"""Generates with any generative model, with the arguments and outputs of transformers' `generate`.

Names, meanings and defaults follow transformers' `generate`; unsupported arguments are rejected by
name. `Generator` generates the tokens.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...data.common.errors import UserError, suggest
from ...data.common.json_text import JsonValue
from ..decoding.beam_adapters import beams_of
from ..decoding.generator import Generator, sampling_keys
from ..decoding.padding import pad_rows
from ..decoding.request import GenerationRequest, Hypothesis, check_token_ids
from ..decoding.speculative import NUM_DRAFT_TOKENS, Draft
from ..heads.specs import CAUSAL_HEADS
from ..model import Model
from ..nn.typing import Params
from ..registry import create, family_of
from .generation_config import ARGUMENTS, EFFECTIVE, FIELDS, request_from_hf
from .registry import mapping_of
from .tensors.mapping import WeightsError

WHERE = "models.generate"
# Arguments that make transformers return more than tokens, which is not supported.
EXTRA_OUTPUTS = (
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "return_dict_in_generate",
)
UNSEEN = 0
"""The token that pads rows if no padding token is given; the model does not read padding."""


def generate(
    model: Model,
    params: Params,
    input_ids: object,
    *,
    attention_mask: object = None,
    seed: int = 0,
    assistant_model: tuple[Model, Params] | Model | None = None,
    num_assistant_tokens: int | None = None,
    **requested: object,
) -> np.ndarray:
    """Continues prompts, or generates targets from sources, like transformers' `generate`.

    Example::

        model, params = models.load(folder)
        stored = models.generation_arguments(folder)
        out = models.generate(model, params, ids, **stored | {"num_beams": 4})

    Args:
      model: a causal language model or an encoder-decoder.
      params: its parameters.
      input_ids: prompts, or sources including their end token: int[B, T], or a list of rows of
        token ids. Rows of different lengths are padded, prompts on the left.
      attention_mask: `[B, T]`, 1 for tokens and 0 for padding, on either side. If None, tokens
        equal to `pad_token_id` are padding for a causal model, unless this is an end token; for
        other models, no token is padding.
      seed: the seed for sampling.
      assistant_model: a pair (model, params): a smaller causal model with the same vocabulary, for
        speculative decoding without beams (`Draft`). The assistant changes neither greedy tokens
        nor the distribution of sampled tokens.
      num_assistant_tokens: the number of tokens that the assistant proposes at a time; constant.
        Defaults to 4.
      **requested: `max_new_tokens` (default 20) or `max_length` (including the prompt);
        `eos_token_id` (one or several), `pad_token_id`, `forced_eos_token_id`; for
        encoder-decoders `decoder_start_token_id`, `forced_bos_token_id`, `min_length`,
        `min_new_tokens`, `no_repeat_ngram_size`;
        `bad_words_ids`, `suppress_tokens`; `num_beams`, `length_penalty`, `early_stopping`,
        `renormalize_logits`; `num_return_sequences`; for causal models without beams also
        `repetition_penalty`, and `do_sample` with `temperature`, `top_k` (default 50; None or
        0: all), `top_p` and `min_p`. Other arguments use their default if None.

    Returns:
      int32[B · num_return_sequences, T']: the prompt (after its padding) or the start token; the
      new tokens, including the end token; and padding to the longest row with `pad_token_id` or the
      end token. At the context limit (`max_length` of the configuration), beam search stops, while
      sampling drops the oldest tokens and continues. RoBERTa's positions count from 0, as in
      transformers' `generate`, unlike in the forward pass and in `Generator`.

    Raises:
      UserError: an argument is not supported or out of range, an id is not in the vocabulary, a
        row is empty, or the model is not generative.
    """
    # Read the prompts and the requested settings.
    num_readable = beams_of(model).vocab_size
    model = as_in_generate(model)
    causal = model.config.head in CAUSAL_HEADS
    fields = _hf_fields(requested)
    given = _rows(input_ids)
    for number, row in enumerate(given):
        check_token_ids(row, num_readable, f"row {number} of input_ids")
    rows = _read(given, attention_mask, fields, causal)
    # If padding tokens count as positions, padding on the left shifts the tokens after it.
    counts_padding = attention_mask is not None and not getattr(model, "skip_padding", True)
    positions = None
    if counts_padding:
        positions = [np.flatnonzero(row).tolist() for row in _plain(attention_mask)]
    request = request_from_hf(
        fields,
        WHERE,
        causal=causal,
        prompt_length=max(map(len, given)) if causal else 1,
        longest=model.config.max_length,
    )
    request.check_tokens(
        model.config.vocab_size,
        "eos_token_id",
        "pad_token_id",
        "forced_bos_token_id",
        "decoder_start_token_id",
    )
    # Encoder-decoders always use a search, also with one beam.
    generator = Generator(model, params, draft=_draft(assistant_model, num_assistant_tokens))
    if request.num_beams > 1 or not causal:
        written = [
            hypothesis.tokens + ([] if hypothesis.end_id is None else [hypothesis.end_id])
            for hypotheses in search_all(generator, rows, request, positions)
            for hypothesis in hypotheses
        ]
    else:
        written = _sample(generator, rows, request, seed)
    fill = next(iter(request.eos_token_id), UNSEEN)
    # Join the prompts and the new tokens, and pad them as transformers does.
    start, pad = request.decoder_start_token_id, request.pad_token_id
    before = given if causal else [[] if start is None else [start]] * len(rows)
    prompts, _ = pad_rows(before, fill=fill if pad is None else pad, left=True)
    # transformers' beam search treats a pad_token_id of 0 as missing.
    if pad or (pad == 0 and request.num_beams == 1):
        fill = pad
    prompts = np.repeat(prompts, request.num_return_sequences, axis=0)
    return np.concatenate([prompts, pad_rows(written, fill=fill)[0]], axis=1)


def _draft(assistant: tuple[Model, Params] | Model | None, num_tokens: int | None) -> Draft | None:
    """Returns the draft model that a call specifies, or None."""
    if assistant is None and num_tokens is None:
        return None
    if not isinstance(assistant, tuple):
        raise UserError(
            f"assistant_model must be a pair (model, params), got {type(assistant).__name__}"
        )
    model, params = assistant
    number = NUM_DRAFT_TOKENS if num_tokens is None else num_tokens
    return Draft(as_in_generate(model), params, number)


def as_in_generate(model: Model) -> Model:
    """Returns the model as transformers' `generate` runs it, which may count other positions."""
    # A family without a Hugging Face conversion does not count positions differently.
    if family_of(model.config).hf_module is None:
        return model
    config = mapping_of(model.config).in_generate(model.config)
    return model if config == model.config else create(config, model.execution)


def _hf_fields(requested: Mapping[str, object]) -> dict[str, JsonValue]:
    """Converts the arguments to JSON values, and leaves out arguments that are None."""
    for name in requested.keys() - ARGUMENTS - FIELDS.ignored:
        raise UserError(f"{WHERE} has no argument {name!r}: {suggest(name, sorted(EFFECTIVE))}")
    for name in EXTRA_OUTPUTS:
        if requested.get(name):
            raise WeightsError(f"{WHERE} returns only tokens: leave {name} {requested[name]!r} out")
    fields = {name: _plain(value) for name, value in requested.items() if value is not None}
    # `top_k=None` disables top-k; for all other arguments None means "use the default".
    return fields | ({"top_k": 0} if requested.get("top_k", 0) is None else {})


def _plain(value: Any) -> Any:
    """Converts arrays of numpy, jax or torch to Python numbers and lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(map(_plain, value)) if isinstance(value, list | tuple) else value


def _rows(input_ids: object) -> list[list[Any]]:
    """Returns the rows after checking that none is empty."""
    given = _plain(input_ids)
    if not isinstance(given, list) or not given or not all(isinstance(x, list) for x in given):
        raise UserError(f"input_ids must be rows of token ids, int[B, T], got {given!r}")
    if [] in given:
        raise UserError(f"row {given.index([])} of input_ids has no token: give at least one token")
    return given


def _read(
    given: list[list[int]], attention_mask: object, fields: Mapping[str, Any], causal: bool
) -> list[list[int]]:
    """Returns the tokens of each row without padding."""
    end, pad = fields.get("eos_token_id", []), fields.get("pad_token_id")
    ends = end if isinstance(end, list) else [end]
    if attention_mask is None:
        # Guess the padding as transformers does.
        ragged = len(set(map(len, given))) > 1  # rows of different lengths are not padded yet
        if ragged or not causal or not isinstance(pad, int) or pad in ends:
            return given
        return [[token for token in row if token != pad] for row in given]
    # If there is a mask, it determines which tokens are padding.
    mask = _plain(attention_mask)
    rows = mask if isinstance(mask, list) else []
    lengths = [len(row) if isinstance(row, list) else None for row in rows]
    values = [*itertools.chain(*rows)] if lengths == [*map(len, given)] else [None]
    if not all(isinstance(x, bool | int | float) and x in (0, 1) for x in values):
        raise UserError(
            "attention_mask must have the shape of input_ids, with 1 for a token and 0 for padding"
        )
    return [[*itertools.compress(row, seen)] for row, seen in zip(given, rows, strict=True)]


def search_all(
    generator: Generator,
    rows: Sequence[Sequence[int]],
    request: GenerationRequest,
    positions: Sequence[Sequence[int]] | None = None,
) -> list[list[Hypothesis]]:
    """Returns the `num_return_sequences` best hypotheses of each row.

    Raises:
      UserError: the search finds fewer hypotheses, or a row does not fit the model.
    """
    found = generator.search(rows, request, positions=positions)
    if (least := min(map(len, found))) < request.num_return_sequences:
        raise UserError(
            f"beam search found only {least} of num_return_sequences "
            f"{request.num_return_sequences}, because few tokens are allowed: give at most {least}"
        )
    return found


def _sample(
    generator: Generator, rows: Sequence[Sequence[int]], request: GenerationRequest, seed: int
) -> list[list[int]]:
    """Continues each row `num_return_sequences` times; returns the tokens up to the end token."""
    prompts = [row for row in rows for _ in range(request.num_return_sequences)]
    written: list[list[int]] = [[] for _ in prompts]
    batch = generator.continuous_batch(
        prompts,
        request,
        keys=sampling_keys(seed, len(prompts)),
        limits=[request.max_new_tokens or 1] * len(prompts),
        num_rows=len(prompts),
        scored=False,
    )
    # Stop a text at its end token; the batch continues with the other texts.
    for new in batch:
        written[new.text] += new.tokens
        if request.end(new.tokens) is not None:
            batch.stop(new.text)
    # Like transformers, replace the last token of a text that reached the limit.
    for row in written:
        if request.forced_eos_token_id is not None and len(row) == request.max_new_tokens:
            row[-1] = request.forced_eos_token_id
    return [row[: request.end(row)] for row in written]
