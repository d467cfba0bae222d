"""A generation request, which determines how tokens are chosen and where texts end.

`models.generate`, the settings in a model's folder, the command line and `Generator` all use the
class `GenerationRequest`. Except for two fields, its fields have the same names and meanings as in
the class `GenerationConfig` of transformers.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from ...data.common.errors import UserError
from ...data.common.fields import (
    Checked,
    Fraction,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    Range,
    check_value,
    require,
)
from ..tokenizer import Vocabulary

NewTokens = Annotated[int, Range(least=1, most=2**24)]
"""The type of a number of new tokens. No model has a context longer than this maximum."""
NumBeams = Annotated[int, Range(least=1, most=2**12)]
LengthPenalty = Annotated[float, Range(least=-10, most=10)]
"""The type of a length penalty. Larger powers of a length overflow float32."""
TopP = Annotated[float, Range(above=0, most=1)]

MAX_EXTRA_TOKENS = 50
"""The maximum number of tokens that a target may have in addition to the length of its source
(Vaswani et al. 2017, section 6.1)."""
SMALLEST_TEMPERATURE = 1e-6
"""Below this temperature, decoding is greedy: smaller divisors would overflow float32."""


@dataclasses.dataclass(frozen=True)
class Sampling(Checked):
    """The settings that determine how each token is chosen.

    Raises:
      UserError: a value is out of range.
    """

    temperature: NonNegative = 1.0
    """Divides the logits; below 1e-6, the best token is always chosen (greedy)."""
    top_k: PositiveInt | None = None
    """Samples only among the k best tokens."""
    top_p: TopP | None = None
    """Samples only among the best tokens that together have the probability p (Holtzman et al.
    2020)."""
    min_p: Fraction | None = None
    """Samples only among the tokens that are at least p times as probable as the best token."""
    repetition_penalty: Positive = 1.0
    """Divides the logits of tokens that have already occurred, or multiplies negative logits
    (Keskar et al. 2019, section 4.1)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationRequest(Sampling):
    """All settings that determine the generated tokens, except for the rows and the seed.

    Without `do_sample` and with one beam, the best token is always chosen (greedy).

    Raises:
      UserError: a value is out of range.
    """

    do_sample: bool = False
    """Whether tokens are sampled."""
    max_new_tokens: NewTokens | None = None
    """Maximum number of new tokens of a row. If None, beam search uses all positions of the
    model."""
    max_extra_tokens: NonNegativeInt | None = None
    """For beam search, the maximum number of tokens that a target may have in addition to the
    length of its source. transformers has no such setting."""
    min_new_tokens: NonNegativeInt = 0
    """For an encoder-decoder, the minimum number of tokens of a target before its end token."""
    num_return_sequences: PositiveInt = 1
    """Number of results per row."""
    num_beams: NumBeams = 1
    """Number of beams per row, K. Above 1, beam search finds the most probable sequences."""
    length_penalty: LengthPenalty = 1.0
    """The exponent α: log-probabilities are divided by the length n to the power of α. The length
    includes the end token. Greedy search ignores this exponent. Larger powers of a length overflow
    float32."""
    penalty_form: Literal["power", "gnmt"] = "power"
    """The divisor of log-probabilities. power: n^α. gnmt: ((5 + n) / 6)^α, as published (Wu et al.
    2016). transformers has no such setting."""
    early_stopping: bool | Literal["never"] = False
    """When the search of a row stops. False: when a beam that ended now would not be among the K
    best hypotheses. True: when K hypotheses are finished. never: when no live beam can win any
    more."""
    renormalize_logits: bool = False
    """Whether probabilities are normalized over the allowed tokens only."""
    no_repeat_ngram_size: NonNegativeInt = 0
    """If above 0, sequences of this many tokens must not repeat in a target of an encoder-decoder.
    The target includes the start token.
    """
    bad_words_ids: tuple[tuple[NonNegativeInt, ...], ...] = ()
    """Sequences of one or more tokens that are never generated."""
    decoder_start_token_id: NonNegativeInt | None = None
    """The first token of the targets of an encoder-decoder."""
    forced_bos_token_id: NonNegativeInt | None = None
    """For beam search, the token that is forced after `decoder_start_token_id`, such as the target
    language of an mBART. The model does not choose this token, and its probability is not counted
    (as in transformers).
    """
    eos_token_id: tuple[NonNegativeInt, ...] = ()
    """Tokens that end a row. Ids beyond the vocabulary, which some published folders contain, have
    no effect."""
    forced_eos_token_id: NonNegativeInt | None = None
    """The token, one of `eos_token_id`, that is forced as the last token at the maximum length. The
    model does not choose it, and its probability is not counted (as in transformers)."""
    pad_token_id: NonNegativeInt | None = None
    """The token that pads rows that have ended."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # Greedy search has one result per row, and beam search has at most one result per beam.
        require(
            self.samples or self.num_return_sequences <= self.num_beams,
            f"num_return_sequences {self.num_return_sequences} must be at most num_beams "
            f"{self.num_beams} unless tokens are sampled (do_sample, or a temperature above 0)",
        )

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled, so that one row may have several different results."""
        return self.do_sample and self.temperature >= SMALLEST_TEMPERATURE

    def check_tokens(self, vocab_size: int, *names: str) -> None:
        """Checks the tokens of the named fields. `bad_words_ids` are checked where they are used.

        Raises:
            UserError: A token is not in the vocabulary.
        """
        for name in names:
            value = getattr(self, name)
            for token in value if isinstance(value, tuple) else (value,):
                problem = f"{name} {token} is not within the vocabulary of {vocab_size}"
                require(token is None or token < vocab_size, problem)

    def end(self, tokens: list[int]) -> int | None:
        """Returns the length of a row through its first end token, or None if there is none."""
        return next((i + 1 for i, token in enumerate(tokens) if token in self.eos_token_id), None)


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """A sequence of tokens that beam search found."""

    tokens: list[int]
    """The tokens, excluding the prompt, the start token and the end token."""
    score: float
    """The score that ranks hypotheses: `log_probability` divided by the length penalty."""
    log_probability: float
    """The log-probability of the tokens, including the end token, in nats."""
    end_id: int | None
    """The end token, or None if the maximum length was reached."""

    @property
    def ended(self) -> bool:
        """Whether the hypothesis has an end token."""
        return self.end_id is not None

    @property
    def with_end(self) -> list[int]:
        """The tokens and the end token, if there is one."""
        return self.tokens if self.end_id is None else [*self.tokens, self.end_id]


