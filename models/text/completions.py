"""Prompts and their completions: reads prompts from files and formats completions as JSON."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Literal

from ...data.common.errors import DataError, UserError
from ...data.common.files import input_lines
from ...data.common.json_lines import parse_line
from ...data.common.json_text import JsonObject, JsonValue, to_json

FinishReason = Literal["stop", "end", "length"]
"""Why a text ends: a stop string, the model's end token, or the maximum length."""

_OWN = ("prompt", "seed", "stop_strings", "max_new_tokens")
_FOR_ALL = (
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("num_beams", "length_penalty", "num_return_sequences"),
)
_TOO_SIMILAR = 0.75
"""Unknown fields that resemble a known name by more than this are treated as typos."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A text to continue, with its individual settings.

    Raises:
      UserError: A stop string is empty, they are one string, or a number is out of range.
    """

    text: str
    seed: int | None = None
    """The seed for sampling. If None, it depends on the prompt's index."""
    stop_strings: tuple[str, ...] | None = None
    """Strings that end a completion and are not part of it. If None, the call's setting."""
    max_new_tokens: int | None = None
    """The maximum length of a completion, in tokens. If None, the call's setting."""
    fields: Mapping[str, JsonValue] = dataclasses.field(default_factory=dict)
    """Other fields of its line, which are copied to the output."""

    def __post_init__(self) -> None:
        if isinstance(self.stop_strings, str):
            raise UserError(
                f"stop_strings is one string, {self.stop_strings!r}: give a tuple of texts"
            )
        if "" in (self.stop_strings or ()):
            raise UserError("a stop string is empty: every text would end before it begins")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise UserError(f"a prompt has 'max_new_tokens' {self.max_new_tokens}: give at least 1")
        if self.seed is not None and not 0 <= self.seed < 2**32:
            raise UserError(f"a prompt has 'seed' {self.seed}: give one from 0 to {2**32 - 1}")


@dataclasses.dataclass(frozen=True)
class Completion:
    """A continuation of a prompt."""

    text: str
    """The text after the prompt, without the stop string."""
    finish_reason: FinishReason
    log_probability: float
    """The log-probability of all chosen tokens under the model itself, in nats, including the end
    token and the tokens of a stop string."""
    tokens: tuple[int, ...]
    """The new tokens, including a stop string but not the end token."""
    pieces: tuple[str, ...]
    """The tokens as the vocabulary writes them; empty for an id that it does not have."""
    log_probabilities: tuple[float, ...] | None
    """The log-probability of each token, in nats; None for a beam search."""


@dataclasses.dataclass(frozen=True)
class Completed:
    """A prompt and its completions."""

    prompt: Prompt
    """The prompt with the settings that were used."""
    completions: tuple[Completion, ...]


@dataclasses.dataclass
class Positions:
    """Counts of used and computed positions over several batches."""

    used: int = 0
    computed: int = 0

    def add(self, used: int, computed: int) -> None:
        """Adds the positions of a batch."""
        self.used, self.computed = self.used + used, self.computed + computed

    @property
    def padding(self) -> float:
        """The fraction that was padding."""
        return 1 - self.used / max(self.computed, 1)


def read_prompts(path: str) -> list[Prompt]:
    """Reads prompts from a file.

    Args:
      path: A text file with one prompt per line; or JSON lines, if the name ends in ``.jsonl`` or
        ``.jsonl.gz``: objects with ``prompt`` and optionally ``seed``, ``stop_strings`` (one or
        several) and ``max_new_tokens``. Other fields are kept. ``-`` reads text from standard
        input.

    Raises:
      DataError: The file is empty or cannot be read, or a line is not such an object.
    """
    is_json = path.removesuffix(".gz").endswith(".jsonl")
    prompts = []
    for file, number, line in input_lines(path):
        location = f"{file} line {number}"
        if not is_json:
            prompts.append(Prompt(line))
        elif line.strip():
            prompts.append(_prompt(parse_line(line, location), location))
    if not prompts:
        raise DataError(f"no prompts in {path}: write one on each line")
    return prompts


def _prompt(row: JsonObject, location: str) -> Prompt:
    """Returns the prompt of a line of JSON."""
    text, stop = row.get("prompt"), row.get("stop_strings")
    if not isinstance(text, str):
        seen = ", ".join(row) or "none"
        problem = "has no field" if "prompt" not in row else "has no text in its field"
        raise DataError(
            f"{location} {problem} 'prompt' (its fields are {seen}): write "
            '{"prompt": "a text to continue"}'
        )
    stops = [stop] if isinstance(stop, str) else stop
    if stops is not None and not (
        isinstance(stops, list) and all(isinstance(part, str) for part in stops)
    ):
        raise DataError(
            f"{location} has 'stop_strings' {to_json(stop)}: give a text, or a list of texts"
        )
    numbers: dict[str, int | None] = {}
    for name in ("seed", "max_new_tokens"):
        value = row.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise DataError(f"{location} has {name!r} {to_json(value)}: give a whole number")
        numbers[name] = value
    # Reject misspelled settings, but keep unrelated fields.
    others = {name: value for name, value in row.items() if name not in _OWN}
    for name in others:
        if name == "stop":
            raise DataError(f"{location} has the field 'stop': its name is 'stop_strings'")
        if name in _FOR_ALL:
            raise DataError(
                f"{location} has the field {name!r}, which is one for all prompts: give it as an "
                "option"
            )
        similar = difflib.get_close_matches(name, _OWN, n=1, cutoff=_TOO_SIMILAR)
        if similar:
            raise DataError(
                f"{location} has the unknown field {name!r}: did you mean {similar[0]!r}?"
            )
    try:
        chosen = None if stops is None else tuple(str(part) for part in stops)
        return Prompt(text, numbers["seed"], chosen, numbers["max_new_tokens"], others)
    except UserError as error:
        raise DataError(f"{location}: {error}") from None


def completed_to_json(completed: Completed) -> str:
    """Formats a prompt and its completions as one line of JSON.

    ``{"prompt": …, "seed": …, "completions": [{"text", "finish_reason", "log_probability",
    "tokens", "pieces", "log_probabilities"}, …]}``, preceded by the other fields of the prompt's
    line.
    """
    prompt = completed.prompt
    return to_json(
        {
            **prompt.fields,
            "prompt": prompt.text,
            "seed": prompt.seed,
            "completions": [dataclasses.asdict(each) for each in completed.completions],
        }
    )
