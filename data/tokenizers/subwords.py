"""Two sub-word algorithms in their simplest form, to read and to print.

``merge_byte_pairs`` is algorithm 1 of Sennrich et al. 2016; the libraries that ``training`` calls
train the vocabularies of models. ``fewest_pieces`` divides a text into as few pieces of a given
vocabulary as possible.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import NamedTuple

from ..common.errors import DataError
from ..common.fields import require


class MergeRound(NamedTuple):
    """The state of a text after a merge.

    Attributes:
      pair: The two tokens that were merged; None before the first merge.
      words: The tokens of each word of the text.
      vocabulary: The characters in the order of the text, then every merged token; a token
        stays in the vocabulary after it has become part of another token.
    """

    pair: tuple[str, str] | None
    words: tuple[tuple[str, ...], ...]
    vocabulary: tuple[str, ...]

    @property
    def counts(self) -> Counter[str]:
        """How often each token occurs in the text; a token that no longer occurs is left out."""
        return Counter(token for word in self.words for token in word)


def merge_byte_pairs(text: str, end_of_word: str = "_") -> Iterator[MergeRound]:
    """Merges the most frequent pair of neighboring tokens repeatedly.

    No pair crosses the end of a word. If several pairs are equally frequent, the first pair in the
    text is merged.

    Args:
      text: Words separated by white space.
      end_of_word: The token that ends each word; empty for none.

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
        # The first of equally frequent pairs is merged, because a Counter keeps its order.
        best = max(pairs, key=pairs.__getitem__)
        words = tuple(_join(word, best) for word in words)
        vocabulary = tuple(dict.fromkeys((*vocabulary, "".join(best))))
        yield MergeRound(best, words, vocabulary)


def _join(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    joined: list[str] = []
    # The previous token, unless this merge produced it.
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

    Byte-pair encoding replays its merges, and WordPiece takes the longest piece first; neither
    finds the fewest pieces of every text. In this function, dynamic programming computes the best
    division of each prefix of the text from the best divisions of shorter prefixes, in time
    ``len(text)`` times the length of the longest piece.

    Args:
      text: The text.
      pieces: The vocabulary. Among divisions of equal length, the division with the longest last
        piece is chosen.

    Returns:
      The pieces in order; their concatenation is the text.

    Raises:
      DataError: The pieces cannot make up the text.

    Example::

        data.fewest_pieces("plan", {*"manpl", "an", "man"})  # ["p", "l", "an"]
    """
    known = frozenset(pieces)
    longest = max(map(len, known), default=0)
    # For each prefix that pieces can make up, the fewest pieces of text[:end] and the start of the
    # last piece.
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
    # Walk back from the end along the starts of the last pieces.
    divided: list[str] = []
    while end:
        _, start = best[end]
        divided.append(text[start:end])
        end = start
    return divided[::-1]
