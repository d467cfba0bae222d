"""Text in, text out: generation with a tokenizer around it."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..data.tokenizer import Tokenizer
from ..models.generation import Generator, Sampling
from ..models.loading import load
from .opening import open_run
from .tasks import task_of


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


class TextGenerator:
    """A model and its tokenizer; compiled on first use, once per shape bucket."""

    def __init__(self, model: Any, params: Any, tokenizer: Tokenizer) -> None:
        self._generator = Generator(model, params)
        self._tokenizer = tokenizer

    @classmethod
    def of_run(cls, folder: str | Path, *, step: int | None = None) -> "TextGenerator":
        """The model of a run folder.

        Raises:
          FileNotFoundError: it is not a run folder, or has no such checkpoint.
          ValueError: its model is no causal language model.
        """
        config, tokenizer = open_run(folder)
        head = getattr(config.model, "head", None)
        if head != "causal_lm":
            raise ValueError(
                f"a model with the head {head} continues no text: give a run of a causal language "
                f"model, or use the command {task_of(config.data).use.split()[0]}"
            )
        return cls(*load(folder, step=step), tokenizer)

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
          sampling: how tokens are picked.
          num_samples: continuations of each prompt.
          stop: strings that end a continuation, and are not part of it.
          seed: of the random choices.
          on_text: given the first continuation piece by piece, as it grows.

        Raises:
          ValueError: a number is out of range, a stop string is empty, or a
            prompt is and the tokenizer has no token to begin a document with.
        """
        _check_positive("max_new_tokens", max_new_tokens)
        _check_positive("num_samples", num_samples)
        if "" in stop:
            raise ValueError("a stop string is empty: every text would end before it begins")
        rows = [self._row(prompt) for prompt in prompts for _ in range(num_samples)]
        ids = [row.prompt_ids for row in rows]
        shown = 0
        for new in self._generator.stream(
            ids, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed
        ):
            for row, tokens in zip(rows, new.tolist(), strict=True):
                self._grow(row, tokens, stop)
            if on_text is not None:
                ready = _settled(rows[0], stop)
                on_text(rows[0].text[shown:ready])
                shown = max(shown, ready)
            if all(row.finished for row in rows):
                break
        if on_text is not None:
            on_text(rows[0].text[shown:])
        return [Sample(row.prompt, row.text, row.tokens, row.finished) for row in rows]

    def _row(self, prompt: str) -> _Row:
        ids = self._encode(prompt)
        # Some tokenizers join a word to the one before: what follows is decoded with it.
        return _Row(prompt, ids, len(self._tokenizer.decode(ids)), [])

    def _encode(self, prompt: str) -> list[int]:
        ids = self._tokenizer.encode(prompt, add_special_tokens=False)
        if ids:
            return ids
        if self._tokenizer.special_ids.bos is None:
            raise ValueError(
                "the prompt is empty and this tokenizer has no token to begin a document with: "
                "give a --prompt"
            )
        return [self._tokenizer.special_ids.bos]

    def _grow(self, row: _Row, tokens: list[int], stop: Sequence[str]) -> None:
        for token in tokens:
            if row.finished:
                return
            if token == self._tokenizer.special_ids.eos:
                row.finished = True
                return
            row.tokens.append(token)
            row.text = self._tokenizer.decode(row.prompt_ids + row.tokens)[row.prompt_length :]
            found = [place for s in stop if (place := row.text.find(s)) >= 0]
            if found:
                row.text, row.finished = row.text[: min(found)], True


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
        raise ValueError(f"{name} {value} must be at least 1")


def samples_to_json(samples: list[Sample]) -> str:
    """One JSON object: `{"samples": [{"prompt", "text", "tokens", "finished"}, …]}`."""
    return json.dumps({"samples": [dataclasses.asdict(s) for s in samples]}, ensure_ascii=False)
