"""Supervised fine-tuning: conversations and completions whose answers are learned.

A batch has the arrays of causal language modeling, and ``loss_mask``, int32 [B, T]: 1 where the
label is learned.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import ClassVar, Literal

import numpy as np

from ..common.errors import DataError
from ..dataset import ArraySpec, BatchSpec, DataSplit, PickledByFields, Values, counted, too_long
from ..packing.packed_sequences import PackedTokens, packed_arrays, packed_specs
from ..packing.packing import first_fit
from ..tokenizers.base import Tokenizer
from .chat_data import ChatData, Unusable
from .records import Demonstration, Dialogue, UnusableRecordError, demonstration
from .rows import Row


@dataclass(frozen=True)
class SupervisedExamples(PickledByFields):
    """Sequences of whole demonstrations; see ``dataset.ExampleSource``.

    Attributes:
      tokens: The concatenated tokens of all demonstrations, int32 [num_tokens].
      learned: Whether each token is learned, bool [num_tokens].
      starts: The start of each demonstration, and the end of the last one, int64 [n + 1].
      length: The length of a sequence, T. A demonstration has at most T + 1 tokens.
      packed: Whether several demonstrations share a sequence.
    """

    tokens: np.ndarray
    learned: np.ndarray
    starts: np.ndarray
    length: int
    packed: bool

    @property
    def num_examples(self) -> int:
        """The number of sequences, at least 1."""
        return len(self._plan) if self.packed else len(self.starts) - 1

    @property
    def num_learned(self) -> int:
        """The number of tokens that are learned in an epoch."""
        first = np.zeros(len(self.tokens), bool)
        first[self.starts[:-1]] = True  # the first token of a demonstration is never a label
        return int(np.sum(self.learned & ~first))

    def example(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Makes one sequence, the same in every epoch; see the top of this file."""
        chosen = self._plan[index] if self.packed else [index]
        spans = [(self.starts[i], self.starts[i + 1]) for i in chosen]
        tokens = np.concatenate([self.tokens[a:b] for a, b in spans])
        # The first token is only an input and the last one only a label.
        sizes = np.asarray([b - a - 1 for a, b in spans])
        arrays = packed_arrays(PackedTokens(tokens, sizes), self.length)
        learned = np.concatenate([self.learned[a + 1 : b] for a, b in spans])
        arrays["loss_mask"] = np.zeros(self.length, np.int32)
        arrays["loss_mask"][: len(learned)] = learned
        return arrays

    @cached_property
    def _plan(self) -> list[list[int]]:
        """The demonstrations of each sequence."""
        sizes = np.diff(self.starts) - 1
        spans, sequence_starts = first_fit(sizes, self.length)
        # No demonstration is divided, so each span begins where a demonstration does.
        firsts = np.searchsorted(np.cumsum(sizes) - sizes, spans[:, 0]).tolist()
        edges = sequence_starts.tolist()
        return [firsts[a:b] for a, b in pairwise(edges)]


@dataclass(frozen=True, kw_only=True)
class SupervisedData(ChatData[Demonstration]):
    """Demonstrations of what an assistant should answer."""

    kind: ClassVar[str] = "supervised"

    learn: Literal["answers", "all"] = "answers"
    """answers: learn what the assistant wrote, and the end of its turns. all: every token."""
    packing: Literal["first-fit", "none"] = "first-fit"
    """first-fit: demonstrations share a sequence without attending to each other. none: one
    demonstration per sequence."""

    def batch_spec(self, num_labels: int, num_choices: int) -> BatchSpec:
        """See ``DataConfig``."""
        del num_labels, num_choices
        return {**packed_specs(self.length), "loss_mask": ArraySpec((self.length,), Values.MASK)}

    def records_of(self, row: Row, location: str) -> Iterator[Demonstration]:
        """Yields the demonstration of a record.

        Raises:
          DataError: The record has no known form, or no answer of the assistant.
        """
        record = demonstration(row, location)
        if isinstance(record, Dialogue) and not record.is_answered:
            roles = ", ".join(str(message["role"]) for message in record.messages)
            raise UnusableRecordError(
                f"{location} has no answer to learn (roles: {roles}): give a message of the role "
                "'assistant' that is not empty, or leave the record out"
            )
        yield record

    def demonstrations_of(self, record: Demonstration) -> tuple[Demonstration, ...]:
        """Returns the record."""
        return (record,)

    def encode(
        self, records: Sequence[Demonstration], tokenizer: Tokenizer, seed: int | None
    ) -> DataSplit:
        """Returns the demonstrations as sequences; see ``SupervisedExamples``.

        Demonstrations longer than a sequence are left out: cut, they would teach answers without an
        end.
        """
        del seed
        ids: list[np.ndarray] = []
        learned: list[np.ndarray] = []
        unusable = Unusable(self.strict)
        for record in records:
            try:
                encoded = record.encode(tokenizer)
            except DataError as error:
                unusable.add(error, record.location)
                continue
            # T + 1 tokens give T inputs and T labels.
            if len(encoded.ids) > self.length + 1:
                continue
            answers = np.asarray(encoded.answers)
            ids.append(np.asarray(encoded.ids, np.int32))
            learned.append(np.ones_like(answers) if self.learn == "all" else answers)
        unusable.check(len(records) - unusable.number, "demonstration")
        if not ids:
            raise DataError(
                f"none of {counted(len(records), 'demonstration')} fits {self.length} tokens: "
                "give a larger data.length"
            )
        examples = SupervisedExamples(
            np.concatenate(ids),
            np.concatenate(learned),
            np.cumsum([0, *map(len, ids)]),
            self.length,
            self.packing == "first-fit",
        )
        summary = (
            f"{counted(len(ids), 'demonstration')} in "
            f"{counted(examples.num_examples, 'sequence')}, "
            f"{counted(examples.num_learned, 'token')} of {len(examples.tokens):,} to learn"
        )
        over_long = len(records) - len(ids) - unusable.number
        notes = too_long(over_long, len(records), "demonstration", f"data.length {self.length}")
        notes += unusable.note(len(records), "demonstration")
        fingerprint = self.fingerprint(records, tokenizer, self.learn, self.packing)
        return DataSplit(examples, list(records), fingerprint, summary, notes)
