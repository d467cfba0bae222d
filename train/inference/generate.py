"""Text in, text out: generation with a tokenizer around it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ...data.errors import UserError
from ...data.io.json_text import JsonValue, to_json
from ...data.tokenizers.base import Tokenizer
from ...models.decoding.generator import Generator
from ...models.decoding.request import BeamSearch, GenerationRequest, Sampling
from ...models.hf.generate import search_all
from ...models.hf.generation_config import request_from_hf
from ...models.model import Model
from ...models.nn.typing import Params
from ..progress import LogFn
from ..runs.load_run import generation_defaults
from .text_model import TextModel

NEW_TOKENS = 200
"""The number of new tokens by default."""
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


@dataclasses.dataclass
class _Row:
    """One continuation as it grows."""

    prompt: str
    prompt_ids: list[int]
    prompt_length: int
    """The number of characters of the decoded prompt."""
    tokens: list[int]
    text: str = ""
    finished: bool = False


class TextGenerator(TextModel):
    """A model and its tokenizer; compiled on first use, once per shape bucket.

    Args:
        model: a causal language model.
        params: its parameters.
        tokenizer: its tokenizer.
        stored: the settings stored with the model, as `models.generation_arguments` returns them;
          None: there are none, and the tokenizer's end token ends a text.
    """

    heads = ("causal_lm",)
    refusal = "continues no text"
    remedy = "give a run of a causal language model"

    def __init__(
        self,
        model: Model,
        params: Params,
        tokenizer: Tokenizer,
        stored: Mapping[str, JsonValue] | None = None,
    ) -> None:
        super().__init__(model, params, tokenizer)
        ends = {"eos_token_id": tokenizer.special_ids.eos}
        self._stored = ends if stored is None else dict(stored)

    @classmethod
    def _open(
        cls, model: Model, params: Params, tokenizer: Tokenizer, folder: str | Path
    ) -> "TextGenerator":
        return cls(model, params, tokenizer, generation_defaults(folder))

    @functools.cached_property
    def _generator(self) -> Generator:
        return Generator(self._model, self._params)

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
            UserError: an option is not supported, or out of range.
        """
        if not prompts:
            raise UserError("there is no prompt: give at least one text")
        longest = max(len(self._encode(prompt)) for prompt in prompts)
        return merged_request(self._stored, options, longest)

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

        Prompts that are longer than the model reads lose their first tokens, of which `log` is
        told; a beam search refuses them.
        """
        if "" in stop:
            raise UserError("a stop string is empty: every text would end before it begins")
        rows = [
            self._row(prompt) for prompt in prompts for _ in range(request.num_return_sequences)
        ]
        longest = self._model.config.max_length
        lengths = [len(self._encode(prompt)) for prompt in prompts]
        too_long = [length for length in lengths if length > longest]
        if too_long and isinstance(request.method, Sampling):
            number = f"{len(too_long):,} of {len(prompts):,} prompts"
            log(
                f"{number} exceed the {longest:,} tokens that the model reads (the longest has "
                f"{max(too_long):,}): only the last {longest - longest // 4:,} of each are read"
            )
        shown = 0
        if isinstance(request.method, BeamSearch):
            found = search_all(
                self._generator, [self._encode(prompt) for prompt in prompts], request
            )
            hypotheses = [hypothesis for best in found for hypothesis in best]
            for row, hypothesis in zip(rows, hypotheses, strict=True):
                self._grow(row, hypothesis.tokens, stop, request)
                row.finished |= hypothesis.ended
        else:
            stream = self._generator.stream([row.prompt_ids for row in rows], request, seed=seed)
            for new in stream:  # [B, n]
                for row, tokens in zip(rows, new.tolist(), strict=True):
                    self._grow(row, tokens, stop, request)
                if on_text is not None:
                    ready = _num_settled(rows[0], stop)
                    on_text(rows[0].text[shown:ready])
                    shown = max(shown, ready)
                if all(row.finished for row in rows):
                    break
        if on_text is not None:
            on_text(rows[0].text[shown:])
        return [Sample(row.prompt, row.text, row.tokens, row.finished) for row in rows]

    def num_tokens(self, prompt: str) -> int:
        """Returns the number of tokens of a prompt, with one that begins a document if any does."""
        return len(self._encode(prompt))

    def _row(self, prompt: str) -> _Row:
        ids = self._encode(prompt)
        # Some tokenizers join a word to the one before: continuations are decoded with the prompt.
        return _Row(prompt, ids, len(self._tokenizer.decode(ids)), [])

    def _encode(self, prompt: str) -> list[int]:
        ids = self._tokenizer.encode(prompt, add_special_tokens=False)
        bos = self._tokenizer.special_ids.bos
        if bos is not None and self._tokenizer.encode(prompt) == [bos, *ids]:
            return [bos, *ids]  # the model was trained on texts that begin with this token
        if ids:
            return ids
        if bos is None:
            raise UserError(
                "the prompt is empty and this tokenizer has no token to begin a document with: "
                "give a --prompt"
            )
        return [bos]

    def _grow(
        self, row: _Row, tokens: list[int], stop: Sequence[str], request: GenerationRequest
    ) -> None:
        """Appends tokens to a row, up to its end or a stop string."""
        for token in tokens:
            if row.finished:
                return
            # The last token of the longest row may be a forced end.
            forced = request.forced_eos_id is not None and (
                len(row.tokens) + 1 == request.max_new_tokens
            )
            if forced or token in request.eos_ids:
                row.finished = True
                return
            row.tokens.append(token)
            row.text = self._tokenizer.decode(row.prompt_ids + row.tokens)[row.prompt_length :]
            found = [index for s in stop if (index := row.text.find(s)) >= 0]
            if found:
                row.text, row.finished = row.text[: min(found)], True


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


def _num_settled(row: _Row, stop: Sequence[str]) -> int:
    """Returns how many characters of a growing text no later token can change."""
    if row.finished:
        return len(row.text)
    # A character of several tokens decodes to U+FFFD until its last one; a
    # stop string may have begun.
    text = row.text.rstrip("�")
    begun = [n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])]
    return len(text) - max(begun, default=0)


def samples_to_json(samples: list[Sample]) -> str:
    """Formats samples as one JSON object: `{"samples": [{"prompt", "text", …}, …]}`."""
    return to_json({"samples": [dataclasses.asdict(s) for s in samples]})
