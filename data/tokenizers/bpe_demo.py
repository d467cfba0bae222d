"""Byte-pair merging as the lectures show it (Sennrich et al. 2016, algorithm 1).

This is the small one to read and to print. Vocabularies for models are trained by the
libraries behind ``tokenizer_training``.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

Pair = tuple[str, str]


def merge_byte_pairs(
    text: str, end_of_word: str = "_"
) -> Iterator[tuple[Pair | None, Counter[str]]]:
    """Merges the most frequent pair of neighbouring tokens again and again.

    Words end in ``end_of_word``, and pairs never reach over it. Of equally frequent pairs
    the one met first in the text is merged.

    Args:
        text: Words separated by white space.
        end_of_word: The token that closes each word.

    Yields:
        First None and the counts of single characters, then after each merge the merged
        pair and the new counts of all tokens; ends when every word is one token.
    """
    words = [[*word, end_of_word] for word in text.split()]
    yield None, _count(words)
    while pairs := Counter(pair for word in words for pair in pairwise(word)):
        best = max(pairs, key=pairs.__getitem__)  # the first of equals: Counter keeps order
        words = [_merge(word, best) for word in words]
        yield best, _count(words)


def byte_pair_table(text: str, rounds: int, columns: int = 12) -> str:
    """Formats the most frequent tokens after each of the first merges.

    Args:
        text: Words separated by white space.
        rounds: How many merges.
        columns: How many tokens to show in a line.

    Returns:
        One line per round, for example ``   1  e _ -> e_   s 15, e 15, ...``.
    """
    lines = []
    for number, (pair, counts) in zip(range(rounds + 1), merge_byte_pairs(text), strict=False):
        merged = "" if pair is None else f"{pair[0]} {pair[1]} -> {''.join(pair)}"
        tokens = ", ".join(f"{token} {count}" for token, count in counts.most_common(columns))
        lines.append(f"{number:4}  {merged:16}  {tokens}")
    return "\n".join(lines)


def _count(words: Sequence[Sequence[str]]) -> Counter[str]:
    return Counter(token for word in words for token in word)


def _merge(word: Sequence[str], pair: Pair) -> list[str]:
    merged: list[str] = []
    for token in word:
        if merged and (merged[-1], token) == pair:
            merged[-1] = "".join(pair)
        else:
            merged.append(token)
    return merged
