"""Combines sampling settings that differ between the rows of one batch."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import jax
import numpy as np

from ....data.common.fields import NonNegativeInt, Range
from ...nn.typing import Array
from ..banned_sequences import BannedSequences, last_tokens
from ..continuous_batch import Text
from ..request import GenerationRequest
from ..sample import Adjustments, History, SamplingParams

MOST_ALTERNATIVES = 20
"""The number of alternatives that are computed for each token if a text requests alternatives."""

Penalty = Annotated[float, Range(least=-2, most=2)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSampling(GenerationRequest):
    """The settings that determine how the tokens of one text are chosen.

    Raises:
      UserError: a value is out of range.
    """

    presence_penalty: Penalty = 0.0
    """Subtracted from the logit of each token that occurs in the generated text."""
    frequency_penalty: Penalty = 0.0
    """Subtracted from a token's logit once for each time that it occurs in the generated text."""
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """Maps tokens to numbers that are added to their logits."""
    num_alternatives: NonNegativeInt = 0
    """The number of most probable tokens that are reported at each position."""

    @property
    def is_adjusted(self) -> bool:
        """Whether the logits are changed by a penalty or a bias."""
        changes_penalty = self.repetition_penalty != 1
        return any(
            (self.presence_penalty, self.frequency_penalty, changes_penalty, self.logit_bias)
        )

    @property
    def is_filtered(self) -> bool:
        """Whether some tokens are hidden because of their rank or probability."""
        return self.samples and any((self.top_k, self.min_p, (self.top_p or 1.0) < 1))


PLAIN = TextSampling(), TextSampling(do_sample=True)
"""Greedy decoding, and sampling without any other setting. Their programs are the fastest."""


def every_sampling() -> list[TextSampling]:
    """Returns settings that together require every program. They begin with `PLAIN`."""
    return [
        dataclasses.replace(one, presence_penalty=penalty, num_alternatives=number)
        for penalty, number in itertools.product((0.0, 1.0), (0, 1))
        for one in (*PLAIN, TextSampling(do_sample=True, top_p=0.5))
    ]


@dataclasses.dataclass
class OpenText(Text):
    """A text of an `OpenBatch`, with its individual settings."""

    sampling: TextSampling = TextSampling()
    words: Any = None
    """The random key as an array of words, uint32[2]."""
    chosen: list[int] = dataclasses.field(default_factory=list)
    """The new tokens."""


def text_key(seed: int, number: int = 0) -> np.ndarray:
    """Returns the key `sampling_keys(seed, …)[number]` as an array of words, uint32[2]."""
    return np.asarray(_key_words(np.uint32(seed), np.int32(number)))


@jax.jit
def _key_words(seed: Array, number: Array) -> Array:
    key = jax.random.key(seed, impl="threefry2x32")
    return jax.random.key_data(jax.random.fold_in(key, number))


IDLE = OpenText(0, [0], set(), None, 1, words=np.zeros(2, np.uint32))
"""Stands for a text in a free row. It is greedy without any other setting, so it never requires an
additional program."""


def row_history(texts: Sequence[OpenText], vocab_size: int, prefix_length: int) -> History:
    """Returns the history of rows, given the text of each row (`IDLE` for a free row)."""
    keys, count = np.zeros((len(texts), 2), np.uint32), np.zeros(len(texts), np.int32)
    # Create arrays [R, V] only if a text needs them, because they slow down every step.
    seen: Any = None
    chosen: Any = None
    if any(text.sampling.is_adjusted for text in texts):
        seen = np.zeros((len(texts), vocab_size), bool)
        chosen = np.zeros((len(texts), vocab_size), np.int32)
    for row, text in enumerate(texts):
        keys[row], count[row] = text.words, text.count
        if chosen is not None:
            seen[row, list(text.used)] = True
            # `add.at` counts each repetition of a token, which an indexed `+=` does not.
            np.add.at(chosen[row], text.chosen, 1)
    recent: Any = last_tokens([text.context for text in texts], prefix_length)
    return History(seen, recent, _wrap(keys), count, chosen)  # pyright: ignore[reportArgumentType]


@jax.jit
def _wrap(words: Array) -> Array:
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def row_sampling(
    texts: Sequence[OpenText], vocab_size: int, banned: BannedSequences
) -> SamplingParams:
    """Combines the sampling settings of rows into arrays.

    Most settings become traced arrays. Only a few switches are static, so that few programs are
    compiled.

    Args:
      texts: the text of each row (`IDLE` for a free row).
      vocab_size: the size of the vocabulary.
      banned: sequences of tokens that are never generated.
    """
    rows = [text.sampling for text in texts]
    greedy = not any(one.samples for one in rows)

    # [R, 1], so that the settings of a row are broadcast over the vocabulary.
    def column(read: Callable[[TextSampling], float], dtype: type = np.float32) -> Any:
        return np.asarray([[read(one)] for one in rows], dtype)

    # A single switch enables all penalties and biases, so that few programs are compiled.
    adjustments: Any = None
    is_adjusted = any(one.is_adjusted for one in rows)
    if is_adjusted:
        bias: Any = np.zeros((len(rows), vocab_size), np.float32)
        for row, one in enumerate(rows):
            bias[row, list(one.logit_bias)] = list(one.logit_bias.values())
        presence = column(lambda one: one.presence_penalty)
        adjustments = Adjustments(bias, presence, column(lambda one: one.frequency_penalty))
    # Compute the same number of alternatives for all rows; `OpenBatch` truncates them.
    reported = any(one.num_alternatives for one in rows)
    return SamplingParams(
        temperature=column(lambda one: one.temperature if one.samples else 1.0),
        top_k=column(lambda one: min(one.top_k or vocab_size, vocab_size), np.int32),
        top_p=column(lambda one: one.top_p or 1.0),
        min_p=column(lambda one: one.min_p or 0.0),
        repetition_penalty=column(lambda one: one.repetition_penalty),
        banned=banned,
        greedy=greedy,
        filtered=any(one.is_filtered for one in rows),
        penalized=is_adjusted,
        scored=True,
        takes_best=None if greedy else column(lambda one: not one.samples, bool),
        adjustments=adjustments,
        num_alternatives=reported * min(MOST_ALTERNATIVES, vocab_size),
    )
