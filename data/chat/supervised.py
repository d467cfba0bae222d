"""Data for supervised fine-tuning: conversations and completions with answers to learn.

A batch has the arrays of causal language modeling and ``loss_mask``, int32 [B, T], which is 1 where
the label is learned.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import ClassVar, Literal

import numpy as np

from ..common.errors import DataError, counted
from ..common.fields import require
from ..dataset import ArraySpec, BatchSpec, DataSplit, PickledByFields, Values
from ..packing.packed_sequences import PackedTokens, packed_arrays, packed_specs
from ..packing.packing import first_fit
from ..tokenizers.base import Tokenizer
from .chat_data import ChatData
from .encoding import EncodedChat
from .records import Demonstration, UnusableRecordError, demonstration
from .rows import Row


@dataclass(frozen=True)
class SupervisedExamples(PickledByFields):
    """Sequences of complete demonstrations; see ``dataset.ExampleSource``.

    Attributes:
      tokens: The concatenated tokens of all demonstrations, int32 [num_tokens].
      learned: Whether each token is learned, bool [num_tokens].
      starts: The start of each row in `tokens`, followed by the end of the last row, int64 [n + 1].
        A demonstration consists of one or more rows.
      length: The length of a sequence, T. A row has at most T + 1 tokens.
      packed: Whether several rows share a sequence.
    """

    tokens: np.ndarray
    learned: np.ndarray
    starts: np.ndarray
    length: int
    packed: bool

    @property
    def num_examples(self) -> int:
        """The number of sequences, at least 1."""
        return len(self._plan)

    @property
    def num_learned(self) -> int:
        """The number of tokens learned in an epoch."""
        first = np.zeros(len(self.tokens), bool)
        # The first token of a row is never a label.
        first[self.starts[:-1]] = True
        return int(np.sum(self.learned & ~first))

    def example(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Makes one sequence, which is the same in every epoch."""
        # Concatenate the tokens of the rows in this sequence.
        spans = [(self.starts[i], self.starts[i + 1]) for i in self._plan[index]]
        tokens = np.concatenate([self.tokens[a:b] for a, b in spans])
        # The first token of a row is only an input, and the last token is only a label.
        sizes = np.asarray([b - a - 1 for a, b in spans])
        arrays = packed_arrays(PackedTokens(tokens, sizes), self.length)
        # Tokens are learned as labels, so shift the flags in the same way as the labels.
        learned = np.concatenate([self.learned[a + 1 : b] for a, b in spans])
        arrays["loss_mask"] = np.zeros(self.length, np.int32)
        arrays["loss_mask"][: len(learned)] = learned
        return arrays

    @cached_property
    def _plan(self) -> list[list[int]]:
        """The indices of the rows in each sequence."""
        sizes = np.diff(self.starts) - 1
        if not self.packed:
            return [[row] for row in range(len(sizes))]
        spans, sequence_starts = first_fit(sizes, self.length)
        # Rows are not divided, so each span begins with the first token of a row.
        firsts = np.searchsorted(np.cumsum(sizes) - sizes, spans[:, 0]).tolist()
        edges = sequence_starts.tolist()
        return [firsts[a:b] for a, b in pairwise(edges)]


@dataclass(frozen=True, kw_only=True)
class SupervisedData(ChatData[Demonstration]):
    """Demonstrations of what an assistant should answer."""

    kind: ClassVar[str] = "supervised"

    learn: Literal["answers", "all"] = "answers"
    """answers: learn the assistant's text and the end of its turns. all: learn every token."""
    packing: Literal["first-fit", "none"] = "first-fit"
    """first-fit: several demonstrations share a sequence without attending to each other. none:
    each sequence contains one demonstration.
    """

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
        require(
            record.is_answered,
            f"{location} has no answer to learn: give a message of the role 'assistant' that is "
            "not empty, or leave the record out",
            error=UnusableRecordError,
        )
        yield record

    def demonstrations_of(self, record: Demonstration) -> tuple[Demonstration, ...]:
        """Returns the record."""
        return (record,)

    def encode(
        self, records: Sequence[Demonstration], tokenizer: Tokenizer, seed: int | None
    ) -> DataSplit:
        """Returns the demonstrations as sequences; see ``SupervisedExamples``.

        Demonstrations longer than a sequence are left out, because truncated demonstrations would
        teach incomplete answers. If the chat template rewrites earlier turns, a conversation
        becomes several rows, and each row learns the answers that are unchanged in its text.
        """
        del seed

        def rows_of(record: Demonstration) -> tuple[EncodedChat, ...]:
            rows = record.rows(tokenizer)
            require(
                len(rows) == 1 or self.learn == "answers",
                "the chat template rewrites earlier turns, and data.learn all would repeat "
                "these turns: set data.learn answers",
                error=DataError,
            )
            return rows

        # T + 1 tokens provide T inputs and T labels.
        kept, notes = self.fitting(
            records,
            rows_of,
            lambda rows: max(len(row.ids) for row in rows) - 1,
            noun="demonstration",
            most=self.length,
            setting=f"data.length {self.length}",
        )
        # Store all demonstrations in flat arrays, which are small and quick to pickle.
        rows = [row for _, rows in kept for row in rows]
        ids = [np.asarray(row.ids, np.int32) for row in rows]
        answers = np.concatenate([row.answers for row in rows])
        several = sum(len(rows) > 1 for _, rows in kept)
        if several:
            notes += (
                f"{counted(several, 'demonstration')} of {len(kept):,} in several rows "
                f"({len(rows):,} in all), because the chat template rewrites earlier turns: each "
                "answer follows the text that the model reads before it",
            )
        examples = SupervisedExamples(
            np.concatenate(ids),
            answers | (self.learn == "all"),
            np.cumsum([0, *map(len, ids)]),
            self.length,
            self.packing == "first-fit",
        )
        summary = (
            f"{counted(len(kept), 'demonstration')} in "
            f"{counted(examples.num_examples, 'sequence')}, "
            f"{counted(examples.num_learned, 'token')} of {len(examples.tokens):,} to learn"
        )
        fingerprint = self.fingerprint(records, tokenizer, self.learn, self.packing)
        return DataSplit(examples, list(records), fingerprint, summary, notes)
