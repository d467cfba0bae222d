"""Generates tokens with any generative model, like transformers' `generate`.

Names, meanings and defaults follow transformers' `generate`; unsupported arguments are rejected by
name. `Generator` generates the tokens.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from ...data.common.errors import UserError, suggest
from ...data.common.fields import check_value, require
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
from .config_mapping import FixedField
from .generation_config import ARGUMENTS, EFFECTIVE, FIELDS, request_from_hf
from .registry import mapping_of

WHERE = "models.generate"
# Arguments that make transformers return more than tokens, which is not supported.
EXTRA_OUTPUTS = (
    FixedField("output_attentions", (False, None)),
    FixedField("output_hidden_states", (False, None)),
    FixedField("output_logits", (False, None)),
    FixedField("output_scores", (False, None)),
    FixedField("return_dict_in_generate", (False, None)),
)
UNSEEN = 0
"""The token that pads rows if no padding token is given. The model ignores padding."""


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
      attention_mask: `[B, T]`, 1 for tokens and 0 for padding, which may be on either side. If
        None, a causal model treats tokens equal to `pad_token_id` as padding, unless `pad_token_id`
        is an end token; for other models, no token is padding.
      seed: the seed for sampling.
      assistant_model: a pair (model, params): a smaller causal model with the same vocabulary, for
        speculative decoding without beams (`Draft`). The assistant changes neither greedy tokens
        nor the distribution of sampled tokens.
      num_assistant_tokens: the constant number of tokens that the assistant proposes at a time.
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
    given = _plain(input_ids)
    check_value("input_ids", given, Sequence[Sequence[int]])
    require(
        given and all(given),
        f"input_ids must be rows of token ids, int[B, T], of at least one token, got {given!r}",
    )
    check_token_ids([*itertools.chain(*given)], num_readable, "input_ids")
    request = request_from_hf(
        fields,
        WHERE,
        causal=causal,
        prompt_length=max(map(len, given)) if causal else 1,
        longest=model.config.max_length,
    )
    mask = _mask(given, attention_mask, request, causal)
    rows = [[*itertools.compress(*pair)] for pair in zip(given, mask, strict=True)]
    # If padding tokens count as positions, padding on the left shifts the tokens after it.
    positions = None
    if attention_mask is not None and not getattr(model, "skip_padding", True):
        positions = [np.flatnonzero(row).tolist() for row in mask]
    request.check_tokens(
        model.config.vocab_size,
        "eos_token_id",
        "pad_token_id",
        "forced_bos_token_id",
        "decoder_start_token_id",
    )
    # Encoder-decoders always use beam search, even with one beam.
    generator = Generator(model, params, draft=_draft(assistant_model, num_assistant_tokens))
    if request.num_beams > 1 or not causal:
        hypotheses = itertools.chain(*search_all(generator, rows, request, positions))
        written = [hypothesis.with_end for hypothesis in hypotheses]
    else:
        written = _sample(generator, rows, request, seed)
    # Join the prompts and the new tokens, and pad them as transformers does.
    pad, end = request.pad_token_id, next(iter(request.eos_token_id), UNSEEN)
    fill = end if pad is None else pad
    before: list[list[Any]] = given if causal else [[request.decoder_start_token_id]] * len(rows)
    prompts, _ = pad_rows(before, fill=fill, left=True)
    # transformers' beam search treats a pad_token_id of 0 as missing.
    if request.num_beams > 1:
        fill = pad or end
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
    """Returns the model as transformers' `generate` runs it, which may change its positions."""
    # A family without a Hugging Face conversion does not count positions differently.
    if family_of(model.config).hf_module is None:
        return model
    config = mapping_of(model.config).in_generate(model.config)
    return model if config == model.config else create(config, model.execution)


def _hf_fields(requested: Mapping[str, object]) -> dict[str, JsonValue]:
    """Converts the arguments to JSON values, and leaves out arguments that are None."""
    for name in requested.keys() - ARGUMENTS - FIELDS.ignored:
        raise UserError(f"{WHERE} has no argument {name!r}: {suggest(name, sorted(EFFECTIVE))}")
    for field in EXTRA_OUTPUTS:
        field.from_hf(requested, f"{WHERE}, which returns only tokens")
    fields = {name: _plain(value) for name, value in requested.items() if value is not None}
    # `top_k=None` disables top-k; for all other arguments None means "use the default".
    return fields | ({"top_k": 0} if requested.get("top_k", 0) is None else {})


def _plain(value: Any) -> Any:
    """Converts arrays of numpy, jax or torch to Python numbers and lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(map(_plain, value)) if isinstance(value, list | tuple) else value


def _mask(
    given: list[list[int]], attention_mask: object, request: GenerationRequest, causal: bool
) -> list[list[int]]:
    """Returns 1 for each token of the prompt and 0 for padding."""
    if attention_mask is not None:
        mask = _plain(attention_mask)
        check_value("attention_mask", mask, Sequence[Sequence[Literal[0, 1]]])
        sizes, expected = ([*map(len, rows)] for rows in (mask, given))
        problem = f"attention_mask must have rows of {expected} values, as input_ids, got {sizes}"
        require(sizes == expected, problem)
        return mask
    # Guess the padding as transformers does. Rows of different lengths are not padded yet.
    pad, padded = request.pad_token_id, causal and len({*map(len, given)}) == 1
    hidden = pad if padded and pad not in request.eos_token_id else None
    return [[int(token != hidden) for token in row] for row in given]


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
    hypotheses = generator.search(rows, request, positions=positions)
    least = min(map(len, hypotheses))
    require(
        least >= request.num_return_sequences,
        f"beam search found only {least} of num_return_sequences "
        f"{request.num_return_sequences}, because few tokens are allowed: give at most {least}",
    )
    return hypotheses


def _sample(
    generator: Generator, rows: Sequence[Sequence[int]], request: GenerationRequest, seed: int
) -> list[list[int]]:
    """Continues each row `num_return_sequences` times; returns the tokens up to the end token."""
    prompts = [row for row in rows for _ in range(request.num_return_sequences)]
    texts: list[list[int]] = [[] for _ in prompts]
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
        texts[new.text] += new.tokens
        if request.end(new.tokens) is not None:
            batch.stop(new.text)
    # Like transformers, replace the last token of a text that reached the limit.
    for text in texts:
        if request.forced_eos_token_id is not None and len(text) == request.max_new_tokens:
            text[-1] = request.forced_eos_token_id
    return [text[: request.end(text)] for text in texts]
