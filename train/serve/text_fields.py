"""The fields that all requests for text share."""

import dataclasses
import re
import secrets
from collections.abc import Mapping
from typing import Annotated

from ...data.common.fields import (
    Checked,
    Fraction,
    NonNegativeInt,
    Range,
    Seed,
    require,
    without_none,
)
from ...data.common.json_text import JsonValue
from ...models.decoding.generator import SEEDS
from ...models.decoding.request import TopP
from ...models.decoding.serving.row_sampling import Penalty, TextSampling
from ...models.text.generate import merged_request

MOST_CHOICES, MOST_STOPS, LONGEST_STOP, MOST_BIASES = 8, 16, 200, 1024
"""The upper bounds of `n`, of the number of stop strings, of the length of a stop string in
characters, and of the number of tokens in `logit_bias`."""

Choices = Annotated[int, Range(least=1, most=MOST_CHOICES)]
Bias = Annotated[float, Range(least=-100, most=100)]
# With values outside these ranges, the logits would overflow float32 and be NaN.
Temperature = Annotated[float, Range(least=0, most=100)]
Repetition = Annotated[float, Range(least=0.01, most=100)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamOptions(Checked):
    """Settings of a stream."""

    include_usage: bool = False
    """Whether the last chunk of a stream includes the token counts (`usage`)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextFields(Checked):
    """The fields that all requests for text have."""

    model: str | None = None
    """The name of the model. Optional if the server has only one model."""
    temperature: Temperature | None = None
    """The temperature of sampling. If it is 0, decoding is greedy. Defaults to the setting stored
    with the model, else 1."""
    top_p: TopP | None = None
    """Tokens are sampled from the most probable tokens whose probabilities sum to p."""
    top_k: NonNegativeInt | None = None
    """Tokens are sampled from the k most probable tokens."""
    min_p: Fraction | None = None
    """Tokens are sampled from those that are at least p times as probable as the most probable
    token."""
    repetition_penalty: Repetition | None = None
    """A value above 1 makes tokens that occur in the prompt or in the text less likely."""
    presence_penalty: Penalty = 0.0
    """A number that is subtracted from the logit of each token that occurs in the text."""
    frequency_penalty: Penalty = 0.0
    """A number that is subtracted from the logit of a token for each of its occurrences in the
    text."""
    logit_bias: Mapping[str, Bias] = dataclasses.field(default_factory=dict)
    """Maps token ids to numbers that are added to the logits of these tokens."""
    n: Choices = 1
    """The number of texts to generate for each prompt."""
    seed: Seed | None = None
    """The seed of sampling. The same seed gives the same text. Defaults to a random seed."""
    stop: str | tuple[str, ...] = ()
    """Strings that end a text. The text does not include them."""
    stream: bool = False
    """Whether the text is sent in pieces while it is generated."""
    stream_options: StreamOptions | None = None
    """Settings of the stream."""
    user: str | None = None
    """Ignored."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            len(self.stops) <= MOST_STOPS and all(0 < len(x) <= LONGEST_STOP for x in self.stops),
            f"stop must have at most {MOST_STOPS} strings of 1 to {LONGEST_STOP} characters",
        )
        require(
            len(self.logit_bias) <= MOST_BIASES,
            f"logit_bias must have at most {MOST_BIASES:,} tokens, got {len(self.logit_bias):,}",
        )
        problem = "stream_options must be left out unless stream is true"
        require(self.stream or self.stream_options is None, problem)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, stored: Mapping[str, JsonValue], *, alternatives: int = 0) -> TextSampling:
        """Returns the sampling settings.

        Args:
            stored: the settings stored with the model.
            alternatives: the number of alternatives to report at each position.

        Raises:
            UserError: a setting is out of range.
        """
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        options = without_none({name: getattr(self, name) for name in names})
        # The stored settings may request beam search, which a continuous batch does not support.
        request = merged_request(stored, {"num_beams": 1, "num_return_sequences": 1, **options})
        merged = {x.name: getattr(request, x.name) for x in dataclasses.fields(request)}
        return TextSampling(
            **merged,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias={_token_id(name): bias for name, bias in self.logit_bias.items()},
            num_alternatives=alternatives,
        )


def seeds_of(fields: TextFields, num_prompts: int) -> list[int]:
    """Returns consecutive seeds, one per prompt, starting at `fields.seed` or at a random seed."""
    first = secrets.randbelow(SEEDS) if fields.seed is None else fields.seed
    return [(first + i) % SEEDS for i in range(num_prompts)]


def _token_id(name: str) -> int:
    problem = f"logit_bias must have token ids as names, got {name[:20]!r}"
    require(re.fullmatch("[0-9]{1,9}", name), problem)
    return int(name)
