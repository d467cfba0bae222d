"""Text in, text out: generation with a tokenizer around it."""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...data.errors import UserError
from ...data.tokenizers.base import Tokenizer
from ...models.decoding.beam_search import BeamSearch, Searcher
from ...models.decoding.sample import Generator, Sampling
from ...models.hf.generate import search_for
from ...models.hf.generation_config import Request, request_of
from ...models.nn.typing import Params
from ..runs.load_run import asked_of
from .text_model import TextModel

NEW_TOKENS = 200
"""How many there are by default."""
DRAWING = {"temperature", "top_k", "top_p"}
"""What asks for tokens to be drawn."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One continuation."""

    prompt: str
    text: str
    """What follows the prompt."""
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
    """Characters of the decoded prompt."""
    tokens: list[int]
    text: str = ""
    finished: bool = False

    def sample(self) -> Sample:
        """It as it stands."""
        return Sample(self.prompt, self.text, self.tokens, self.finished)


class TextGenerator(TextModel):
    """A model and its tokenizer; compiled on first use, once per shape bucket.

    Args:
      model: a causal language model.
      params: its parameters.
      tokenizer: its tokenizer.
      asked: the settings stored with the model, as `models.generation_arguments` returns them;
        None: there are none, and the tokenizer's end token ends a text.
    """

    heads = ("causal_lm",)
    refusal = "continues no text"
    remedy = "give a run of a causal language model"

    def __init__(
        self,
        model: Any,
        params: Params,
        tokenizer: Tokenizer,
        asked: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(model, params, tokenizer)
        self._asked = {"eos_token_id": tokenizer.special_ids.eos} if asked is None else dict(asked)

    @classmethod
    def _open(
        cls, model: Any, params: Params, tokenizer: Tokenizer, folder: str | Path
    ) -> "TextGenerator":
        return cls(model, params, tokenizer, asked_of(folder))

    @functools.cached_property
    def _generator(self) -> Generator:
        return Generator(self._model, self._params)

    @functools.cached_property
    def _searcher(self) -> Searcher:
        return Searcher(self._model, self._params)

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
          sampling: how tokens are picked, instead of all that the folder asks for but its ends.
          num_samples: continuations of each prompt.
          stop: strings that end a continuation, and are not part of it.
          seed: of the random choices.
          on_text: given the first continuation piece by piece, as it grows.

        Raises:
          UserError: a number is out of range, a stop string is empty, or a
            prompt is and the tokenizer has no token to begin a document with.
        """
        _check_positive("max_new_tokens", max_new_tokens)
        _check_positive("num_samples", num_samples)
        request = dataclasses.replace(
            self.request(prompts, max_new_tokens=max_new_tokens),
            method=sampling,
            num_return=num_samples,
        )
        return self.write(prompts, request, stop=stop, seed=seed, on_text=on_text)

    def request(self, prompts: Sequence[str], **asked: Any) -> Request:
        """What is asked for: by a call, else by the model's folder, else 200 tokens drawn of all.

        Args:
          prompts: texts.
          **asked: in the words of `models.generate`.

        Raises:
          UserError: it is not supported, or out of range.
        """
        longest = max(len(self._encode(prompt)) for prompt in prompts)
        return merged_request(self._asked, asked, longest)

    def write(
        self,
        prompts: Sequence[str],
        request: Request,
        *,
        stop: Sequence[str] = (),
        seed: int = 0,
        on_text: Callable[[str], None] | None = None,
    ) -> list[Sample]:
        """Continues each prompt as a request says; see `__call__`."""
        if "" in stop:
            raise UserError("a stop string is empty: every text would end before it begins")
        if isinstance(request.method, BeamSearch):
            return self._searched(prompts, request, request.method, stop, on_text)
        rows = [self._row(prompt) for prompt in prompts for _ in range(request.num_return)]
        ids = [row.prompt_ids for row in rows]
        shown = 0
        for new in self._generator.stream(
            ids, max_new_tokens=request.max_new_tokens, sampling=request.method, seed=seed
        ):
            for row, tokens in zip(rows, new.tolist(), strict=True):
                self._grow(row, tokens, stop, request)
            if on_text is not None:
                ready = _settled(rows[0], stop)
                on_text(rows[0].text[shown:ready])
                shown = max(shown, ready)
            if all(row.finished for row in rows):
                break
        if on_text is not None:
            on_text(rows[0].text[shown:])
        return [row.sample() for row in rows]

    def _searched(
        self,
        prompts: Sequence[str],
        request: Request,
        method: BeamSearch,
        stop: Sequence[str],
        on_text: Callable[[str], None] | None,
    ) -> list[Sample]:
        """The best continuations of each prompt, known when all are."""
        ids = [self._encode(prompt) for prompt in prompts]
        found = search_for(self._searcher, ids, request, method)
        rows = []
        for prompt, hypotheses in zip(prompts, found, strict=True):
            for hypothesis in hypotheses:
                row = self._row(prompt)
                self._grow(row, hypothesis.tokens, stop, request)
                row.finished |= hypothesis.ended
                rows.append(row)
        if on_text is not None:
            on_text(rows[0].text)
        return [row.sample() for row in rows]

    def _row(self, prompt: str) -> _Row:
        ids = self._encode(prompt)
        # Some tokenizers join a word to the one before: what follows is decoded with it.
        return _Row(prompt, ids, len(self._tokenizer.decode(ids)), [])

    def _encode(self, prompt: str) -> list[int]:
        ids = self._tokenizer.encode(prompt, add_special_tokens=False)
        if ids:
            return ids
        if self._tokenizer.special_ids.bos is None:
            raise UserError(
                "the prompt is empty and this tokenizer has no token to begin a document with: "
                "give a --prompt"
            )
        return [self._tokenizer.special_ids.bos]

    def _grow(self, row: _Row, tokens: list[int], stop: Sequence[str], request: Request) -> None:
        for token in tokens:
            if row.finished:
                return
            # The last token that there is room for may be no choice, but an end.
            forced = request.forced_id is not None and (
                len(row.tokens) == request.max_new_tokens - 1
            )
            if forced or token in request.eos_ids:
                row.finished = True
                return
            row.tokens.append(token)
            row.text = self._tokenizer.decode(row.prompt_ids + row.tokens)[row.prompt_length :]
            found = [place for s in stop if (place := row.text.find(s)) >= 0]
            if found:
                row.text, row.finished = row.text[: min(found)], True


def merged_request(
    folder: Mapping[str, Any], asked: Mapping[str, Any], prompt_length: int = 1
) -> Request:
    """What is asked for, by a call or else by a folder; see `TextGenerator.request`."""
    told = _merged(folder, asked)
    _check_method(told, asked)
    return request_of(told, "generate", causal=True, prompt_length=prompt_length)


def _merged(folder: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """What is asked for, by a call or else by a folder; what draws overrules a folder's beams."""
    own = {name: value for name, value in folder.items() if value is not None}
    searched, draws = own.get("num_beams", 1) != 1, bool(asked.keys() & DRAWING)
    beams = asked.get("num_beams", 1 if draws else own.get("num_beams", 1))
    if beams != 1 or asked.get("temperature") == 0:
        do_sample = False
    else:
        do_sample = draws or own.get("do_sample", not searched)
    if not own.get("do_sample"):
        own.setdefault("top_k", 0)
    if searched and beams == 1:
        own.pop("num_return_sequences", None)  # they were beams
    if "max_length" not in own:
        own.setdefault("max_new_tokens", NEW_TOKENS)
    return own | dict(asked) | {"num_beams": beams, "do_sample": do_sample}


def _check_method(told: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Raises ValueError where options are of another method than the one that is asked for."""
    beams, number = told["num_beams"], told.get("num_return_sequences", 1)
    drawing = sorted(name for name in DRAWING if asked.get(name))
    penalty, length_penalty = told.get("repetition_penalty", 1), asked.get("length_penalty")
    if beams == 1 and length_penalty is not None:
        raise UserError(
            f"length-penalty {length_penalty} is for beams: give --num-beams 2 or more, or leave "
            "it out"
        )
    if beams == 1 and number > 1 and not told["do_sample"]:
        raise UserError(
            f"num-samples {number} would all be the same, the best: leave it out, or give a "
            "--temperature above 0, or --num-beams"
        )
    if beams != 1 and drawing:
        raise UserError(
            f"num-beams {beams} searches and draws nothing: leave "
            f"{drawing[0].replace('_', '-')} {asked[drawing[0]]} out"
        )
    if beams != 1 and penalty != 1:
        raise UserError(
            f"repetition-penalty {penalty} cannot be had with num-beams {beams}: give "
            "--num-beams 1, or --repetition-penalty 1"
        )


def _settled(row: _Row, stop: Sequence[str]) -> int:
    """How many characters of a growing text no later token can change."""
    if row.finished:
        return len(row.text)
    # A character of several tokens decodes to U+FFFD until its last one; a
    # stop string may have begun.
    text = row.text.rstrip("�")
    begun = [n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])]
    return len(text) - max(begun, default=0)


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise UserError(f"{name} {value} must be at least 1")


def samples_to_json(samples: list[Sample]) -> str:
    """One JSON object: `{"samples": [{"prompt", "text", "tokens", "finished"}, …]}`."""
    return json.dumps({"samples": [dataclasses.asdict(s) for s in samples]}, ensure_ascii=False)
