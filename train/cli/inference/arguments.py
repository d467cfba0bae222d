"""The options that several commands for trained models share."""

import dataclasses

from ....data.common.fields import (
    Fraction,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Seed,
    without_none,
)
from ....models.decoding.request import LengthPenalty, NewTokens, NumBeams, TopP
from ..options import RunName


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """The options that choose the model."""

    run: RunName
    """A run folder, a folder in the Hugging Face format, or a name on the Hugging Face hub."""
    step: NonNegativeInt | None = None
    """The checkpoint. Defaults to the newest checkpoint."""
    ema: bool = False
    """Use the moving average of the parameters (--optimizer.ema-decay)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextArguments(ModelArguments):
    """The options that choose a model and allow longer texts than in training."""

    max_length: PositiveInt | None = None
    """Maximum length of the context, in tokens. It may exceed the length in training. Defaults to
    the length in training. A model with learned positions cannot exceed the length in training."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingArguments(ContextArguments):
    """The options that control how tokens are chosen."""

    max_new_tokens: NewTokens | None = None
    """Maximum length of a continuation, in tokens. By default 200. (For a folder in the Hugging
    Face format, or a run imported from one, generation_config.json may set other defaults for this
    option and the options below.)"""
    do_sample: bool | None = None
    """Sample tokens; --no-do-sample takes the most probable token each time. By default, tokens are
    sampled, unless the folder or another option turns sampling off."""
    temperature: NonNegative | None = None
    """A value below 1 makes the text more predictable, and a value above 1 makes the text more
    varied. With 0, the most probable token is always taken. By default 1."""
    top_k: NonNegativeInt | None = None
    """Sample from the k most probable tokens only. By default, or with 0, all tokens are
    candidates."""
    top_p: TopP | None = None
    """Sample from the smallest set of most probable tokens whose probabilities sum to at least p.
    """
    min_p: Fraction | None = None
    """Sample from the tokens that are at least p times as probable as the most probable token."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end a continuation."""
    seed: Seed = 0
    """Seed for sampling. The same seed gives the same text. If each prompt has a separate seed,
    this option is the seed of the first prompt, and the seed increases by one with each prompt."""

    def requested(self) -> dict[str, int | float]:
        """Returns the options that were given, as keyword arguments of `models.generate`."""
        given = {name: getattr(self, name, None) for name in REQUESTED}
        return without_none(given)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodingArguments(SamplingArguments):
    """The options that control how prompts are continued."""

    repetition_penalty: Positive | None = None
    """A value above 1 makes tokens that have already occurred less likely."""
    num_beams: NumBeams | None = None
    """A number above 1 searches for the most probable continuations with this many beams instead of
    sampling."""
    length_penalty: LengthPenalty | None = None
    """With beams: above 0 favors longer continuations. By default 1."""
    num_return_sequences: PositiveInt | None = None
    """The number of continuations of each prompt. By default 1."""
    batch_size: PositiveInt = 8
    """With many prompts: the number of completions that are generated at once. When one of them
    ends, the next one begins.
    """
    assistant_model: str | None = None
    """A smaller model with the same tokenizer: a run folder, a folder in the Hugging Face format,
    or a name on the Hugging Face hub. The smaller model proposes tokens, and the model of RUN
    checks several of them at once. With temperature 0, the text does not change. With sampling, the
    text changes but its distribution does not. --step and --max-length apply only to RUN."""
    num_assistant_tokens: PositiveInt | None = None
    """With --assistant-model: the number of tokens that the smaller model proposes at a time. By
    default 4."""


REQUESTED = (
    *("max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "num_beams", "length_penalty", "num_return_sequences"),
)
"""The options that `models.generate` takes as arguments."""
