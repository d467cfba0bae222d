"""Text in, text out: generation with a tokenizer around it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from ...data.common.errors import UserError
from ...data.common.json_text import JsonValue, to_json
from ...data.common.progress import LogFn
from ...data.dataset import counted
from ...data.tokenizers.base import Tokenizer
from ..decoding.cached_context import CachedContext
from ..decoding.generator import SEEDS, Generator, check_seed, sampling_keys
from ..decoding.request import BeamSearch, GenerationRequest, Sampling
from ..decoding.speculative import NUM_DRAFT_TOKENS, Acceptance, Draft
from ..hf.generate import search_all
from ..hf.generation_config import request_from_hf
from ..model import Model
from ..nn.dropout import RowKeys
from ..nn.heads import CAUSAL_HEADS
from ..nn.typing import Params
from .bucketing import batches_by_length
from .completions import Completed, Positions, Prompt
from .folder import generation_defaults
from .growing_text import GrowingText
from .text_model import TextModel

NEW_TOKENS = 200
"""The number of new tokens by default."""
BATCH_SIZE = 8
"""The number of completions of a batch by default."""
SAMPLING = ("temperature", "top_k", "top_p")
"""Options that make tokens be sampled."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One continuation of a prompt, with its text and the reason why it ended."""

    prompt: str
    text: str
    """The text after the prompt."""
    tokens: list[int]
    """The new tokens, those of a stop string included."""
    finished: bool
    """Whether the model or a stop string ended it, before its length did."""


