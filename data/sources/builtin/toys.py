"""Generates an endless number of examples for toy tasks whose correct answers are known.

=================  ========================  ==================  ===============================
name               a prompt                  a document          what a reward may check
=================  ========================  ==================  ===============================
``builtin:sums``   ``7+5=``                  ``7+5=12``          the ``answer``, ``12``
``builtin:words``  ``cat sun``               ``cat sun tea owl   a given word, or few letters
                                             box cat``
=================  ========================  ==================  ===============================

In about half of the documents of ``sums``, a random number replaces the sum, so a model trained on
these documents gives the right answer about half of the time. Reinforcement learning on the prompts
can improve this rate. A tenth of the prompts of ``words``, selected by a hash, is held out: no
training document begins with a held-out prompt. None of the hundred sums is held out.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

NUM_DIGITS = 10
"""``builtin:sums`` adds the digits from 0 to 9."""
WORDS = tuple("ant bee box cat cup dog egg fox hat ice jam key map owl sun tea".split())
"""The words that occur in ``builtin:words``."""
NUM_WORDS = 6
"""The number of words in a document of ``builtin:words``. The first two words are its prompt."""
NUM_DOCUMENTS = 4000
"""The number of documents for training a language model."""
NAMES = ("sums", "words")

_BUILTIN = "builtin:"
# A prompt is held out if the first byte of its hash is below 26, which is true for a tenth of them.
_HELD_OUT_BELOW = 26
# The first number of the seed for each purpose, so that different purposes draw different prompts.
_TRAINING, _DOCUMENTS = 11, 12


@dataclass(frozen=True)
class ToyText:
    """A prompt and its continuation.

    Attributes:
      prompt: The prompt.
      continuation: The right or wrong answer to a sum, or random words. A document consists of the
        prompt and its continuation.
      fields: Additional fields that a reward can use: the ``answer`` to a sum.
    """

    prompt: str
    continuation: str
    fields: dict[str, str]


@dataclass(frozen=True)
class Toy:
    """An endless source of prompts. The reward of an answer can be computed exactly.

    Attributes:
      name: The name as the user wrote it.
      kind: One of ``NAMES``.
    """

    name: str
    kind: str

    @classmethod
    def parse(cls, name: str) -> "Toy | None":
        """Parses a source name; returns None if it names a different kind of source."""
        kind = name.removeprefix(_BUILTIN)
        return cls(name, kind) if name.startswith(_BUILTIN) and kind in NAMES else None

    def training_text(self, seed: int, epoch: int, index: int) -> ToyText:
        """Returns a training text, which depends only on the arguments.

        Args:
          seed: The seed of the run, any integer.
          epoch: The number of the epoch, from 0.
          index: The index of the text, from 0.
        """
        return self._draw(np.random.default_rng([_TRAINING, seed % 2**64, epoch, index]))

    def validation_texts(self) -> tuple[ToyText, ...]:
        """Returns a text for each held-out prompt or each sum; the texts are always the same."""
        if self.kind == "sums":
            prompts = product(range(NUM_DIGITS), range(NUM_DIGITS))
            return tuple(_sum(a, b, a + b) for a, b in prompts)
        pairs = [f"{a} {b}" for a, b in product(WORDS, WORDS)]
        return tuple(ToyText(prompt, "", {}) for prompt in pairs if _is_held_out(prompt))

    def documents(self) -> Iterator[str]:
        """Yields ``NUM_DOCUMENTS`` training documents, which are the same on every call."""
        rng = np.random.default_rng([_DOCUMENTS])
        for _ in range(NUM_DOCUMENTS):
            text = self._draw(rng)
            yield text.prompt + text.continuation

    def _draw(self, rng: np.random.Generator) -> ToyText:
        if self.kind == "sums":
            a, b = rng.integers(NUM_DIGITS, size=2).tolist()
            # A random answer is drawn from all possible sums, so it may be right by chance.
            is_right = rng.integers(2) == 0
            return _sum(a, b, a + b if is_right else int(rng.integers(2 * NUM_DIGITS - 1)))
        # Draw until the prompt is not held out.
        while True:
            words = [WORDS[i] for i in rng.integers(len(WORDS), size=NUM_WORDS)]
            text = ToyText(" ".join(words[:2]), " " + " ".join(words[2:]), {})
            if not _is_held_out(text.prompt):
                return text


def _sum(a: int, b: int, written: int) -> ToyText:
    return ToyText(f"{a}+{b}=", str(written), {"answer": str(a + b)})


def _is_held_out(prompt: str) -> bool:
    return hashlib.blake2b(prompt.encode(), digest_size=1).digest()[0] < _HELD_OUT_BELOW
