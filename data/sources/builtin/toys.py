"""Toy tasks with exactly known answers, endless and without a download.

=================  ========================  ==================  ===============================
name               a prompt                  a document          what a reward may check
=================  ========================  ==================  ===============================
``builtin:sums``   ``7+5=``                  ``7+5=12``          the ``answer``, ``12``
``builtin:words``  ``cat sun``               ``cat sun tea owl   a word, or few letters
                                             box cat``
=================  ========================  ==================  ===============================

In the documents about half of the sums are replaced by a random number, so that a model trained on
them is right about half of the time. Reinforcement learning on the prompts can improve this rate. A
tenth of the prompts of ``words``, chosen by a hash, is held out: training documents do not begin
with held-out prompts. None of the hundred sums is held out.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

NUM_DIGITS = 10
"""``builtin:sums`` adds the digits from 0 to 9."""
WORDS = tuple("ant bee box cat cup dog egg fox hat ice jam key map owl sun tea".split())
"""The words of ``builtin:words``."""
NUM_WORDS = 6
"""The number of words of a document of ``builtin:words``; the first two are its prompt."""
NUM_DOCUMENTS = 4000
"""The number of documents to train a language model on."""
NAMES = ("sums", "words")

_BUILTIN = "builtin:"
# Prompts whose hash has a first byte below 26 are held out: 26 of 256 values, a tenth.
_HELD_OUT_BELOW = 26
# The first number of each seed, so that no two of these purposes draw the same prompts.
_TRAINING, _DOCUMENTS = 11, 12


@dataclass(frozen=True)
class ToyText:
    """A prompt and its continuation.

    Attributes:
      prompt: The prompt.
      continuation: The answer to a sum, right or wrong, or random words. A document is the
        prompt with its continuation.
      fields: Further fields for a reward: the ``answer`` of a sum.
    """

    prompt: str
    continuation: str
    fields: dict[str, str]


@dataclass(frozen=True)
class Toy:
    """An endless source of prompts with exact rewards.

    Attributes:
      name: The name as the user wrote it.
      kind: One of ``NAMES``.
    """

    name: str
    kind: str

    @classmethod
    def parse(cls, name: str) -> "Toy | None":
        """Parses a source name; returns None for another kind of source."""
        kind = name.removeprefix(_BUILTIN)
        return cls(name, kind) if name.startswith(_BUILTIN) and kind in NAMES else None

    def training_text(self, seed: int, epoch: int, index: int) -> ToyText:
        """Returns a training text, a pure function of its arguments.

        Args:
          seed: Seed of the run, any integer.
          epoch: From 0.
          index: From 0.
        """
        return self._draw(np.random.default_rng([_TRAINING, seed % 2**64, epoch, index]))

    def validation_texts(self) -> tuple[ToyText, ...]:
        """Returns a text for each held-out prompt, or for each sum; always the same texts."""
        if self.kind == "sums":
            prompts = product(range(NUM_DIGITS), range(NUM_DIGITS))
            return tuple(_sum(a, b, a + b) for a, b in prompts)
        pairs = [f"{a} {b}" for a, b in product(WORDS, WORDS)]
        return tuple(ToyText(prompt, "", {}) for prompt in pairs if _is_held_out(prompt))

    def documents(self) -> Iterator[str]:
        """Yields the same ``NUM_DOCUMENTS`` training documents each time."""
        rng = np.random.default_rng([_DOCUMENTS])
        for _ in range(NUM_DOCUMENTS):
            text = self._draw(rng)
            yield text.prompt + text.continuation

    def _draw(self, rng: np.random.Generator) -> ToyText:
        if self.kind == "sums":
            a, b = rng.integers(NUM_DIGITS, size=2).tolist()
            # A wrong answer is drawn from all possible sums, so it may be right by chance.
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
