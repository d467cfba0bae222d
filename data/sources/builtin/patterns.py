r"""Small random tasks, endless and without a download: ``builtin:patterns``.

A document is an **episode**: examples of one task, with one line ``query > answer`` for each
example. Only the examples define the task, so a model that predicts an answer well has learned the
task from the earlier examples. A task has a kind and a random part, its key:

==============  ===========================  =======================================
kind            the key                      an example, with its key in parentheses
==============  ===========================  =======================================
``map``         a letter for each of a to e  ``ba > gc`` (``cgbfa``: a is c)
``copy``        an ending                    ``bad > badge`` (``ge``)
``reverse``     an ending                    ``bad > dabge`` (``ge``)
``count``       a letter, and a digit for    ``dad > 7`` (``d2571``: two d are 7)
                each number of them
``arithmetic``  a digit for each sum         ``3+4 > 0`` (``481529706``: 7 is 0)
==============  ===========================  =======================================

A tenth of the tasks of each kind, chosen by a hash of the task, is held out from all training
episodes. ``builtin:patterns#map,count`` has only the kinds ``map`` and ``count``.
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
"""The letters of the words."""
DIGITS = "0123456789"
"""The digits of the numbers in ``count`` and ``arithmetic``."""
MAPPED = LETTERS[:5]
"""The letters of the queries of ``map``; its queries are all pairs of these letters."""
WORD_LENGTH = 3
"""The letters in a query of ``copy``, ``reverse`` and ``count``."""
ADDENDS = DIGITS[:5]
"""The digits that ``arithmetic`` adds, so that it has 25 queries and nine sums."""
ENDING_LENGTH = 2
"""The letters of an ending."""
KINDS = ("map", "copy", "reverse", "count", "arithmetic")
"""The kinds of tasks."""
TEMPLATE = "{query} > {answer}\n"
"""How an example is written as text; see ``data.PromptPattern``."""
NUM_DOCUMENTS = 2000
"""The number of training documents, for code that needs a finite number of them, such as the
training of a vocabulary."""
DOCUMENT_EXAMPLES = 24
"""The number of examples in each of the ``NUM_DOCUMENTS`` documents."""
NUM_HELD_OUT = 200
"""The number of held-out episodes for validation and prompts; several may show the same task."""

_NAME = "builtin:patterns"
# Tasks whose hash has a first byte below 26 are held out: 26 of 256 values, a tenth.
_HELD_OUT_BELOW = 26
# The first number of each seed, so that no two of these purposes draw the same episodes.
_TRAINING, _DOCUMENTS, _HELD_OUT = range(1, 4)


@dataclass(frozen=True)
class PatternTask:
    """A task: its kind and its key.

    Attributes:
      kind: One of ``KINDS``.
      key: The letters or digits of the task; see the module docstring.
    """

    kind: str
    key: str

    @property
    def name(self) -> str:
        """The unique name of the task: ``map:chfdbage``."""
        return f"{self.kind}:{self.key}"

    @property
    def held_out(self) -> bool:
        """Whether the task is excluded from training."""
        return hashlib.blake2b(self.name.encode(), digest_size=1).digest()[0] < _HELD_OUT_BELOW

    @property
    def queries(self) -> tuple[str, ...]:
        """All queries of the task: 512 words, 25 pairs of letters, or 25 sums."""
        return _RULES[self.kind].queries

    def answer(self, query: str) -> str:
        """Returns the answer.

        Args:
          query: One of ``queries``.
        """
        return _RULES[self.kind].answer(self.key, query)


@dataclass(frozen=True)
class Episode:
    """Examples of one task.

    Attributes:
      task: The task.
      examples: Queries and their answers; no query repeats before all queries have occurred.
    """

    task: PatternTask
    examples: tuple[tuple[str, str], ...]

    @property
    def lines(self) -> list[str]:
        """Each example as text, with its line feed."""
        return [TEMPLATE.format(query=query, answer=answer) for query, answer in self.examples]

    @property
    def text(self) -> str:
        """The document: all examples."""
        return "".join(self.lines)


@dataclass(frozen=True)
class Patterns:
    """The endless source of small random tasks.

    Attributes:
      name: The name as the user wrote it.
      kinds: The kinds of its tasks, each equally frequent.
    """

    name: str
    kinds: tuple[str, ...] = KINDS

    @classmethod
    def parse(cls, name: str) -> "Patterns | None":
        """Parses a source name; returns None for another kind of source.

        Args:
          name: ``builtin:patterns``, with ``#map,count`` for some of the kinds.

        Raises:
          DataError: There is no such kind of task.
        """
        location, mark, part = name.partition("#")
        if location != _NAME:
            return None
        kinds = tuple(part.split(",")) if mark else KINDS
        for kind in kinds:
            require_one_of(f"the kind of task in {name!r}", kind, KINDS, error=DataError)
        # Each kind is equally frequent, also if it is named twice.
        return cls(name, tuple(dict.fromkeys(kinds)))

    def draw(self, rng: np.random.Generator, number: int, *, held_out: bool = False) -> Episode:
        """Draws an episode.

        Args:
          rng: The source of randomness. With another number of examples the episode has the
            same task and begins with the same examples.
          number: The number of examples.
          held_out: Whether to draw a task that is held out from training.
        """
        task = draw_task(rng, self.kinds[rng.integers(len(self.kinds))], held_out=held_out)
        # Draw all queries in random order before any repeats; more rounds follow if necessary.
        queries: list[str] = []
        while len(queries) < number:
            queries += _in_order(task.queries, rng.permutation(len(task.queries)))
        return Episode(task, tuple((query, task.answer(query)) for query in queries[:number]))

    def training_episode(self, seed: int, epoch: int, index: int, number: int) -> Episode:
        """Returns a training episode, a pure function of its arguments.

        Args:
          seed: Seed of the run, any integer.
          epoch: From 0.
          index: From 0.
          number: The number of examples.
        """
        return self.draw(np.random.default_rng([_TRAINING, seed % 2**64, epoch, index]), number)

    def held_out_episode(self, index: int, number: int) -> Episode:
        """Returns an episode of a task that no training episode of any seed shows.

        Args:
          index: From 0.
          number: The number of examples.
        """
        return self.draw(np.random.default_rng([_HELD_OUT, index]), number, held_out=True)

    def documents(self) -> Iterator[str]:
        """Yields the same ``NUM_DOCUMENTS`` training episodes each time."""
        for index in range(NUM_DOCUMENTS):
            rng = np.random.default_rng([_DOCUMENTS, index])
            yield self.draw(rng, DOCUMENT_EXAMPLES).text

    @cached_property
    def held_out(self) -> tuple[Episode, ...]:
        """Held-out episodes without repeated queries, for the shots and queries of prompts."""
        return tuple(self.held_out_episode(i, DOCUMENT_EXAMPLES) for i in range(NUM_HELD_OUT))


def draw_task(rng: np.random.Generator, kind: str, *, held_out: bool = False) -> PatternTask:
    """Draws a task of a kind.

    Args:
      rng: The generator.
      kind: One of ``KINDS``.
      held_out: Whether to draw among the held-out tasks, or among all other tasks.
    """
    # Draw keys until the task is held out, or not held out, as requested.
    while True:
        task = PatternTask(kind, "".join(_RULES[kind].draw_key(rng)))
        if task.held_out == held_out:
            return task


def _in_order(items: str | tuple[str, ...], order: np.ndarray) -> list[str]:
    return [items[index] for index in order.tolist()]


@dataclass(frozen=True)
class _Rule:
    """The rule of a kind of task.

    Attributes:
      queries: All queries.
      draw_key: Draws the characters of a key.
      answer: Returns the answer, given the key and a query.
    """

    queries: tuple[str, ...]
    draw_key: Callable[[np.random.Generator], list[str]]
    answer: Callable[[str, str], str]


def _permuted(items: str, number: int, rng: np.random.Generator) -> list[str]:
    """Draws a number of different items."""
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
        # A different digit for each of the nine sums.
        lambda rng: _permuted(DIGITS, 2 * len(ADDENDS) - 1, rng),
        lambda key, query: key[sum(map(int, query.split("+")))],
    ),
}
