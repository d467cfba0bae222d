"""Represents labeled examples before and after their conversion to arrays."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import numpy as np

from ..common.errors import DataError
from ..common.fields import require, require_value
from ..common.hashing import digest
from ..dataset import ExampleSource, too_long
from ..features.bert_inputs import BertInputs, Template, encode_texts
from ..features.predictions import Prediction
from ..sources.hash_split import HashSplit, Split, text_digest
from ..tokenizers.base import Tokenizer


# The fingerprint of a split hashes the repr of each example, which contains the class name and all
# fields that affect its arrays. If `ClassificationExample`, `SpanExample`, `TaggingExample`,
# `ChoiceExample` or one of these fields is renamed, older runs can no longer be resumed.
class Example(Protocol):
    """A labeled example."""

    @property
    def location(self) -> str:
        """The location of the example, for messages, such as ``train.tsv line 7``."""
        ...

    @property
    def group(self) -> str:
        """A key. All examples of a source with the same key are in the same split."""
        ...

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts of the example, which are used to train a vocabulary."""
        ...


E = TypeVar("E", bound=Example)


class EncodedExamples(ExampleSource, Protocol):
    """Examples that have been converted to arrays, with remarks for the log."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks, such as the number of truncated texts."""
        ...


@dataclass(frozen=True)
class ExampleSet(Generic[E]):
    """The examples of a source, before they are converted to arrays.

    Attributes:
      examples: The examples, at least one.
      class_names: The names of the labels, if the source declares them.
      notes: Remarks for the summary, such as ``IOB1 tags converted to BIO``.
      lines: Additional lines for the log, such as a line about a recognized header.
    """

    examples: tuple[E, ...]
    class_names: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class LabelledExamples(ABC, Generic[E]):
    """The base class of example sources that convert model outputs to predictions.

    Attributes:
      tokens: R sequences of tokens, including special tokens.
      examples: The n examples that the sequences are made from. Predictions are computed from them.
      values: The labels, by default one for each example; None if unknown (in prediction).
      notes: Remarks for the log, such as the number of truncated examples.
    """

    tokens: BertInputs
    examples: tuple[E, ...]
    values: np.ndarray | None
    notes: tuple[str, ...] = ()

    @property
    def num_examples(self) -> int:
        """The number of sequences; see ``ExampleSource``."""
        return len(self.tokens)

    def example(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Makes one example, which is the same in every epoch.

        Returns:
          ``input_ids``, ``attention_mask``, ``token_type_ids``, int32 [T], and the labels if they
          are known.
        """
        # In prediction, labels are unknown, so the batch has no array of labels.
        row = self.row(index)
        return row if self.values is None else {**row, **self.labels_of(index, self.values)}

    def row(self, index: int) -> dict[str, np.ndarray]:
        """Returns all arrays of an example except its labels."""
        return self.tokens.example(index)

    def labels_of(self, index: int, values: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the arrays that contain an example's labels; by default this is ``labels``."""
        return {"labels": np.asarray(values[index])}

    @abstractmethod
    def decode(self, predictions: dict[str, np.ndarray]) -> list[Prediction]:
        """Converts the model's outputs for all sequences to one prediction for each example."""

    def gold(self) -> Sequence[object]:
        """Returns the correct result for each labeled example."""
        return require_value(self.values, "examples to predict have no labels").tolist()


@dataclass(frozen=True)
class ExampleTexts:
    """The distinct texts of examples; see ``token_corpus.Texts``."""

    examples: Sequence[Example]

    @property
    def fingerprint(self) -> str:
        """A hash of all texts in their order."""
        return digest(self)

    def __iter__(self) -> Iterator[str]:
        seen = dict.fromkeys(text for example in self.examples for text in example.texts)
        return iter(seen)


def encoded_texts(
    texts: Sequence[tuple[str, ...]],
    locations: Sequence[str],
    tokenizer: Tokenizer,
    *,
    length: int,
    noun: str,
) -> tuple[BertInputs, tuple[str, ...]]:
    """Tokenizes single texts or pairs of texts; see ``encode_texts``.

    Args:
      texts: The one or two texts of each example.
      locations: The location of each text or pair, for messages.
      tokenizer: The tokenizer.
      length: The length of a sequence, T.
      noun: The singular noun that messages use for a text or pair.

    Returns:
      The tokens, and a note for the log if some texts were truncated.
    """
    template = Template.of(tokenizer, length)
    tokens, num_truncated = encode_texts(texts, tokenizer, template, locations)
    limit = f"data.length {length}"
    return tokens, too_long(num_truncated, len(texts), noun, limit, consequence="truncated")


def divide(whole: ExampleSet[E], fraction: float, name: str) -> dict[Split, ExampleSet[E]]:
    """Divides examples into splits by the hash of their groups, so a group is never divided.

    Args:
      whole: All examples.
      fraction: The fraction of groups for validation, in (0, 1).
      name: The name of the source, for the message.

    Raises:
      DataError: All examples are in one group.
    """
    # All examples of a group have the same digest, so they are in the same split.
    digests = [text_digest(example.group) for example in whole.examples]
    require(
        len(set(digests)) > 1,
        f"all examples of {name!r} have the same text, so none is left to validate on: name "
        "another source for validation",
        error=DataError,
    )
    division = HashSplit.of(digests, fraction, name)
    parts: dict[Split, list[E]] = {"train": [], "validation": []}
    for example, key in zip(whole.examples, digests, strict=True):
        parts[division.split(key)].append(example)
    # Only the training examples get the lines about how the file was read, which are logged once.
    return {
        split: replace(
            whole, examples=tuple(examples), lines=whole.lines if split == "train" else ()
        )
        for split, examples in parts.items()
    }
