"""Random-access data sets of examples, and the description of their arrays."""

from dataclasses import Field, dataclass
from enum import Enum
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np


def counted(number: int, noun: str) -> str:
    """Returns a number and its noun for a message, such as `1 document` or `2,000 documents`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def too_long(
    number: int, of: int, noun: str, limit: str, *, consequence: str = "left out"
) -> tuple[str, ...]:
    """Returns the line of a log that counts what is longer than a sequence; none if nothing is.

    The data guide says which kinds of data leave such examples out, and which truncate them.

    Args:
      number: How many are too long.
      of: How many there are.
      noun: What they are, for one of them: ``pair``.
      limit: The setting that they exceed, and its value: ``data.length 128``.
      consequence: What happens to them.
    """
    if not number:
        return ()
    return (f"{number:,} of {counted(of, noun)} {consequence}: longer than {limit}",)


class Values(Enum):
    """The meaning of an array's values, and thereby their range; every array is at least 0."""

    SOURCE_TOKEN = "source_token"
    """Ids of input tokens, below the size of the vocabulary (the source's, where there are two)."""
    TARGET_TOKEN = "target_token"
    """Ids of tokens that a decoder reads or that are predicted, below the vocabulary size."""
    TOKEN_TYPE = "token_type"
    """0 for the first text of an example, 1 for the second."""
    MASK = "mask"
    """1 at what counts, 0 at padding."""
    SEGMENT = "segment"
    """The number of the text within the example, from 1; 0 at padding."""
    TEXT_POSITION = "text_position"
    """The position of a token within its segment, from 0."""
    INDEX = "index"
    """The position of a token within the example, below the example's length."""
    LABEL = "label"
    """Class ids below `ArraySpec.num_classes`, or scores (any float) where that is 0."""


@dataclass(frozen=True)
class ArraySpec:
    """One array of an example, as far as it is known before any data are read.

    Attributes:
      shape: Without the batch axis.
      values: What the numbers mean, and thereby their range.
      dtype: The numpy name of the type.
      num_classes: The exclusive upper bound of class ids; 0 for other values.
    """

    shape: tuple[int, ...]
    values: Values
    dtype: str = "int32"
    num_classes: int = 0


BatchSpec = dict[str, ArraySpec]
"""The arrays of one example of a batch, by name."""


class PickledByFields:
    """A dataclass that pickles its fields alone.

    Cached properties stay behind: a worker process opens files and maps arrays itself.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __getstate__(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@runtime_checkable
class ExampleSource(Protocol):
    """A random-access data set of examples.

    Every example is a pure function of its epoch and index. The object must pickle, because
    worker processes make examples, too.
    """

    @property
    def num_examples(self) -> int:
        """The number of examples in an epoch, at least 1 and below 2^32."""
        ...

    def example(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Returns example `index` of `epoch` as fixed-shape arrays; all zeros is padding."""
        ...


@dataclass(frozen=True)
class DataSplit:
    """One split of a data set, ready for batching.

    Attributes:
      examples: The examples as arrays. Training examples may differ between epochs.
      content: The source of the examples: a corpus, or the list of all labelled examples,
        including those that are left out of training.
      fingerprint: A stable hash of the texts or examples and of the tokenizer. For labelled
        data it also covers the settings; for other data config.json has the settings.
      summary: A line for the log: ``400 documents, 929,728 tokens``.
      notes: Further lines for the log: the labels with their counts, a header that was
        recognized, a label that occurs once.
    """

    examples: ExampleSource
    content: Any
    fingerprint: str
    summary: str
    notes: tuple[str, ...] = ()
