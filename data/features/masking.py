"""Masks tokens for masked language modeling (Devlin et al. 2019, section 3.1 and appendix A.1).

By default, 15 % of the tokens in an example are predicted: 80 % of these tokens are replaced by
``[MASK]``, 10 % are replaced by a random token, and 10 % stay unchanged. As in google-research/bert
``create_pretraining_data.py``, the 15 % refer to the number of all tokens, including special
tokens, although special tokens are never chosen.

There are three deliberate differences. Every epoch draws new masks (RoBERTa, Liu et al. 2019,
section 4.1), while the original code writes ten copies of its data. A random token is never a
special token. ``[UNK]`` is not predicted. The option ``ngrams`` masks up to this number of
consecutive words together (Lan et al. 2020, "ALBERT", section 3.1), and the probability of masking
n words is proportional to 1 / n.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..common.errors import DataError
from ..common.fields import require
from ..dataset import ArraySpec, BatchSpec, PickledByFields, Values
from ..tokenizers.base import Tokenizer

# A token is replaced by [MASK] if its random number is below `_MASKED`, and by a random token if
# the number is below `_RANDOM`.
_MASKED, _RANDOM = 0.8, 0.9


@dataclass(frozen=True, eq=False)
class WordBoundaries:
    """Flags that determine which tokens belong to the same word, bool [vocab_size] each.

    Attributes:
      continues: True for tokens that continue the word of the previous token.
      breaks: True for tokens after which a new word always begins, such as a line break.
    """

    continues: np.ndarray
    breaks: np.ndarray

    def joined(self, ids: np.ndarray) -> np.ndarray:
        """Returns whether each token continues the word of the previous token, bool [n]."""
        joined = self.continues[ids]
        joined[1:] &= ~self.breaks[ids[:-1]]
        return joined


@dataclass(frozen=True, eq=False)
class Masking(PickledByFields):
    """The rule for masking the tokens of an example.

    Attributes:
      mask: The id of ``[MASK]``.
      specials: The ids of all special tokens.
      vocab_size: The size of the vocabulary. Random tokens are drawn from ``[0, vocab_size)``,
        excluding ``specials`` and ``missing``.
      max_predictions: The length of the prediction arrays, M.
      rate: The fraction of predicted tokens, in (0, 1).
      words: The word boundaries for whole-word masking. If None, single tokens are masked.
      missing: The ids below ``vocab_size`` that the vocabulary does not use.
      ngrams: The maximum number of consecutive words (or tokens, if ``words`` is None) that are
        masked together.
    """

    mask: int
    specials: tuple[int, ...]
    vocab_size: int
    max_predictions: int
    rate: float = 0.15
    words: WordBoundaries | None = None
    missing: tuple[int, ...] = ()
    ngrams: int = 1

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        length: int,
        *,
        rate: float = 0.15,
        max_predictions: int | None = None,
        whole_word: bool = False,
        ngrams: int = 1,
    ) -> "Masking":
        """Creates the rule for a tokenizer.

        Args:
          tokenizer: A tokenizer with a mask token.
          length: The length of an example, T.
          rate: The fraction of predicted tokens; see the class.
          max_predictions: See the class. Defaults to ``rate * length``, rounded up.
          whole_word: Whether all tokens of a word are masked together.
          ngrams: The maximum number of words to mask together; see the class.

        Raises:
          DataError: The tokenizer has no mask token, or does not mark words.
        """
        ids = tokenizer.special_ids.present
        problem = f"this {tokenizer.kind} tokenizer has no mask token: train a wordpiece"
        require("mask" in ids, problem, DataError)
        return cls(
            ids["mask"],
            tuple(sorted(tokenizer.all_special_ids)),
            tokenizer.vocab_size,
            max_predictions or usual_predictions(rate, length),
            rate,
            word_boundaries(tokenizer) if whole_word else None,
            tuple(id for id in range(tokenizer.vocab_size) if _piece(tokenizer, id) is None),
            ngrams,
        )

    @cached_property
    def _ordinary(self) -> np.ndarray:
        """True for tokens that are not special, bool [vocab_size]."""
        ordinary = np.ones(self.vocab_size, bool)
        ordinary[list(self.specials)] = False
        return ordinary

    @cached_property
    def _replacements(self) -> np.ndarray:
        drawn = self._ordinary.copy()
        drawn[list(self.missing)] = False
        return np.flatnonzero(drawn)

    def mask_row(self, ids: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Masks the tokens of an example in place.

        Args:
          ids: The tokens without padding, int32 [n].
          rng: The source of randomness.

        Returns:
          ``masked_positions`` (ascending), ``masked_labels`` and ``masked_weights``, int32
          [max_predictions]; unused entries are 0 in all three arrays.
        """
        # As in the original code, the number of tokens includes special tokens, although they are
        # not candidates.
        budget = min(self.max_predictions, max(1, round(len(ids) * self.rate)))
        candidates = np.flatnonzero(self._ordinary[ids])
        chosen = (
            _some(candidates, budget, rng)
            if self.words is None and self.ngrams == 1
            else self._spans(ids, candidates, budget, rng)
        )
        count = len(chosen)
        row = {name: np.zeros(self.max_predictions, np.int32) for name in PREDICTIONS}
        row["masked_positions"][:count] = chosen
        row["masked_labels"][:count] = ids[chosen]
        row["masked_weights"][:count] = 1
        # Use [MASK] for 80 %, a random token for 10 %, and the original token for 10 %. Both random
        # arrays are drawn for all positions.
        draws = rng.random(count)
        random = rng.integers(0, len(self._replacements), count)
        replaced = np.where(draws < _RANDOM, self._replacements[random], ids[chosen])
        ids[chosen] = np.where(draws < _MASKED, self.mask, replaced)
        return row

    def _spans(
        self, ids: np.ndarray, candidates: np.ndarray, budget: int, rng: np.random.Generator
    ) -> np.ndarray:
        """Chooses spans of words in random order, and skips words longer than the remaining budget.

        A span ends before a special token, before a word of another span, and before a word that is
        longer than the remaining budget. If all words are longer than the budget, the shortest word
        is chosen, so that there is at least one prediction, unless it is longer than
        ``max_predictions``.
        """
        # If `words` is None, every token is a word. The arrays are bool [num_candidates].
        is_continuation = np.zeros(len(candidates), bool)
        if self.words is not None:
            is_continuation = self.words.joined(ids[candidates])
        # A word does not continue across a special token, and the first candidate starts a word.
        adjacent = np.diff(candidates, prepend=-2) == 1
        is_continuation &= adjacent
        firsts = np.flatnonzero(~is_continuation)  # the first candidate of each word, [num_words]
        sizes = np.diff(firsts, append=len(candidates))  # tokens of each word, [num_words]
        parts = np.cumsum(~adjacent)[firsts]  # which stretch between special tokens each word is in
        order = rng.permutation(len(firsts))
        chosen, left = np.zeros(len(firsts), bool), budget
        for word, count in zip(order.tolist(), self._counts(len(order), rng), strict=True):
            for at in range(word, min(word + count, len(firsts))):
                if chosen[at] or sizes[at] > left or parts[at] != parts[word]:
                    break
                chosen[at] = True
                left -= sizes[at]
            if not left:
                break
        if not chosen.any() and len(sizes) and sizes.min() <= self.max_predictions:
            chosen[sizes.argmin()] = True
        # All tokens of the chosen words, ascending.
        return candidates[np.repeat(chosen, sizes)]

    def _counts(self, number: int, rng: np.random.Generator) -> list[int]:
        """Draws the number of words of each span."""
        if self.ngrams == 1:
            return [1] * number
        sizes = np.arange(1, self.ngrams + 1)
        return rng.choice(sizes, size=number, p=1 / sizes / np.sum(1 / sizes)).tolist()


