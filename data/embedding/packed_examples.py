"""Anchors with their documents, with several whole examples in each row."""

from dataclasses import dataclass

import numpy as np

from ..common.errors import DataError, counted
from ..common.fields import require
from ..dataset import PickledByFields
from ..orders.distinct import ABSENT, distinct_order
from ..packing.packing import best_fit
from .embedding_examples import EmbeddingExamples


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedExamples(PickledByFields):
    """Rows of several examples. See ``dataset.OrderedExamples`` and ``embedding_data``.

    Attributes:
      examples: The examples, from a single data set, without labels.
      members: The examples of each row, or ``ABSENT``, int32 [rows, S].
      length: The number of tokens of a row, L.
      notes: Notes for the log.
    """

    examples: EmbeddingExamples
    members: np.ndarray
    length: int
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, examples: EmbeddingExamples, length: int) -> "PackedExamples":
        """Assigns the examples to rows. No text occurs twice in a row.

        The rows are the same in every epoch. For losses on scores, equal texts may be in the same
        row.

        Raises:
          DataError: An example is longer than a row.
        """
        sizes = _sizes(examples)
        longest = int(sizes.max())
        require(
            longest <= length,
            f"data.row_length {length} must be at least {longest}, the number of tokens of the "
            "longest example with all of its texts: raise it, or lower data.length",
            DataError,
        )
        rows = _rows(sizes, _keys(examples), length)
        # [rows, S], where S is the largest number of examples in a row.
        members = np.full((len(rows), max(map(len, rows))), ABSENT, np.int32)
        for row, members_of_row in zip(members, rows, strict=True):
            row[: len(members_of_row)] = members_of_row
        filled = sizes.sum() / (len(rows) * length)
        note = (
            f"packed into {counted(len(rows), 'row')} of {length} tokens, {filled:.0%} full, with "
            f"up to {members.shape[1]} examples; batch_size counts rows"
        )
        return cls(examples=examples, members=members, length=length, notes=(*examples.notes, note))

    @property
    def num_examples(self) -> int:
        """The number of rows."""
        return len(self.members)

    def batches(self, batch_size: int, seed: int, epoch: int) -> np.ndarray | None:
        """See ``dataset.OrderedExamples``. The rows of a batch have no text in common."""
        if "scores" in self.examples.targets:
            return None
        keys = self.examples.text_keys
        # [rows, S, 1 + C] to [rows, S · (1 + C)].
        absent = self.members[:, :, None] == ABSENT
        return distinct_order(
            np.where(absent, ABSENT, keys[self.members]).reshape(len(self.members), -1),
            batch_size,
            seed,
            epoch,
        )

    def example(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Makes one row, which is the same in every epoch."""
        del epoch
        examples, members = self.examples, self.members[index]
        # The index of each text in `queries` or `documents`, [S, 1 + C].
        texts = np.where(members[:, None] == ABSENT, ABSENT, examples.rows[members])
        pad = examples.queries.template.pad
        input_ids = np.full(self.length, pad, np.int32)
        segment_ids = np.zeros(self.length, np.int32)
        end = 0
        # The segment of a text is its index in the flattened `texts`, from 1.
        for segment, text in enumerate(texts.ravel().tolist(), start=1):
            if text == ABSENT:
                continue
            is_anchor = segment % texts.shape[1] == 1
            ids = (examples.queries if is_anchor else examples.documents).tokens(text)
            start, end = end, end + len(ids)
            input_ids[start:end], segment_ids[start:end] = ids, segment
        targets = {}
        for name, values in examples.targets.items():
            # Targets [S] or [S, C], with 0 for absent examples.
            shape = (-1, *[1] * (values.ndim - 1))
            targets[name] = np.where(members.reshape(shape) == ABSENT, 0, values[members])
        return {
            "input_ids": input_ids,
            "segment_ids": segment_ids,
            "text_mask": (texts != ABSENT).astype(np.int32),
            **targets,
        }


def _sizes(examples: EmbeddingExamples) -> np.ndarray:
    """Returns the number of tokens of each example with all of its texts, int64 [n]."""
    anchors, documents = np.split(examples.rows, [1], axis=1)
    queries, others = (np.diff(x.starts) for x in (examples.queries, examples.documents))
    return queries[anchors[:, 0]] + np.where(documents == ABSENT, 0, others[documents]).sum(axis=1)


def _keys(examples: EmbeddingExamples) -> list[set[int]]:
    """Returns the keys of the texts of each example that no other example of its row may have."""
    if "scores" in examples.targets:
        return [set()] * len(examples.rows)
    return [{*row} - {ABSENT} for row in examples.text_keys.tolist()]


def _rows(sizes: np.ndarray, keys: list[set[int]], length: int) -> list[list[int]]:
    """Assigns examples to rows of at most `length` tokens, without a common text in a row."""
    rows: list[list[int]] = []
    left = np.arange(len(sizes))
    while len(left):
        members, starts = best_fit(sizes[left], sizes[left], (length, length), seed=len(rows))
        repeated: list[int] = []
        for row in np.split(left[members], starts[1:-1]):
            present: set[int] = set()
            kept: list[int] = []
            for index in row.tolist():
                if present.isdisjoint(keys[index]):
                    kept.append(index)
                    present |= keys[index]
                else:  # wait for the next round
                    repeated.append(index)
            rows.append(kept)
        left = np.array(repeated, np.int64)
    return rows
