"""Implements two sub-word algorithms in a simple form, for teaching.

``merge_byte_pairs`` is algorithm 1 of Sennrich et al. 2016. (The vocabularies of models are trained
by the libraries that ``training`` calls.) ``fewest_pieces`` divides a text into as few pieces of a
given vocabulary as possible.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import NamedTuple

from ..common.errors import DataError
from ..common.fields import require


class MergeRound(NamedTuple):
    """The state of a text after one merge.

    Attributes:
      pair: The two tokens that were merged; None before the first merge.
      words: The tokens of each word in the text.
      vocabulary: The characters in the order of their first occurrence, followed by every merged
        token. A token stays in the vocabulary even if it no longer occurs.
    """

    pair: tuple[str, str] | None
    words: tuple[tuple[str, ...], ...]
    vocabulary: tuple[str, ...]

    @property
    def counts(self) -> Counter[str]:
        """The number of occurrences of each token, without tokens that no longer occur."""
        return Counter(token for word in self.words for token in word)


def merge_byte_pairs(text: str, end_of_word: str = "_") -> Iterator[MergeRound]:
    """Repeatedly merges the most frequent pair of neighboring tokens.

    A pair never crosses the end of a word. If several pairs are equally frequent, the pair that
    occurs first in the text is merged.

    Args:
      text: Words separated by white space.
      end_of_word: The token that ends each word. If empty, words have no end token.

    Yields:
      The state before any merge (single characters), then the state after each merge. In the last
      state, each word is one token.

    Example::

        for round in data.merge_byte_pairs("man plan commands", end_of_word=""):
            print(round.pair, round.counts, round.words)
    """
    ends = (end_of_word,) if end_of_word else ()
    words = tuple((*word, *ends) for word in text.split())
    vocabulary = tuple(dict.fromkeys(token for word in words for token in word))
    yield MergeRound(None, words, vocabulary)
    while pairs := Counter(pair for word in words for pair in pairwise(word)):
        # If pairs are equally frequent, `max` returns the first, because a Counter keeps the order.
        best = max(pairs, key=pairs.__getitem__)
        words = tuple(_join(word, best) for word in words)
        vocabulary = tuple(dict.fromkeys((*vocabulary, "".join(best))))
        yield MergeRound(best, words, vocabulary)


def _join(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    joined: list[str] = []
    # The previous token; empty if the previous token was produced by this merge.
    last = ""
    for token in word:
        if (last, token) == pair:
            joined[-1] += token
            last = ""
        else:
            joined.append(token)
            last = token
    return tuple(joined)


def fewest_pieces(text: str, pieces: Collection[str]) -> list[str]:
    """Divides a text into as few pieces as possible.

    Byte-pair encoding repeats its merges, and WordPiece takes the longest piece first. Neither of
    them finds the fewest pieces for every text. This function uses dynamic programming: it computes
    the best division of each prefix from the best divisions of shorter prefixes. The time is
    proportional to ``len(text)`` times the length of the longest piece.

    Args:
      text: The text.
      pieces: The vocabulary. If several divisions have the fewest pieces, the division with the
        longest last piece is chosen.

    Returns:
      The pieces in order; their concatenation is the text.

    Raises:
      DataError: The text cannot be divided into these pieces.

    Example::

        data.fewest_pieces("plan", {*"manpl", "an", "man"})  # ["p", "l", "an"]
    """
    known = frozenset(pieces)
    longest = max(map(len, known), default=0)
    # For the end of each prefix that can be divided into pieces: the number of pieces in its best
    # division, and the start of the last piece.
    best = {0: (0, 0)}
    for end in range(1, len(text) + 1):
        starts = range(max(0, end - longest), end)
        found = [(best[i][0] + 1, i) for i in starts if i in best and text[i:end] in known]
        if found:
            best[end] = min(found)
    end, reached = len(text), max(best)
    require(
        reached == end,
        f"the pieces cannot make up {text!r}: none of them continues after {text[:reached]!r}; "
        f"add the single character {text[reached : reached + 1]!r} to the pieces",
        DataError,
    )
    # Collect the pieces from the end of the text to its start.
    divided: list[str] = []
    while end:
        _, start = best[end]
        divided.append(text[start:end])
        end = start
    return divided[::-1]