def check_token_ids(ids: Sequence[Any], vocab_size: int, name: str) -> None:
    """Checks the tokens of a row.

    Args:
        ids: One or more token ids.
        vocab_size: The size of the vocabulary of the model that reads the tokens.
        name: The name of the row, for messages.

    Raises:
        UserError: A token is not an integer, or not in the vocabulary.
    """
    # Only format the name for a token that is not a plain integer.
    for token in ids:
        if type(token) is not int:
            check_value(f"{name}: token id", token, int)
    # For an id outside the vocabulary, JAX would return wrong logits without an error.
    require(
        0 <= min(ids) <= max(ids) < vocab_size,
        f"token ids {min(ids)} … {max(ids)} of {name} are not within the vocabulary of "
        f"{vocab_size}: use the model's own tokenizer",
    )


def published_request(tokenizer: Vocabulary, vocab_size: int) -> GenerationRequest:
    """Returns the beam search settings of Vaswani et al. 2017, for a model trained with flaxzoo.

    Special tokens (except for the end token) and ids without a token are banned.

    Args:
        tokenizer: The tokenizer of the model.
        vocab_size: The size of the model's target vocabulary.

    Raises:
        UserError: The tokenizer has no tokens that start and end a translation.
    """
    # Use the vocabulary of targets, which may differ from the vocabulary of sources.
    target, special = tokenizer.target, tokenizer.target.special_ids
    if special.bos is None or special.eos is None:
        raise UserError(
            f"this {tokenizer.kind} tokenizer lacks a token that starts or ends a text: train a "
            "tokenizer (data.tokenizer.kind sentencepiece-bpe)"
        )
    # Ban tokens that are not text, and the remaining ids of the embedding, which have no token.
    no_text = {special.pad, special.unk, special.bos, special.cls, special.sep, special.mask}
    known = sorted(token for token in no_text - {special.eos} if token is not None)
    # The number of beams, α, and the length limit are from section 6.1. An end token is required.
    return GenerationRequest(
        num_beams=4,
        length_penalty=0.6,
        penalty_form="gnmt",
        early_stopping="never",
        max_extra_tokens=MAX_EXTRA_TOKENS,
        bad_words_ids=tuple((token,) for token in (*known, *range(target.vocab_size, vocab_size))),
        decoder_start_token_id=special.bos,
        eos_token_id=(special.eos,),
    )