PREDICTIONS = ("masked_positions", "masked_labels", "masked_weights")
"""The names of the prediction arrays of an example, int32 [M] each."""


def prediction_specs(max_predictions: int) -> BatchSpec:
    """Returns the specifications of the arrays that ``Masking.mask_row`` returns."""
    values = (Values.INDEX, Values.TARGET_TOKEN, Values.MASK)
    return {
        name: ArraySpec((max_predictions,), value)
        for name, value in zip(PREDICTIONS, values, strict=True)
    }


def usual_predictions(rate: float, length: int) -> int:
    """Returns the number of predictions for ``length`` tokens at a given rate, rounded up."""
    return math.ceil(round(rate * length, 6))


def word_boundaries(tokenizer: Tokenizer) -> WordBoundaries:
    """Derives the word boundaries from the spelling of the pieces in a vocabulary.

    In WordPiece, pieces that continue a word begin with ``##``. In vocabularies that encode spaces,
    a piece that begins with white space starts a word. A word also starts after a piece that ends
    with a line break or any other white space except a space.

    Args:
      tokenizer: A tokenizer of any kind except characters.

    Raises:
      DataError: The vocabulary does not mark where words begin or continue.
    """
    ids = range(tokenizer.vocab_size)
    pieces = [_piece(tokenizer, id) or "" for id in ids]
    if tokenizer.kind == "wordpiece":
        continues = _flags(pieces, lambda piece: piece.startswith("##"))
        return WordBoundaries(continues, np.zeros_like(continues))
    if tokenizer.kind == "words":
        return WordBoundaries(*np.zeros((2, tokenizer.vocab_size), bool))
    # Byte-level BPE writes a space as Ġ, and SentencePiece writes it as ▁.
    spaces = _flags(pieces, lambda piece: piece.startswith(("Ġ", "▁")))
    require(
        spaces.any(),
        f"this {tokenizer.kind} tokenizer does not mark where words begin: leave whole_word out",
        DataError,
    )
    # Use the decoded text to find line breaks, because vocabularies write them in different ways.
    texts = [tokenizer.decode([id], skip_special_tokens=False) if pieces[id] else "" for id in ids]
    begins = _flags(texts, lambda text: text[:1].isspace())
    # A piece that ends with a space is not a break, because it may be the space that belongs to the
    # next word.
    breaks = _flags(texts, lambda text: text[-1:].isspace() and not text.endswith(" "))
    return WordBoundaries(~(spaces | begins), breaks)


def _flags(texts: Sequence[str], test: Callable[[str], bool]) -> np.ndarray:
    """Returns the result of a test for each text, bool [n]."""
    return np.fromiter(map(test, texts), bool, len(texts))


def _piece(tokenizer: Tokenizer, id: int) -> str | None:
    try:
        return tokenizer.token(id)
    except IndexError:
        # The vocabulary skips this id.
        return None


def _some(candidates: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Chooses ``count`` candidates at random, in ascending order."""
    if count >= len(candidates):
        return candidates
    # The positions of the smallest random numbers form a sample without replacement.
    return np.sort(candidates[np.argpartition(rng.random(len(candidates)), count)[:count]])
