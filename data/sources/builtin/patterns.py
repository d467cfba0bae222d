r"""Generates an endless number of small random tasks: ``builtin:patterns``.

A document is an **episode**: several examples of one task, with one line ``query > answer`` for
each example. Only the examples define the task, so a model that predicts an answer well has learned
the task from the earlier examples. A task consists of a kind and a random part, its key:

==============  ===========================  =======================================
kind            the key                      an example, with its key in parentheses
==============  ===========================  =======================================
``map``         a letter for each of a to e  ``ba > gc`` (``cgbfa``: a is c)
``copy``        an ending                    ``bad > badge`` (``ge``)
``reverse``     an ending                    ``bad > dabge`` (``ge``)
``count``       a letter, and a digit for    ``dad > 7`` (``d2571``: two d are 7)
                each count of the letter
``arithmetic``  a digit for each sum         ``3+4 > 0`` (``481529706``: 7 is 0)
==============  ===========================  =======================================

A tenth of the tasks of each kind, selected by a hash of the task, is held out from all training
episodes. ``builtin:patterns#map,count`` contains only tasks of the kinds ``map`` and ``count``.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from ...common.errors import DataError
from ...common.fields import require_one_of

LETTERS = "abcdefgh"
"""The letters that can occur in words."""
DIGITS = "0123456789"
"""The digits that can occur in ``count`` and ``arithmetic``."""
MAPPED = LETTERS[:5]
"""The letters in the queries of ``map``, which are all pairs of these letters."""
WORD_LENGTH = 3
"""The number of letters in a query of ``copy``, ``reverse`` and ``count``."""
ADDENDS = DIGITS[:5]
"""The digits that ``arithmetic`` adds. They result in 25 queries and nine different sums."""
ENDING_LENGTH = 2
"""The number of letters in an ending."""
KINDS = ("map", "copy", "reverse", "count", "arithmetic")
"""The kinds of tasks."""
TEMPLATE = "{query} > {answer}\n"
"""The template for the text of an example; see ``data.PromptPattern``."""
NUM_DOCUMENTS = 2000
"""The number of training documents for code that needs a finite number, such as the training of a
tokenizer."""
DOCUMENT_EXAMPLES = 24
"""The number of examples in each of the ``NUM_DOCUMENTS`` documents."""
NUM_HELD_OUT = 200
"""The number of held-out episodes for validation and prompts. Several of them may have the same
task."""

_NAME = "builtin:patterns"
# A task is held out if the first byte of its hash is below 26, which is true for a tenth of tasks.
_HELD_OUT_BELOW = 26
# The first number of the seed for each purpose, so that different purposes draw different episodes.
_TRAINING, _DOCUMENTS, _HELD_OUT = range(1, 4)


@dataclass(frozen=True)
class PatternTask:
    """A task, which consists of a kind and a key.

    Attributes:
      kind: One of ``KINDS``.
      key: The letters or digits that define the task; see the module docstring.
    """

    kind: str
    key: str

    @property
    def name(self) -> str:
        """The unique name of the task, such as ``map:chfdb``."""
        return f"{self.kind}:{self.key}"

    @property
    def held_out(self) -> bool:
        """Whether the task is excluded from training."""
        return hashlib.blake2b(self.name.encode(), digest_size=1).digest()[0] < _HELD_OUT_BELOW

    @property
    def queries(self) -> tuple[str, ...]:
        """All queries of the task. Its kind determines whether they are words, pairs or sums."""
        return _RULES[self.kind].queries

    def answer(self, query: str) -> str:
        """Returns the answer to a query.

        Args:
          query: One of ``queries``.
        """
        return _RULES[self.kind].answer(self.key, query)


@dataclass(frozen=True)
class Episode:
    """Examples of one task.

    Attributes:
      task: The task.
      examples: Queries with their answers. A query occurs again only after all other queries.
    """

    task: PatternTask
    examples: tuple[tuple[str, str], ...]

    @property
    def lines(self) -> list[str]:
        """The text of each example, which ends with a line feed."""
        return [TEMPLATE.format(query=query, answer=answer) for query, answer in self.examples]

    @property
    def text(self) -> str:
        """The text of the document, which contains all examples."""
        return "".join(self.lines)


@dataclass(frozen=True)
class Patterns:
    """The endless source of small random tasks.

    Attributes:
      name: The name as the user wrote it.
      kinds: The kinds of tasks. All of them are equally frequent.
    """

    name: str
    kinds: tuple[str, ...] = KINDS

    @classmethod
    def parse(cls, name: str) -> "Patterns | None":
        """Parses a source name; returns None if it names a different kind of source.

        Args:
          name: ``builtin:patterns``, or for example ``builtin:patterns#map,count`` to use only
            some kinds of tasks.

        Raises:
          DataError: The name contains an unknown kind of task.
        """
        location, mark, part = name.partition("#")
        if location != _NAME:
            return None
        kinds = tuple(part.split(",")) if mark else KINDS
        for kind in kinds:
            require_one_of(f"the kind of task in {name!r}", kind, KINDS, error=DataError)
        # Remove duplicates, because each kind is equally frequent even if it is named twice.
        return cls(name, tuple(dict.fromkeys(kinds)))

    def draw(self, rng: np.random.Generator, number: int, *, held_out: bool = False) -> Episode:
        """Draws an episode.

        Args:
          rng: The random number generator.
          number: The number of examples. With the same state of ``rng``, a different number gives
            the same task and the same first examples.
          held_out: Whether to draw a task that is held out from training.
        """
        task = draw_task(rng, self.kinds[rng.integers(len(self.kinds))], held_out=held_out)
        # Use all queries in random order before any query repeats; add more rounds if necessary.
        queries: list[str] = []
        while len(queries) < number:
            queries += _in_order(task.queries, rng.permutation(len(task.queries)))
        return Episode(task, tuple((query, task.answer(query)) for query in queries[:number]))

    def training_episode(self, seed: int, epoch: int, index: int, number: int) -> Episode:
        """Returns a training episode, which depends only on the arguments.

        Args:
          seed: The seed of the run, any integer.
          epoch: The number of the epoch, from 0.
          index: The index of the episode, from 0.
          number: The number of examples.
        """
        return self.draw(np.random.default_rng([_TRAINING, seed % 2**64, epoch, index]), number)

    def held_out_episode(self, index: int, number: int) -> Episode:
        """Returns an episode whose task is held out from the training episodes of every seed.

        Args:
          index: The index of the episode, from 0.
          number: The number of examples.
        """
        return self.draw(np.random.default_rng([_HELD_OUT, index]), number, held_out=True)

    def documents(self) -> Iterator[str]:
        """Yields ``NUM_DOCUMENTS`` training episodes, which are the same on every call."""
        for index in range(NUM_DOCUMENTS):
            rng = np.random.default_rng([_DOCUMENTS, index])
            yield self.draw(rng, DOCUMENT_EXAMPLES).text

    @cached_property
    def held_out(self) -> tuple[Episode, ...]:
        """Held-out episodes without repeated queries; prompts take shots and queries from them."""
        return tuple(self.held_out_episode(i, DOCUMENT_EXAMPLES) for i in range(NUM_HELD_OUT))


def draw_task(rng: np.random.Generator, kind: str, *, held_out: bool = False) -> PatternTask:
    """Draws a random task of one kind.

    Args:
      rng: The random number generator.
      kind: One of ``KINDS``.
      held_out: Whether to draw one of the held-out tasks. If False, draws one of the other tasks.
    """
    # Draw keys until the task is held out or not, as requested.
    while True:
        task = PatternTask(kind, "".join(_RULES[kind].draw_key(rng)))
        if task.held_out == held_out:
            return task


def _in_order(items: str | tuple[str, ...], order: np.ndarray) -> list[str]:
    return [items[index] for index in order.tolist()]


@dataclass(frozen=True)
class _Rule:
    """The rule that applies to one kind of task.

    Attributes:
      queries: All queries.
      draw_key: A function that draws the characters of a key.
      answer: A function that returns the answer, given the key and a query.
    """

    queries: tuple[str, ...]
    draw_key: Callable[[np.random.Generator], list[str]]
    answer: Callable[[str, str], str]


def _permuted(items: str, number: int, rng: np.random.Generator) -> list[str]:
    """Draws the given number of different items in random order."""
    return _in_order(items, rng.permutation(len(items)))[:number]


def _ending(rng: np.random.Generator) -> list[str]:
    return _in_order(LETTERS, rng.integers(len(LETTERS), size=ENDING_LENGTH))


def _letter_and_counts(rng: np.random.Generator) -> list[str]:
    letter = LETTERS[rng.integers(len(LETTERS))]
    # The digits are the answers for 0 to 3 occurrences of the letter.
    return [letter, *_permuted(DIGITS, WORD_LENGTH + 1, rng)]


_WORDS = tuple(map("".join, product(LETTERS, repeat=WORD_LENGTH)))
_RULES = {
    "map": _Rule(
        tuple(map("".join, product(MAPPED, repeat=2))),
        lambda rng: _permuted(LETTERS, len(MAPPED), rng),
        lambda key, query: query.translate(str.maketrans(MAPPED, key)),
    ),
    "copy": _Rule(_WORDS, _ending, lambda key, query: query + key),
    "reverse": _Rule(_WORDS, _ending, lambda key, query: query[::-1] + key),
    "count": _Rule(_WORDS, _letter_and_counts, lambda key, query: key[1 + query.count(key[0])]),
    "arithmetic": _Rule(
        tuple(map("+".join, product(ADDENDS, repeat=2))),
        # The key has a different digit for each of the nine sums.
        lambda rng: _permuted(DIGITS, 2 * len(ADDENDS) - 1, rng),
        lambda key, query: key[sum(map(int, query.split("+")))],
    ),
}
