"""Pairs of a preferred and a rejected text, as examples for reward models and DPO.

In the arrays of an example, the chosen text comes before the rejected text; see ``train.reward``
and ``train.dpo``. Both texts of a pair are in one example, so a pair is never split.
"""

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..common.errors import DataError, counted
from ..common.fields import require
from ..dataset import ArraySpec, BatchSpec, DataSplit, PickledByFields, Values, stacked
from ..tokenizers.base import Tokenizer
from .chat_data import ChatData
from .encoding import EncodedChat
from .records import Demonstration, Preference, preferences
from .rows import Row

Encoded = tuple[np.ndarray, np.ndarray]
"""The tokens of a text, int32 [n], and whether each token is in the answer, bool [n]."""


@dataclass(frozen=True)
class PairExamples(PickledByFields):
    """Pairs of texts, each text in a separate padded sequence; see ``dataset.ExampleSource``.

    Attributes:
      chosen: The better text of each pair.
      rejected: The worse text of each pair.
      weights: The weight of each pair, float32 [n].
      margins: How much better the chosen text of each pair is, float32 [n]; None if the data have
        no margins.
      length: The length of a sequence, T.
      shifted: Whether the example has labels (for each token, the next token) and a mask of the
        answer. If true, a text has up to T + 1 tokens, and all tokens except the last are inputs.
      reference_log_probs: The log-probability of each answer under a reference model, in nats,
        float32 [n, 2]. None if the training step computes these log-probabilities or does not need
        them.
    """

    chosen: tuple[Encoded, ...]
    rejected: tuple[Encoded, ...]
    weights: np.ndarray
    margins: np.ndarray | None
    length: int
    shifted: bool
    reference_log_probs: np.ndarray | None = None

    @property
    def num_examples(self) -> int:
        """The number of pairs."""
        return len(self.weights)

    def example(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Makes the example of a pair, which is the same in every epoch."""
        # Row 0 is the chosen text, and row 1 is the rejected text. Both are padded on the right.
        rows = [self._row(*self.chosen[index]), self._row(*self.rejected[index])]
        arrays = stacked(rows)
        arrays["pair_weights"] = self.weights[index]
        if self.margins is not None:
            arrays["margin"] = self.margins[index]
        if self.reference_log_probs is not None:
            arrays["reference_log_probs"] = self.reference_log_probs[index]
        return arrays

    def _row(self, ids: np.ndarray, answer: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the arrays of a text, int32 [T] each."""
        # If there are labels, the last token is only a label.
        unpadded = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        if self.shifted:
            unpadded = {"input_ids": ids[:-1], "attention_mask": np.ones_like(ids[1:])}
            unpadded |= {"labels": ids[1:], "loss_mask": answer[1:]}
        row = {name: np.zeros(self.length, np.int32) for name in unpadded}
        for name, values in unpadded.items():
            row[name][: len(values)] = values
        return row


@dataclass(frozen=True, kw_only=True)
class PreferenceData(ChatData[Preference]):
    """Pairs of a better and a worse answer."""

    shifted: ClassVar[bool]

    def records_of(self, row: Row, location: str) -> Iterator[Preference]:
        """Yields the preferences in a record."""
        return preferences(row, location)

    def demonstrations_of(self, record: Preference) -> tuple[Demonstration, ...]:
        """Returns both texts of a pair."""
        return record.chosen, record.rejected

    def batch_spec(self, num_labels: int, num_choices: int) -> BatchSpec:
        """See ``DataConfig``."""
        del num_labels, num_choices
        row = (2, self.length)
        spec = {
            "input_ids": ArraySpec(row, Values.SOURCE_TOKEN),
            "attention_mask": ArraySpec(row, Values.MASK),
        }
        if self.shifted:
            spec["labels"] = ArraySpec(row, Values.TARGET_TOKEN)
            spec["loss_mask"] = ArraySpec(row, Values.MASK)
        return spec | {"pair_weights": ArraySpec((), Values.LABEL, "float32")}

    @abstractmethod
    def tokens_of(self, encoded: EncodedChat, tokenizer: Tokenizer) -> Encoded:
        """Returns the tokens of a text, and which of them are in the answer."""

    def encode(
        self, records: Sequence[Preference], tokenizer: Tokenizer, seed: int | None
    ) -> DataSplit:
        """Returns the pairs; see ``PairExamples``.

        Pairs with a text that is longer than a sequence are left out, because the preference
        applies only to complete answers.
        """
        del seed

        def encode(record: Preference) -> tuple[Encoded, Encoded]:
            texts = [one.encode(tokenizer) for one in (record.chosen, record.rejected)]
            chosen, rejected = (self.tokens_of(text, tokenizer) for text in texts)
            return chosen, rejected

        # If there are labels, T + 1 tokens provide T inputs.
        fitting, notes = self.fitting(
            records,
            encode,
            lambda both: max(len(ids) for ids, _ in both) - self.shifted,
            noun="pair",
            most=self.length,
            setting=f"data.length {self.length}",
        )
        # Equal texts express no preference.
        kept = [(record, *both) for record, both in fitting if not _are_equal(*both)]
        equal = f"{len(fitting) - len(kept):,} of {counted(len(records), 'pair')}"
        require(kept, f"{equal} have equal texts: give other pairs", error=DataError)
        if len(kept) < len(fitting):
            notes += (f"{equal} left out: equal texts",)
        # The log-probabilities of two answers are comparable only if both follow the same prompt.
        if self.shifted:
            for _, *both in kept:
                _align_starts(*both)
        content, chosen, rejected = zip(*kept, strict=True)
        # If the data have no margins, the example has no such array.
        margins = np.asarray([record.margin for record in content], np.float32)
        examples = PairExamples(
            chosen=chosen,
            rejected=rejected,
            weights=np.asarray([record.weight for record in content], np.float32),
            margins=margins if margins.any() else None,
            length=self.length,
            shifted=self.shifted,
        )
        fingerprint = self.fingerprint(records, tokenizer)
        return DataSplit(examples, [*content], fingerprint, counted(len(kept), "pair"), notes)


def _are_equal(chosen: Encoded, rejected: Encoded) -> bool:
    return np.array_equal(chosen[0], rejected[0])


def _align_starts(*both: Encoded) -> None:
    """Makes the answers of both texts begin at the same position, as in TRL.

    The positions can differ if a token of one text spans the border between prompt and answer.
    """
    first = min(int(answer.argmax()) for _, answer in both)
    for _, answer in both:
        answer[first : int(answer.argmax())] = True


@dataclass(frozen=True, kw_only=True)
class RewardData(PreferenceData):
    """Pairs of answers for training a reward model."""

    kind: ClassVar[str] = "reward"
    shifted: ClassVar[bool] = False

    def labels(self) -> tuple[str, ...]:
        """Returns the name of the single output, the reward."""
        return ("reward",)

    def assumed_labels(self) -> tuple[str, ...]:
        """See ``labels``."""
        return ("reward",)

    def tokens_of(self, encoded: EncodedChat, tokenizer: Tokenizer) -> Encoded:
        """Returns the tokens of a text, including the special tokens of a classifier's input."""
        ids = as_classified(encoded.ids, tokenizer)
        return np.asarray(ids, np.int32), np.ones(len(ids), bool)


def as_classified(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """Adds the special tokens of a classifier's input to the tokens of a text.

    If these special tokens already surround the text, they are not added again.
    """
    # The encoding of a completion has special tokens, unlike the encoding of a conversation.
    before, after = map(list, tokenizer.frame.single.marks)
    has_frame = ids[: len(before)] == before and ids[len(ids) - len(after) :] == after
    return ids if tokenizer.special_ids.cls is None or has_frame else [*before, *ids, *after]


ReferenceFn = Callable[[PairExamples], np.ndarray]
"""Maps pairs to log-probabilities of their answers under a reference model, float32 [n, 2]."""


@dataclass(frozen=True, kw_only=True)
class DPOData(PreferenceData):
    """Pairs of answers for training a language model by direct preference optimization (DPO)."""

    kind: ClassVar[str] = "dpo"
    shifted: ClassVar[bool] = True

    _reference: ClassVar[ReferenceFn | None] = None  # set by with_reference

    def with_reference(self, reference: ReferenceFn) -> "DPOData":
        """Returns the same data with log-probabilities under a reference model in the examples.

        Args:
          reference: The function that computes these log-probabilities. ``dataclasses.replace``
            copies only the settings, so it drops this function.
        """
        # This value is not a field, because the fields are the user's settings.
        bound = dataclasses.replace(self)
        object.__setattr__(bound, "_reference", reference)
        return bound

    def tokens_of(self, encoded: EncodedChat, tokenizer: Tokenizer) -> Encoded:
        """Returns all tokens; the first is only an input, and the last is only a label."""
        del tokenizer
        return np.asarray(encoded.ids, np.int32), np.asarray(encoded.answers)

    def encode(
        self, records: Sequence[Preference], tokenizer: Tokenizer, seed: int | None
    ) -> DataSplit:
        """Returns the pairs, with log-probabilities if there is a reference function."""
        split = super().encode(records, tokenizer, seed)
        if self._reference is None:
            return split
        assert isinstance(split.examples, PairExamples)
        # Compute the log-probabilities once for all epochs.
        found = self._reference(split.examples)
        examples = dataclasses.replace(split.examples, reference_log_probs=found)
        return dataclasses.replace(split, examples=examples)