class TextGenerator(TextModel):
    """A model and its tokenizer; compiled on first use, once per shape bucket.

    Args:
        model: a causal language model.
        params: its parameters.
        tokenizer: its tokenizer.
        stored: the settings stored with the model, as `models.generation_arguments` returns them;
          None: there are none, and the tokenizer's end token ends a text.
        draft: a smaller model with the same tokenizer, which proposes tokens.
    """

    heads = CAUSAL_HEADS
    refusal = "continues no text"
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
        """Returns an empty context, of which a conversation reads only what is new."""
        return self._generator.cached_context()

    def context_request(self, **options: JsonValue) -> GenerationRequest:
        """Combines options with the settings stored with the model, for a `cached_context`.

        Args:
            **options: arguments of `models.generate`.

        Raises:
            UserError: an option is not supported, or out of range.
        """
        return merged_request(self._stored, {"num_beams": 1, **options})

    def with_draft(
        self, other: "TextGenerator", num_tokens: int = NUM_DRAFT_TOKENS
    ) -> "TextGenerator":
        """Returns a generator to which a smaller model proposes tokens (speculative decoding).

        Greedy texts stay the same, and sampled ones have the same distribution.

        Args:
            other: the smaller model, with the same tokenizer.
            num_tokens: the number of tokens that it proposes at a time.

        Raises:
            UserError: the tokenizers or the vocabularies differ, the number is out of range, or
              one of the models cannot take tokens back.
        """
        if (difference := _difference(self._tokenizer, other.tokenizer)) is not None:
            raise UserError(
                f"the draft model has another tokenizer: {difference}; give a draft model with the "
                "tokenizer of the model"
            )
        draft = Draft(other._model, other._params, num_tokens)
        draft.check(self._model)
        return TextGenerator(self._model, self._params, self._tokenizer, self._stored, draft=draft)

    @property
    def acceptance(self) -> Acceptance | None:
        """Returns the counts of proposed and accepted tokens; None: there is no draft model."""
        return None if self._draft is None else self._generator.acceptance

    @functools.cached_property
    def _generator(self) -> Generator:
        return Generator(self._model, self._params, draft=self._draft)

    def __call__(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int,
        sampling: Sampling = Sampling(),
        num_samples: int = 1,
        stop: Sequence[str] = (),
        seed: int = 0,
        on_text: Callable[[str], None] | None = None,
    ) -> list[Sample]:
        """Continues each prompt `num_samples` times, all in one batch.

        Args:
            prompts: texts; an empty one begins a new document.
            max_new_tokens: the longest continuation, in tokens.
            sampling: how tokens are chosen; end tokens and banned sequences stay as stored.
            num_samples: continuations of each prompt.
            stop: strings that end a continuation, and are not part of it.
            seed: the seed of the random choices.
            on_text: called with the first continuation piece by piece, as it grows.

        Raises:
            UserError: a number is out of range, a stop string is empty, or a
              prompt is and the tokenizer has no token to begin a document with.
        """
        stored = self.request(prompts, max_new_tokens=max_new_tokens)
        request = dataclasses.replace(stored, method=sampling, num_return_sequences=num_samples)
        return self.write(prompts, request, stop=stop, seed=seed, on_text=on_text)

    def request(self, prompts: Sequence[str], **options: JsonValue) -> GenerationRequest:
        """Combines options with the settings stored with the model; by default samples 200 tokens.

        Args:
            prompts: texts.
            **options: arguments of `models.generate`.

        Raises:
            UserError: an option is not supported, or out of range, or there are beams and a draft
              model.
        """
        if not prompts:
            raise UserError("there is no prompt: give at least one text")
        longest = max(len(self._encode(prompt)) for prompt in prompts)
        request = merged_request(self._stored, options, longest)
        if self._draft is not None:
            self._draft.check_method(request.method)
        return request

    def write(
        self,
        prompts: Sequence[str],
        request: GenerationRequest,
        *,
        stop: Sequence[str] = (),
        seed: int = 0,
        on_text: Callable[[str], None] | None = None,
        log: LogFn = print,
    ) -> list[Sample]:
        """Continues each prompt as a request says; see `__call__`.

        Prompts that are longer than the model reads lose their first tokens, and so do texts that
        become longer; a beam search refuses the former and ends the latter. `log` is told.
        """
        given = [
            Prompt(prompt, stop=tuple(stop), max_new_tokens=request.max_new_tokens)
            for prompt in prompts
            for _ in range(request.num_return_sequences)
        ]
        rows = [self._row(prompt, request) for prompt in given]
        if isinstance(request.method, Sampling):
            self._note_truncation([self.num_tokens(prompt) for prompt in prompts], log)
        shown = 0
        if isinstance(request.method, BeamSearch):
            found = search_all(
                self._generator, [self._encode(prompt) for prompt in prompts], request
            )
            hypotheses = [hypothesis for best in found for hypothesis in best]
            for row, hypothesis in zip(rows, hypotheses, strict=True):
                row.grow_to(hypothesis)
        else:
            stream = self._generator.stream([row.prompt_ids for row in rows], request, seed=seed)
            for new in stream:  # [B, n]
                for row, tokens in zip(rows, new.tolist(), strict=True):
                    row.grow(tokens)
                if on_text is not None:
                    ready = rows[0].num_settled
                    on_text(rows[0].text[shown:ready])
                    shown = max(shown, ready)
                if all(row.reason for row in rows):
                    break
        if on_text is not None:
            on_text(rows[0].text[shown:])
        self._note_length(rows, request, log)
        return [
            Sample(prompt.text, row.text, row.tokens, row.finished)
            for prompt, row in zip(given, rows, strict=True)
        ]

    def complete(
        self,
        prompts: Sequence[str | Prompt],
        *,
        stop: Sequence[str] = (),
        seed: int = 0,
        batch_size: int = BATCH_SIZE,
        on_batch: Callable[[int, int], None] | None = None,
        log: LogFn = print,
        **options: JsonValue,
    ) -> list[Completed]:
        r"""Completes many prompts, a few at a time; where one has ended, the next takes its row.

        The completions of a prompt depend on its text, its seed and the options alone, not on the
        prompts beside it. Prompts that are longer than the model reads lose their first tokens; a
        beam search refuses them.

        Example::

            generator = models.TextGenerator.of_run("runs/quickstart")
            answers = generator.complete(["Q: 2 + 3\nA:", "Q: 4 + 4\nA:"], stop=["\n"])
            print([answer.completions[0].text for answer in answers])

        Args:
            prompts: texts, or prompts with settings of their own.
            stop: strings that end a completion, and are not part of it.
            seed: the seed of the first prompt, one more for each that follows; those of prompts
              that have none themselves.
            batch_size: completions that are written at a time.
            on_batch: told of each completion, or batch of a beam search, that has ended: how many
              more there are, and of how many tokens.
            log: told how much of what was computed was padding, and of prompts that are too long.
            **options: arguments of `models.generate`, as for `request`.

        Returns:
            The prompts, with the settings that were used, and their completions, in order.

        Raises:
            UserError: there is no prompt, one is empty and the tokenizer has no token to begin a
              document with, a stop string is empty, or an option is out of range.
        """
        if not prompts:
            raise UserError("there is no prompt: give at least one text")
        if batch_size < 1:
            raise UserError(f"batch_size {batch_size} must be at least 1")
        check_seed(seed)
        used, rows = [], []
        request = None
        for i, given in enumerate(prompts):
            prompt = given if isinstance(given, Prompt) else Prompt(given)
            own = {"max_new_tokens": prompt.max_new_tokens} if prompt.max_new_tokens else {}
            request = self.request([prompt.text], **{**options, **own})
            prompt = dataclasses.replace(
                prompt,
                seed=(seed + i) % SEEDS if prompt.seed is None else prompt.seed,
                stop=tuple(stop) if prompt.stop is None else prompt.stop,
                max_new_tokens=request.max_new_tokens,
            )
            used.append(prompt)
            rows.append([self._row(prompt, request) for _ in range(request.num_return_sequences)])
        assert request is not None
        note_batch = on_batch or (lambda prompts, tokens: None)
        if isinstance(request.method, BeamSearch):
            note = self._search(rows, request, batch_size=batch_size, on_batch=note_batch)
        else:
            self._note_truncation([len(samples[0].prompt_ids) for samples in rows], log)
            seeds = [prompt.seed for prompt in used if prompt.seed is not None]
            keys = jnp.concatenate([sampling_keys(s, request.num_return_sequences) for s in seeds])
            flat = [row for samples in rows for row in samples]
            note = self._sample(flat, keys, request, batch_size=batch_size, on_batch=note_batch)
        if len(prompts) > 1:
            log(f"{len(prompts):,} prompts: {note}")
        return [
            Completed(prompt, tuple(row.completion() for row in samples))
            for prompt, samples in zip(used, rows, strict=True)
        ]

    def _sample(
        self,
        rows: Sequence[GrowingText],
        keys: RowKeys,
        request: GenerationRequest,
        *,
        batch_size: int,
        on_batch: Callable[[int, int], None],
    ) -> str:
        """Samples the text of each row; returns how much of what was computed was padding.

        Where a text has ended, the next one takes its row. Models whose rows must advance together
        (`Generator.continues_rows`) write batches of similar length.
        """
        if not self._generator.continues_rows:
            return self._sample_in_step(
                rows, keys, request, batch_size=batch_size, on_batch=on_batch
            )
        num_rows = min(batch_size, len(rows))
        batch = self._generator.continuous_batch(
            [row.prompt_ids for row in rows],
            request,
            keys=keys,
            limits=[row.limit or 1 for row in rows],
            num_rows=num_rows,
        )
        for written in batch:
            row = rows[written.text]
            row.grow(written.tokens, written.log_probs)
            if row.reason is not None:
                batch.stop(written.text)
                on_batch(1, row.num_chosen)
        usage = batch.usage
        read = Positions(usage.tokens_read, usage.positions_read)
        written = Positions(sum(row.num_chosen for row in rows), usage.positions_written)
        return _note_of_padding(f"{counted(num_rows, 'row')} at a time", read, written)

    def _sample_in_step(
        self,
        rows: Sequence[GrowingText],
        keys: RowKeys,
        request: GenerationRequest,
        *,
        batch_size: int,
        on_batch: Callable[[int, int], None],
    ) -> str:
        """Samples the text of each row, those of similar length in one batch; see `_sample`."""
        num_batches = -(-len(rows) // batch_size)
        num_rows = -(-len(rows) // num_batches)
        read, written = Positions(), Positions()
        for batch in batches_by_length([row.prompt_ids for row in rows], num_rows):
            texts = [rows[i] for i in batch]
            # All batches have the same number of rows, so that one program serves them.
            filled = batch + batch[-1:] * (num_rows - len(batch))
            stream = self._generator.stream_with_log_probs(
                [rows[i].prompt_ids for i in filled],
                dataclasses.replace(request, max_new_tokens=max(row.limit or 1 for row in texts)),
                keys=keys[np.asarray(filled)],
            )
            steps = 0
            for tokens, log_probs in stream:  # [B, n] each
                new = zip(texts, tokens.tolist(), log_probs.tolist(), strict=False)  # B is larger
                for row, ids, logs in new:
                    row.grow(ids, logs)
                steps += tokens.shape[1]
                if all(row.reason for row in texts):
                    break
            real, computed = self._generator.positions_read([row.prompt_ids for row in texts])
            read.add(real, computed // len(texts) * num_rows)
            count = sum(row.num_chosen for row in texts)
            written.add(count, num_rows * steps)
            on_batch(len(batch), count)
        batches = "1 batch" if num_batches == 1 else f"{num_batches:,} batches"
        return _note_of_padding(f"{batches} of {counted(num_rows, 'row')}", read, written)

    def _search(
        self,
        rows: Sequence[Sequence[GrowingText]],
        request: GenerationRequest,
        *,
        batch_size: int,
        on_batch: Callable[[int, int], None],
    ) -> str:
        """Searches for the texts of each prompt; returns how much of the batches was padding."""
        prompts = [samples[0] for samples in rows]
        for i, prompt in enumerate(prompts):
            if len(prompt.prompt_ids) > self.max_length:
                raise UserError(
                    f"prompt {i} has {len(prompt.prompt_ids)} tokens: the model takes 1 to "
                    f"{self.max_length}"
                )
        read, num_batches = Positions(), 0
        for limit in dict.fromkeys(prompt.limit for prompt in prompts):
            same = [i for i, prompt in enumerate(prompts) if prompt.limit == limit]
            for chosen in batches_by_length([prompts[i].prompt_ids for i in same], batch_size):
                batch = [same[i] for i in chosen]
                ids = [prompts[i].prompt_ids for i in batch]
                limited = dataclasses.replace(request, max_new_tokens=limit)
                for i, best in zip(batch, search_all(self._generator, ids, limited), strict=True):
                    for row, hypothesis in zip(rows[i], best, strict=True):
                        row.grow_to(hypothesis)
                read.add(sum(map(len, ids)), len(ids) * max(map(len, ids)))
                num_batches += 1
                on_batch(
                    len(batch) * request.num_return_sequences,
                    sum(row.num_chosen for i in batch for row in rows[i]),
                )
        return f"{num_batches:,} batches, {read.padding:.1%} of the positions read were padding"

    def _row(self, prompt: Prompt, request: GenerationRequest) -> GrowingText:
        return GrowingText(
            self._tokenizer,
            prompt,
            self._encode(prompt.text),
            end_ids=request.eos_ids,
            forced_end=request.forced_eos_id is not None,
        )

    def num_tokens(self, prompt: str) -> int:
        """Returns the number of tokens of a prompt, that which begins a document included."""
        return len(self._encode(prompt))

    def _note_truncation(self, lengths: Sequence[int], log: LogFn) -> None:
        """Tells of prompts that lose their first tokens."""
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
        """Tells of texts that came to the length that the model reads while they were written."""
        longest = self.max_length
        began = [row for row in rows if len(row.prompt_ids) <= longest]
        sizes = [len(row.prompt_ids) + len(row.tokens) for row in began]
        if isinstance(request.method, BeamSearch):
            most = request.max_new_tokens or longest
            number = sum(
                size >= longest and not row.finished and len(row.tokens) < most
                for size, row in zip(sizes, began, strict=True)
            )
            end = f"end at the {longest:,} tokens that the model reads"
        else:
            number = sum(size > longest for size in sizes)
            end = (
                f"exceed the {longest:,} tokens that the model reads: whenever a text came to that "
                "length, it went on without its oldest quarter"
            )
        if number:
            log(f"{number:,} of {len(rows):,} texts {end}")

    def _encode(self, prompt: str) -> list[int]:
        ids = self._tokenizer.encode(prompt, add_special_tokens=False)
        # What the frame puts behind a text would end the prompt.
        before = self._tokenizer.frame.before if ids else self._tokenizer.begins_document
        if not (before or ids):
            raise UserError(
                "the prompt is empty and this tokenizer has no token to begin a document with: "
                "give a --prompt"
            )
        return [*before, *ids]


def _note_of_padding(rows: str, read: Positions, written: Positions) -> str:
    return (
        f"{rows}, {read.padding:.1%} of the positions read and {written.padding:.1%} of the tokens "
        "written were padding"
    )


def _difference(one: Tokenizer, other: Tokenizer) -> str | None:
    """Says how two tokenizers differ; None: all ids mean the same."""
    if one.fingerprint == other.fingerprint:
        return None
    if one.vocab_size != other.vocab_size:
        return f"it has {other.vocab_size:,} tokens, the model's {one.vocab_size:,}"
    for i in range(one.vocab_size):
        if one.token(i) != other.token(i):
            return f"its token {i} is {other.token(i)!r}, the model's {one.token(i)!r}"
    return None


def merged_request(
    stored: Mapping[str, JsonValue], options: Mapping[str, JsonValue], prompt_length: int = 1
) -> GenerationRequest:
    """Combines options with stored settings; both have the names of `models.generate`.

    An option that samples (`temperature`, `top_k`, `top_p`) replaces stored beams. Without any
    setting tokens are sampled, among all of them.

    Args:
        stored: settings of the model's folder.
        options: settings that replace them.
        prompt_length: the number of tokens of the longest prompt.

    Raises:
        UserError: an option is not supported, or out of range.
    """
    fields = {name: value for name, value in stored.items() if value is not None}
    stored_beams = fields.get("num_beams", 1)
    samples = any(name in options for name in SAMPLING)
    num_beams = options.get("num_beams", 1 if samples else stored_beams)
    if num_beams == 1 and stored_beams != 1:
        fields.pop("num_return_sequences", None)  # it was the number of beams to return
    if not fields.get("do_sample"):
        fields.setdefault("top_k", 0)  # the default of 50 is for folders that ask for sampling
    if "max_length" not in fields:
        fields.setdefault("max_new_tokens", NEW_TOKENS)
    if num_beams == 1 and options.get("length_penalty") is not None:
        raise UserError(
            f"length_penalty {options['length_penalty']} is for beams: give num_beams 2 or more, "
            "or leave it out"
        )
    if options.get("temperature") == 0:
        do_sample = False
    elif num_beams == 1:
        do_sample = samples or fields.get("do_sample", stored_beams == 1)
    else:
        # Beam search refuses `do_sample`: name only the options, not what is stored.
        do_sample = any(options.get(name) for name in SAMPLING)
        fields = {name: value for name, value in fields.items() if name not in SAMPLING}
    fields |= {**options, "num_beams": num_beams, "do_sample": do_sample}
    return request_from_hf(fields, "generate", causal=True, prompt_length=prompt_length)


def samples_to_json(samples: list[Sample]) -> str:
    """Formats samples as one JSON object: `{"samples": [{"prompt", "text", …}, …]}`."""
    return to_json({"samples": [dataclasses.asdict(s) for s in samples]})
