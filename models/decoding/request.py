"""A request for tokens: how they are chosen, how many, and where they end.

`models.generate`, the settings of a folder, the command line and `Generator` all use it, so that
it is decided once whether tokens are sampled or searched for, and refused in the same words.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Literal

from ...data.common.errors import UserError, check_finite_number, check_whole
from ..tokenizer import Vocabulary

MAX_PENALTY = 10
"""Powers of a length beyond it overflow float32."""
MOST_NEW_TOKENS = 2**24
"""More of them than any model has read at once; a folder that asks for more would never end."""
MOST_BEAMS = 2**12
MAX_EXTRA_TOKENS = 50
"""The longest translation, in tokens beyond its source's (Vaswani et al. 2017, section 6.1)."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Chooses one token after the other; with temperature 0 the best one each time (greedy).

    Raises:
      UserError: a value is out of range.
    """

    temperature: float = 1.0
    """Divides the logits; 0 always takes the best token."""
    top_k: int | None = None
    """Samples among the k best tokens only."""
    top_p: float | None = None
    """Samples among the best tokens that together have probability p (Holtzman et al. 2020)."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens already seen, or multiplies them if negative (Keskar et al.
    2019, section 4.1)."""

    def __post_init__(self) -> None:
        for name in ("temperature", "repetition_penalty"):
            check_finite_number(name, getattr(self, name))
        if self.top_p is not None:
            check_finite_number("top_p", self.top_p)
        if self.top_k is not None:
            check_whole("top_k", self.top_k)
        if self.temperature < 0:
            raise UserError(f"temperature {self.temperature} must be at least 0 (0: greedy)")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k {self.top_k} must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p {self.top_p} must be in (0, 1]")
        if not self.repetition_penalty > 0:
            raise UserError(f"repetition_penalty {self.repetition_penalty} must be above 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamSearch:
    """Searches for the most probable sequences; with one beam it is greedy.

    Raises:
      UserError: a value is out of range.
    """

    num_beams: int = 4
    """The number of beams of each row, K; 1: greedy search."""
    length_penalty: float = 0.6
    """α: log-probabilities are divided by a power α of the length n, which counts the end token.
    Greedy search ignores it."""
    penalty_form: Literal["gnmt", "power"] = "gnmt"
    """gnmt: ((5 + n) / 6)^α, as published. power: n^α, as in transformers."""
    early_stopping: bool | Literal["never"] = "never"
    """When a row is done. never: when no live beam can win any more. True: when K hypotheses are
    finished. False: when a beam that ended now would not be among the K best, as in
    transformers."""
    renormalize: bool = False
    """Whether probabilities are normalized over the tokens that may be chosen, not over all."""
    min_tokens: int = 0
    """The shortest target of an encoder-decoder, in tokens before the end token."""
    no_repeat: int = 0
    """If above 0, no sequence of so many tokens stands twice in a target of an encoder-decoder, its
    start token included."""

    def __post_init__(self) -> None:
        for name in ("num_beams", "min_tokens", "no_repeat"):
            check_whole(name, getattr(self, name))
        check_finite_number("length_penalty", self.length_penalty)
        if self.num_beams < 1:
            raise UserError(f"num_beams {self.num_beams} must be at least 1 (1: greedy)")
        if self.num_beams > MOST_BEAMS:
            raise UserError(
                f"num_beams {self.num_beams} is too large: choose at most {MOST_BEAMS:,}"
            )
        if abs(self.length_penalty) > MAX_PENALTY:
            raise UserError(
                f"length_penalty {self.length_penalty} must be between -{MAX_PENALTY} and "
                f"{MAX_PENALTY}, for example 0.6"
            )
        for name in ("min_tokens", "no_repeat"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} {getattr(self, name)} must be at least 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """Everything that decides which tokens a model writes, but for the rows and the seed.

    Raises:
      UserError: a value is out of range.
    """

    method: Sampling | BeamSearch
    max_new_tokens: int | None = None
    """The longest row that is written, in tokens. None, for beam search: as far as the model has
    positions."""
    max_extra_tokens: int | None = None
    """The longest target of a beam search, in tokens beyond its source's."""
    num_return_sequences: int = 1
    """How many results each row has."""
    banned: tuple[tuple[int, ...], ...] = ()
    """Sequences of one or more tokens that are never written."""
    start_id: int | None = None
    """The first token of the targets of an encoder-decoder."""
    forced_bos_id: int | None = None
    """The token that follows it, for beam search, as the language of an mBART's target. The model
    does not choose it, and its probability is not counted (as in transformers)."""
    eos_ids: tuple[int, ...] = ()
    """Tokens that end a row. Ids beyond the vocabulary, as some published folders have, end
    nothing."""
    forced_eos_id: int | None = None
    """The token, one of `eos_ids`, that is written where there is space for only one more. The
    model does not choose it, and its probability is not counted (as in transformers)."""
    pad_id: int | None = None
    """The token that fills up rows that have ended."""

    def __post_init__(self) -> None:
        check_whole("num_return_sequences", self.num_return_sequences)
        tokens = "start_id", "forced_bos_id", "forced_eos_id", "pad_id"
        for name in ("max_new_tokens", "max_extra_tokens", *tokens):
            if (value := getattr(self, name)) is not None:
                check_whole(name, value)
        for name, tokens in (("eos_ids", self.eos_ids), ("banned", itertools.chain(*self.banned))):
            for token in tokens:
                check_whole(f"{name}: token id", token)
        beams = self.method.num_beams if isinstance(self.method, BeamSearch) else 1
        sampled = isinstance(self.method, Sampling) and self.method.temperature > 0
        number = self.num_return_sequences
        if number < 1 or (number > beams and not sampled):
            raise UserError(
                f"num_return_sequences {number} must be at least 1, and at most num_beams {beams} "
                "unless tokens are sampled (do_sample, or a temperature above 0)"
            )
        if self.max_new_tokens is None and isinstance(self.method, Sampling):
            raise UserError("max_new_tokens is missing: say how many tokens to generate")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens {self.max_new_tokens} must be at least 1")
        if self.max_new_tokens is not None and self.max_new_tokens > MOST_NEW_TOKENS:
            raise UserError(
                f"max_new_tokens {self.max_new_tokens} is too large: choose at most "
                f"{MOST_NEW_TOKENS:,}"
            )
        if self.max_extra_tokens is not None and self.max_extra_tokens < 0:
            raise UserError(f"max_extra_tokens {self.max_extra_tokens} must be at least 0")
        if min(self.eos_ids, default=0) < 0:
            raise UserError(f"eos_ids {self.eos_ids} must be at least 0")

    def check_tokens(self, vocab_size: int, **names: str) -> None:
        """Checks that tokens are in the vocabulary; `banned` is checked where it is used.

        Args:
            vocab_size: The number of tokens of the model that writes.
            names: For each field to check its name for messages.

        Raises:
            UserError: A token is not in the vocabulary.
        """
        for field, name in names.items():
            value = getattr(self, field)
            for token in value if isinstance(value, tuple) else (value,):
                if token is not None and not 0 <= token < vocab_size:
                    raise UserError(f"{name} {token} is not within the vocabulary of {vocab_size}")

    def end(self, tokens: list[int]) -> int | None:
        """Returns the length of a row up to its end token, included; None: it has none yet."""
        return next((i + 1 for i, token in enumerate(tokens) if token in self.eos_ids), None)


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """A sequence of tokens that beam search found."""

    tokens: list[int]
    """The tokens that were found, with neither start token nor end token nor prompt."""
    score: float
    """The value that hypotheses are ranked by: `log_probability` over the length penalty."""
    log_probability: float
    """The log-probability of the tokens, the end token included, in nats."""
    end_id: int | None
    """The token that ended it; None: it has the greatest length allowed."""

    @property
    def ended(self) -> bool:
        """Whether it has an end token."""
        return self.end_id is not None


