"""Generates texts that continue prompts, with a causal language model and its tokenizer."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...data.common.fields import PositiveInt, check_value, require, without_none
from ...data.common.json_text import JsonValue, to_json
from ...data.common.progress import AdvanceFn, LogFn, ignore
from ...data.tokenizers.base import Tokenizer
from ..decoding.cached_context import CachedContext
from ..decoding.generator import SEEDS, Generator, check_seed
from ..decoding.request import GenerationRequest
from ..decoding.serving.open_batch import OpenBatch
from ..decoding.serving.score_tokens import TokenAlternatives
from ..decoding.speculative import NUM_DRAFT_TOKENS, Acceptance, Draft
from ..heads.specs import CAUSAL_HEADS
from ..hf.generation_config import request_from_hf
from ..model import Model
from ..nn.typing import Params
from .batches import Callbacks, sample_texts, search_texts
from .completions import Completed, Completion, Prompt
from .folder import generation_defaults
from .growing_text import GrowingText
from .text_model import TextModel, require_texts

NEW_TOKENS = 200
"""Default number of new tokens."""
BATCH_SIZE = 8
"""Default number of completions per batch."""
SAMPLING = ("temperature", "top_k", "top_p", "min_p")
"""Options that imply sampling."""


class TextGenerator(TextModel):
    """Generates texts with a causal language model and its tokenizer.

    The model is compiled on first use, once for each padded shape.

    Args:
        model: a causal language model.
        params: its parameters.
        tokenizer: its tokenizer.
        stored: the settings stored with the model, as `models.generation_arguments` returns them.
          If None, the tokenizer's end token ends a text.
        draft: a smaller model with the same tokenizer that proposes tokens.
    """

    heads = CAUSAL_HEADS
    refusal = "cannot continue text"
    remedy = "give a run of a causal language model"

    def __init__(
        self,
        model: Model,
        params: Params,
        tokenizer: Tokenizer,
        stored: Mapping[str, JsonValue] | None = None,
        *,
        draft: Draft | None = None,
    ) -> None:
        super().__init__(model, params, tokenizer)
        self._draft = draft
        ends = {"eos_token_id": tokenizer.special_ids.eos}
        self._stored = ends if stored is None else dict(stored)

    @classmethod
    def _open(
        cls, model: Model, params: Params, tokenizer: Tokenizer, folder: str | Path
    ) -> "TextGenerator":
        return cls(model, params, tokenizer, generation_defaults(folder))

    def cached_context(self) -> CachedContext:
        """Returns an empty cached context, so that a conversation reads only new tokens."""
        return self._generator.cached_context()

    @property
    def vocab_size(self) -> int:
        """The number of different tokens that the model reads and writes."""
        return self._model.config.vocab_size

    @property
    def stored(self) -> Mapping[str, JsonValue]:
        """The settings stored with the model, as arguments of `models.generate`."""
        return self._stored

    def open_batch(self, max_rows: int) -> OpenBatch:
        """Returns a batch that texts may enter at any time; see `Generator.open_batch`."""
        # Banned sequences come only from the stored settings, so they apply to all texts.
        banned = merged_request(self._stored, {"num_beams": 1}).bad_words_ids
        return self._generator.open_batch(max_rows, banned=banned)

    def token_scores(self, ids: Sequence[int], number: int) -> list[TokenAlternatives]:
        """Returns the log-probabilities of a text's tokens; see `Generator.token_scores`."""
        return self._generator.token_scores(ids, number)

    def context_request(self, **options: JsonValue) -> GenerationRequest:
        """Merges options with the stored settings, for use with a `cached_context`.

        Args:
            **options: arguments of `models.generate`.

        Raises:
            UserError: an option is not supported, or out of range.
        """
        return merged_request(self._stored, {"num_beams": 1, **options})

    def with_draft(
        self, other: "TextGenerator", num_tokens: int = NUM_DRAFT_TOKENS
    ) -> "TextGenerator":
        """Returns a generator with a draft model (speculative decoding).

        The draft model changes neither the texts of greedy decoding nor the distribution of sampled
        texts.

        Args:
            other: the draft model, with the same tokenizer.
            num_tokens: the number of tokens that the draft model proposes at a time.

        Raises:
            UserError: the tokenizers or the vocabularies differ, `num_tokens` is out of range, or
              one of the models cannot discard rejected tokens.
        """
        difference = _difference(self._tokenizer, other.tokenizer)
        require(
            difference is None,
            f"the draft model has another tokenizer: {difference}; give a draft model with the "
            "tokenizer of the model",
        )
        draft = Draft(other._model, other._params, num_tokens)
        draft.check(self._model)
        return TextGenerator(self._model, self._params, self._tokenizer, self._stored, draft=draft)

    @property
    def acceptance(self) -> Acceptance | None:
        """Returns the counts of proposed and accepted tokens, or None without a draft model."""
        return None if self._draft is None else self._generator.acceptance

    @functools.cached_property
    def _generator(self) -> Generator:
        return Generator(self._model, self._params, draft=self._draft)

    def __call__(
        self,
        prompts: Sequence[str | Prompt],
        *,
        batch_size: int | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Continues each prompt, by default all in one batch.

        Args:
            prompts: the texts to continue. An empty text begins a new document.
            batch_size: as in `complete`.
            **options: as in `complete`.

        Returns:
            The completions of all prompts, grouped by prompt.

        Raises:
            UserError: as in `complete`.
        """
        completed = self.complete(prompts, batch_size=batch_size, **options)
        return [*itertools.chain(*(each.completions for each in completed))]

    def request(self, prompts: Sequence[str], **options: JsonValue) -> GenerationRequest:
        """Merges options with the stored settings. By default, 200 tokens are sampled.

        Args:
            prompts: texts.
            **options: arguments of `models.generate`.

        Raises:
            UserError: an option is not supported or out of range, or beam search is combined with a
              draft model.
        """
        require_texts(prompts, "prompts")
        require(prompts, "prompts must not be empty: give at least one text")
        return self._request(max(map(self.num_tokens, prompts)), options)

    def _request(self, longest: int, options: Mapping[str, JsonValue]) -> GenerationRequest:
        """Returns the request for prompts of at most `longest` tokens."""
        request = merged_request(self._stored, options, longest)
        if self._draft is not None:
            self._draft.check_request(request)
        return request

    def complete(
        self,
        prompts: Sequence[str | Prompt],
        *,
        stop_strings: Sequence[str] = (),
        seed: int = 0,
        batch_size: int | None = BATCH_SIZE,
        on_text: Callable[[str], None] = ignore,
        on_batch: AdvanceFn = ignore,
        log: LogFn = print,
        **options: JsonValue,
    ) -> list[Completed]:
        r"""Completes prompts with continuous batching: a new text replaces each finished text.

        The completions of a prompt depend only on its text, its seed and the options, not on other
        prompts. Prompts and texts that exceed the context limit lose their first tokens. A beam
        search instead rejects such prompts and ends such texts.

        Example::

            generator = models.TextGenerator.of_run("runs/quickstart")
            answers = generator.complete(["Q: 2 + 3\nA:", "Q: 4 + 4\nA:"], stop_strings=["\n"])
            print([answer.completions[0].text for answer in answers])

        Args:
            prompts: texts, or prompts with individual settings.
            stop_strings: strings that end a completion and are not part of it.
            seed: the seed of the first prompt. It is incremented for each later prompt. A prompt's
                own `seed` overrides it.
            batch_size: the number of completions generated at a time. If None, all completions are
                generated in one batch.
            on_text: called with each new piece of the first completion.
            on_batch: called when a completion, or a batch of a beam search, is finished. The
                arguments are the number of finished completions and the number of their tokens.
            log: called with lines about padding and about prompts and texts that are too long.
            **options: arguments of `models.generate`, as in `request`.

        Returns:
            The prompts with the settings that were used, and their completions.

        Raises:
            UserError: `prompts` is empty, a prompt is empty and the tokenizer has no token that
              begins a document, a stop string is empty, or an option is out of range.
        """
        require_texts(prompts, "prompts", Prompt)
        require_texts(stop_strings, "stop_strings")
        require(prompts, "prompts must not be empty: give at least one text")
        check_value("batch_size", batch_size, PositiveInt | None)
        check_seed(seed)
        # Each completion of a prompt is a row of the batch.
        rows, request = [], GenerationRequest()
        for i, given in enumerate(prompts):
            prompt = given if isinstance(given, Prompt) else Prompt(given)
            prompt = prompt.with_defaults((seed + i) % SEEDS, stop_strings)
            request, texts = self._begin(prompt, options)
            rows.append(texts)
        # Generate, then report what was truncated and padded.
        flat = [*itertools.chain(*rows)]
        size, callbacks = batch_size or len(flat), Callbacks(on_text, on_batch)
        if request.num_beams > 1:
            padding = search_texts(self._generator, rows, request, size, callbacks=callbacks)
        else:
            self._note_truncation([len(samples[0].prompt_ids) for samples in rows], log)
            padding = sample_texts(self._generator, rows, request, size, callbacks=callbacks)
        callbacks.on_text(flat[0].take_settled())
        self._note_length(flat, request, log)
        if len(prompts) > 1 and batch_size is not None:
            log(f"{len(prompts):,} prompts: {padding}")
        return [
            Completed(samples[0].prompt, tuple(row.completion() for row in samples))
            for samples in rows
        ]

    def _begin(
        self, prompt: Prompt, options: Mapping[str, JsonValue]
    ) -> tuple[GenerationRequest, list[GrowingText]]:
        """Returns the request for a prompt, and an empty text for each of its completions."""
        ids = self.encode(prompt.text) if prompt.ids is None else prompt.ids
        of_prompt = without_none({"max_new_tokens": prompt.max_new_tokens})
        request = self._request(len(ids), {**options, **of_prompt})
        prompt = dataclasses.replace(prompt, max_new_tokens=request.max_new_tokens)
        forced_end = request.forced_eos_token_id is not None
        return request, [
            GrowingText(
                self._tokenizer, prompt, ids, end_ids=request.eos_token_id, forced_end=forced_end
            )
            for _ in range(request.num_return_sequences)
        ]

    def num_tokens(self, prompt: str) -> int:
        """Returns the number of tokens of a prompt, including the token that begins a document."""
        return len(self.encode(prompt))

    def _note_truncation(self, lengths: Sequence[int], log: LogFn) -> None:
        """Logs how many prompts lose their first tokens."""
        longest = self.max_length
        too_long = [length for length in lengths if length > longest]
        if too_long:
            number = f"{len(too_long):,} of {len(lengths):,} prompts"
            log(
                f"{number} exceed the {longest:,} tokens that the model reads (the longest has "
                f"{max(too_long):,}): only the last {longest - longest // 4:,} of each are read"
            )

    def _note_length(
        self, rows: Sequence[GrowingText], request: GenerationRequest, log: LogFn
    ) -> None:
        """Logs how many texts reached the context limit while they were generated."""
        longest = self.max_length
        # Skip texts whose prompts are too long, which `_note_truncation` has already reported.
        began = [row for row in rows if len(row.prompt_ids) <= longest]
        sizes = [len(row.prompt_ids) + len(row.tokens) for row in began]
        # At the model's limit, beam search ends a text, while sampling drops its oldest tokens.
        if request.num_beams > 1:
            most = request.max_new_tokens or longest
            number = sum(
                size >= longest and row.reason == "length" and len(row.tokens) < most
                for size, row in zip(sizes, began, strict=True)
            )
            end = f"end at the {longest:,} tokens that the model reads"
        else:
            number = sum(size > longest for size in sizes)
            end = (
                f"exceed the {longest:,} tokens that the model reads: whenever a text reached that "
                "length, its oldest quarter was dropped"
            )
        if number:
            log(f"{number:,} of {len(rows):,} texts {end}")

    def encode(self, prompt: str) -> list[int]:
        """Returns the tokens of a prompt, including the tokens that begin a document.

        Raises:
            UserError: the prompt is empty, and no token begins a document.
        """
        ids = self._tokenizer.encode(prompt, add_special_tokens=False)
        # Add only the special tokens that precede a text, because special tokens after the text
        # would end it.
        before = self._tokenizer.frame.before if ids else self._tokenizer.begins_document
        require(
            before or ids,
            "the prompt is empty and the tokenizer has no token that begins a document: "
            "give a --prompt",
        )
        return [*before, *ids]


def _difference(one: Tokenizer, other: Tokenizer) -> str | None:
    """Describes how two tokenizers differ; returns None if all ids have the same tokens."""
    if one.fingerprint == other.fingerprint:
        return None
    if one.vocab_size != other.vocab_size:
        return (
            f"it has {other.vocab_size:,} tokens, and the model's tokenizer has {one.vocab_size:,}"
        )
    # The sizes are equal, so find the first id whose tokens differ.
    notes = (
        f"its token {i} is {other.token(i)!r}, but the model's token is {one.token(i)!r}"
        for i in range(one.vocab_size)
        if other.token(i) != one.token(i)
    )
    return next(notes, None)


def merged_request(
    stored: Mapping[str, JsonValue], options: Mapping[str, JsonValue], prompt_length: int = 1
) -> GenerationRequest:
    """Merges options with stored settings. Both use the argument names of `models.generate`.

    A sampling option (`temperature`, `top_k`, `top_p`) disables a stored beam search. If nothing is
    specified, tokens are sampled from the whole vocabulary.

    Args:
        stored: the settings in the model's folder.
        options: settings that override the stored settings.
        prompt_length: the number of tokens of the longest prompt.

    Raises:
        UserError: an option is not supported, or out of range.
    """
    fields = without_none(stored)
    # Choose between beam search and sampling.
    stored_beams = fields.get("num_beams", 1)
    samples = any(options.get(name) is not None for name in ("do_sample", *SAMPLING))
    num_beams = options.get("num_beams", 1 if samples else stored_beams)
    if num_beams == 1 and stored_beams != 1:
        fields.pop("num_return_sequences", None)  # this is the number of beams to return
    if not fields.get("do_sample"):
        fields.setdefault("top_k", 0)  # the default, 50, requires stored sampling
    if "max_length" not in fields:
        fields.setdefault("max_new_tokens", NEW_TOKENS)
    require(
        num_beams != 1 or options.get("length_penalty") is None,
        f"length_penalty {options.get('length_penalty')} requires beam search: give "
        f"num_beams 2 or more, or leave it out",
    )
    # Choose between greedy decoding and sampling.
    by_default = samples or (num_beams == 1 and fields.get("do_sample", stored_beams == 1))
    is_greedy = options.get("temperature") == 0
    do_sample = False if is_greedy else options.get("do_sample", by_default)
    fields |= {**options, "num_beams": num_beams, "do_sample": do_sample}
    return request_from_hf(fields, "generate", causal=True, prompt_length=prompt_length)


def completed_to_samples(completed: Sequence[Completed]) -> str:
    """Formats completions as one JSON object: `{"samples": [{"prompt", "text", …}, …]}`."""
    samples = [
        {
            "prompt": each.prompt.text,
            "text": one.text,
            "tokens": list(one.tokens),
            "finished": one.finish_reason != "length",
        }
        for each in completed
        for one in each.completions
    ]
    return to_json({"samples": samples})
