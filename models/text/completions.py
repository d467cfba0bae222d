"""Prompts and their completions. Prompts are read from files, and completions written as JSON."""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Literal

from ...data.common.errors import DataError, UserError
from ...data.common.fields import Checked, FieldError, PositiveInt, Seed, make_record, require
from ...data.common.files import input_lines
from ...data.common.json_lines import parse_line
from ...data.common.json_text import JsonObject, JsonValue, to_json

FinishReason = Literal["stop", "end", "length"]
"""The reason why a text ended: a stop string, the model's end token, or the maximum length."""

_OWN = ("prompt", "seed", "stop_strings", "max_new_tokens")
_FOR_ALL = (
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("num_beams", "length_penalty", "num_return_sequences"),
)
_TOO_SIMILAR = 0.75
"""An unknown field is treated as a typo if it is at least this similar to a known field."""


@dataclasses.dataclass(frozen=True)
class Prompt(Checked):
    """A text to continue, with its individual settings.

    Raises:
      UserError: A stop string is empty, `stop_strings` is one string, or a number is out of range.
    """

    text: str
    seed: Seed | None = None
    """The seed for sampling. If None, the index of the prompt determines the seed."""
    stop_strings: tuple[str, ...] | None = None
    """Strings that end a completion and are not part of it. If None, the call's `stop_strings`
    apply."""
    max_new_tokens: PositiveInt | None = None
    """The maximum length of a completion, in tokens. If None, the call's maximum applies."""
    ids: tuple[int, ...] | None = None
    """The tokens of the prompt. If given, `text` is not read, and the completion is decoded
    without the prompt. If None, `text` is encoded."""
    fields: Mapping[str, JsonValue] = dataclasses.field(default_factory=dict)
    """Other fields of the prompt's line, which are copied to the output."""

    def __post_init__(self) -> None:
        super().__post_init__()
        problem = "a stop string is empty: every text would end before it begins"
        require("" not in (self.stop_strings or ()), problem)

    def with_defaults(self, seed: int, stop_strings: Sequence[str]) -> "Prompt":
        """Returns a copy of the prompt where the given defaults replace settings that are None."""
        return dataclasses.replace(
            self,
            seed=seed if self.seed is None else self.seed,
            stop_strings=tuple(stop_strings) if self.stop_strings is None else self.stop_strings,
        )


@dataclasses.dataclass(frozen=True)
class Completion:
    """A continuation of a prompt."""

    text: str
    """The text after the prompt, without the stop string."""
    finish_reason: FinishReason
    log_probability: float
    """The log-probability of all chosen tokens, in nats, under the model's unmodified logits. It
    includes the end token and the tokens of a stop string."""
    tokens: tuple[int, ...]
    """The new tokens, including a stop string but not the end token."""
    pieces: tuple[str, ...]
    """Each new token as the vocabulary spells it, or "" for an id outside the vocabulary."""
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
    """The number of positions with a token and the number of all computed positions.

    Both numbers are summed over batches.
    """

    used: int = 0
    computed: int = 0

    def add(self, used: int, computed: int) -> None:
        """Adds the positions of a batch."""
        self.used, self.computed = self.used + used, self.computed + computed

    @property
    def padding(self) -> float:
        """The fraction of the computed positions that contain padding."""
        return 1 - self.used / max(self.computed, 1)


def read_prompts(path: str) -> list[Prompt]:
    """Reads prompts from a file.

    Args:
      path: A text file with one prompt per line. If the name ends in ``.jsonl`` or ``.jsonl.gz``,
        each line is a JSON object with ``prompt`` and optionally ``seed``, ``stop_strings`` (one or
        several) and ``max_new_tokens``. Other fields are copied to the output. ``-`` reads text
        from standard input.

    Raises:
      DataError: The file is empty or cannot be read, or a line is not an object with a prompt.
    """
    is_json = path.removesuffix(".gz").endswith(".jsonl")
    prompts = []
    for file, number, line in input_lines(path):
        location = f"{file} line {number}"
        if not is_json:
            prompts.append(Prompt(line))
        elif line.strip():
            prompts.append(_prompt(parse_line(line, location), location))
    require(prompts, f"no prompts in {path}: write one prompt on each line", DataError)
    return prompts


def _prompt(row: JsonObject, location: str) -> Prompt:
    """Converts a parsed line of JSON to a prompt."""
    own = {name: row[name] for name in _OWN if name in row}
    others = {name: value for name, value in row.items() if name not in _OWN}
    require(
        "prompt" in own,
        f"{location} has no 'prompt' (its fields are {', '.join(row) or 'none'}): write "
        '{"prompt": "a text to continue"}',
        DataError,
    )
    if isinstance(own.get("stop_strings"), str):
        own["stop_strings"] = [own["stop_strings"]]
    # Reject misspelled settings, but keep unrelated fields.
    for name in others:
        require(
            name not in _FOR_ALL,
            f"{location} has the field {name!r}, which applies to all prompts: give it "
            f"as an option",
            DataError,
        )
        similar = difflib.get_close_matches(name, _OWN, n=1, cutoff=_TOO_SIMILAR)
        require(
            not similar and name != "stop",
            f"{location} has the unknown field {name!r}: did you mean "
            f"{(similar or ['stop_strings'])[0]!r}?",
            DataError,
        )
    # `Prompt` declares the types and ranges of its fields.
    try:
        return make_record(Prompt, {"text": own.pop("prompt"), **own, "fields": others})
    except FieldError as error:
        name = "prompt" if error.field == "text" else error.field
        raise DataError(f"{location}: {name!r} {error.problem}") from None
    except UserError as error:
        raise DataError(f"{location}: {error}") from None


def completed_to_json(completed: Completed) -> str:
    """Formats a prompt and its completions as one line of JSON.

    The line is ``{"prompt": …, "seed": …, "completions": [{"text", "finish_reason",
    "log_probability", "tokens", "pieces", "log_probabilities"}, …]}``. The other fields of the
    prompt's line come first in the object.
    """
    prompt = completed.prompt
    return to_json(
        {
            **prompt.fields,
            "prompt": prompt.text,
            "seed": prompt.seed,
            "completions": list(map(dataclasses.asdict, completed.completions)),
        }
    )