def check_token_ids(ids: Sequence[Any], vocab_size: int, name: str) -> None:
    """Checks the tokens of a row.

    Args:
        ids: One or more token ids.
        vocab_size: The number of tokens of the model that reads them.
        name: The name of the row, for messages.

    Raises:
        UserError: One is not a whole number, or not in the vocabulary.
    """
    for token in ids:
        check_whole(f"{name}: token id", token)
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        raise UserError(
            f"token ids {min(ids)} … {max(ids)} of {name} are not within the vocabulary of "
            f"{vocab_size}: use the model's own tokenizer"
        )


def published_request(tokenizer: Vocabulary, vocab_size: int) -> GenerationRequest:
    """Returns the search of Vaswani et al. 2017, for a model that was trained here.

    It bans tokens that are no text: special ones but the end, and rows of the vocabulary without a
    token.

    Args:
        tokenizer: The tokenizer of the model.
        vocab_size: The size of the model's vocabulary, that of the targets.

    Raises:
        UserError: The tokenizer has no tokens that start and end a translation.
    """
    target, special = tokenizer.target, tokenizer.target.special_ids
    if special.bos is None or special.eos is None:
        raise UserError(
            f"this {tokenizer.kind} tokenizer has no token that starts a text and one that ends "
            "it: train one (data.tokenizer.kind sentencepiece-bpe)"
        )
    no_text = {special.pad, special.unk, special.bos, special.cls, special.sep, special.mask}
    known = sorted(token for token in no_text - {special.eos} if token is not None)
    return GenerationRequest(
        method=BeamSearch(),
        max_extra_tokens=MAX_EXTRA_TOKENS,
        banned=tuple((token,) for token in (*known, *range(target.vocab_size, vocab_size))),
        start_id=special.bos,
        eos_ids=(special.eos,),
    )
